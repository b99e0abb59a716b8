"""Images as tokens, through the text engine as it is: a decoder over a codebook of patches of handwritten digits.

    python examples/image_tokens.py --out benchmarks/results/processes.jsonl --picture docs/processes_image_tokens.png

The 8 x 8 digits of scikit-learn are cut into patches of 1 x 2, whose 64 centres (k-means) are the codebook: an image is
32 tokens behind one for its class. The target is a Llama of 4 layers, the draft one of a single layer; both are trained
here. Images are sampled at temperature 1.
"""

from __future__ import annotations

import time
from argparse import Namespace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from measuring import arguments, finish, spread
from truedraft import Engine, SamplingParams, pictures
from truedraft.certify import Stack, certify
from truedraft.drafters import DraftModel
from truedraft.engine.policy import FixedBudget
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import SpeculativeSampling

CODES, LENGTH, CLASSES = 64, 32, 10


def images() -> tuple[Tensor, Tensor]:
    """All 1797 images as patches `[images, 32, 2]`, from 0 to 1, and their classes `[images]`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32).view(-1, LENGTH, 2) / 16.0, torch.tensor(data.target)


def codebook(patches: Tensor) -> Tensor:
    """Centres `[codes, 2]` by k-means."""
    torch.manual_seed(0)
    flat = patches.flatten(0, 1)
    distinct = flat.unique(dim=0)
    centres = distinct[torch.randperm(len(distinct))[:CODES]]
    for _ in range(20):
        nearest = torch.cdist(flat, centres).argmin(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, flat)
        counts = torch.bincount(nearest, minlength=CODES)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


def trained(tokens: Tensor, layers: int, width: int, seconds: float) -> HuggingFaceModel:
    """A decoder that was trained on texts `[images, 1 + 32]` for a while."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=CODES + CLASSES,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model, began = LlamaForCausalLM(config), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    while (spent := time.perf_counter() - began) < seconds:
        optimizer.param_groups[0]["lr"] = 2e-3 * max(1.0 - spent / seconds, 0.02)
        batch = tokens[torch.randint(len(tokens), (64,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"a decoder of {layers} layers of width {width}: loss {loss.item():.3f} after {seconds:.0f} s")
    return HuggingFaceModel(model, None, f"digits-{layers}x{width}")


def way(engine: Engine, count: int) -> tuple[list[list[int]], int, float, float]:
    """Images one after another: their tokens, calls of the target, seconds by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = [
        engine.generate([CODES + number % CLASSES], SamplingParams(temperature=1.0, max_tokens=LENGTH))
        for number in range(count)
    ]
    calls = sum(answer.stats.target_calls + answer.stats.prefill_calls for answer in answers)
    return [answer.token_ids for answer in answers], calls, time.perf_counter() - wall, time.process_time() - cpu


def picture(options: Namespace, centres: Tensor, found: dict[str, list[list[int]]]) -> None:
    """Images by each way."""
    figure, axes = pictures.new_figure(0.3 + 0.8 * len(found))
    axes.remove()
    for row, (name, every) in enumerate(found.items()):
        for column, tokens in enumerate(every[:CLASSES]):
            place = figure.add_subplot(len(found), CLASSES, row * CLASSES + column + 1)
            place.imshow(-centres[torch.tensor(tokens).clamp_max(CODES - 1)].view(8, 8), cmap="gray")
            place.set(xticks=[], yticks=[])
            if not column:
                place.set_ylabel(name, fontsize=7)
    figure.savefig(options.picture, dpi=100)


def main() -> None:
    """Run the example."""
    parser = arguments("Image tokens through the text engine, plain and with a draft model.", LENGTH)
    parser.add_argument("--images", type=int, default=20, help="for each run (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training (default: %(default)s)")
    parser.add_argument("--certify", type=float, default=20.0, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    patches, classes = images()
    centres = codebook(patches)
    tokens = torch.cat([CODES + classes[:, None], torch.cdist(patches, centres).argmin(-1)], dim=1)
    target, draft = trained(tokens, 4, 256, options.seconds), trained(tokens, 1, 64, options.seconds / 3)
    drafter = DraftModel(draft, options.window)
    engines = {
        "plain": Engine(target),
        "draft model": Engine(target, drafter, controller=FixedBudget()),
        "draft model, chosen window": Engine(target, DraftModel(draft, options.window)),
    }
    runs = turns(engines, options)
    plain = runs["plain"]
    record = {
        "example": "image_tokens",
        "steps": LENGTH,
        "window": options.window,
        "ways": {
            name: {
                "sequential_calls": sum(each[1] for each in own) / len(own),
                "seconds": sorted(each[2] for each in own)[len(own) // 2],
                "fewer_calls": spread([before[1] / each[1] for before, each in zip(plain, own, strict=True)]),
                "speedup": spread([before[2] / each[2] for before, each in zip(plain, own, strict=True)]),
                "cpu_speedup": spread([before[3] / each[3] for before, each in zip(plain, own, strict=True)]),
            }
            for name, own in runs.items()
        },
    }
    stack = Stack(target, DraftModel(draft, options.window), SpeculativeSampling())
    prompts = [[CODES + number, *tokens[number].tolist()[1:9]] for number in range(CLASSES)]
    report = certify(stack, prompts, SamplingParams(temperature=1.0, max_tokens=16), seconds=options.certify)
    record["certificate"] = {
        "failed": [finding.name for finding in report.failures],
        "holds": [finding.name for finding in report.findings if finding.status.value == "holds"],
    }
    finish(options, record)
    if options.picture is not None:
        picture(options, centres, {name: own[0][0] for name, own in runs.items() if "chosen" not in name})


def turns(engines: dict[str, Engine], options: Namespace) -> dict[str, list[tuple[list[list[int]], int, float, float]]]:
    """Runs of all ways in turns."""
    runs: dict[str, list[tuple[list[list[int]], int, float, float]]] = {name: [] for name in engines}
    for _ in range(options.turns):
        for name, engine in engines.items():
            runs[name].append(way(engine, options.images))
    return runs


if __name__ == "__main__":
    main()
