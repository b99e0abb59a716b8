"""A model in several processes against the same in one: answers, drafters, a certificate, and a process that is killed.

    python benchmarks/tensor_parallel.py MODEL COUNT [DRAFTER...] [--dtype float32] [--seconds 120]

Adds a line of JSON to benchmarks/results/tensor_parallel.jsonl. Times are of a machine that may be busy.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from common import RESULTS, Lines, note
from truedraft import Engine, SamplingParams, load_model
from truedraft.certify import Stack, certify
from truedraft.core.tree import chain_shape
from truedraft.drafters.specs import from_spec
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import ModelError
from truedraft.machine import dtype_name, this_machine
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import SpeculativeSampling

TEXTS = (
    "The capital of France is",
    "def area(radius):\n    ",
    "How do bees make honey? Bees make honey from the nectar of flowers. A bee carries nectar back to the hive",
    "import os\nimport sys\n\ndef main():\n",
)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("count", type=int)
    parser.add_argument("drafters", nargs="*", default=["prompt-lookup"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the certificate; 0 makes none")
    options = parser.parse_args()
    params = SamplingParams(options.tokens, ignore_eos=True)
    one = load_model(options.model, dtype=options.dtype)
    assert one.tokenizer is not None
    prompts = [one.tokenizer.encode(text) for text in TEXTS]
    alone = [answer.token_ids for answer in Engine(one).generate(prompts, params)]
    many = load_model(options.model, dtype=options.dtype, tensor_parallel=options.count)
    plain = {seed: answers(many, None, prompts, params, seed) for seed in (None, 7)}
    record: dict[str, Any] = {
        "model": type(many.module).__name__,
        "parameters": many.parameters,
        "processes": options.count,
        "dtype": dtype_name(many.dtype),
        "equality": many.equality,
        "answers": len(prompts),
        "tokens": options.tokens,
        "margins_where_one_process_differs": [
            margin
            for each in zip(prompts, alone, plain[None], strict=True)
            if (margin := first_difference(one, *each)) is not None
        ],
        "row_ms": {1: row_ms(one), options.count: row_ms(many)},
        "identical_to_plain": {
            words.partition(":")[0]: all(answers(many, words, prompts, params, seed) == plain[seed] for seed in plain)
            for words in options.drafters
        },
    }
    if options.seconds:
        note("certificate")
        stack = Stack(many, from_spec(options.drafters[0], many), SpeculativeSampling(), entropy=1)
        report = certify(stack, prompts, SamplingParams(16, temperature=0.0), seconds=options.seconds)
        record["certificate"] = report.verdict
    record["killed_to_error_s"] = killed(many, prompts[0])
    Lines(RESULTS / "tensor_parallel.jsonl").add(record | {"machine": this_machine()})


def answers(
    model: LanguageModel, words: str | None, prompts: Sequence[list[int]], params: SamplingParams, seed: int | None
) -> list[list[int]]:
    """Token ids, greedy, or drawn by a seed."""
    drawn = params if seed is None else SamplingParams(params.max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    note(f"{words or 'plain'}, seed {seed}")
    engine = Engine(model, None if words is None else from_spec(words, model), controller=controller_from_spec("fixed"))
    return [answer.token_ids for answer in engine.generate(list(prompts), drawn)]


def first_difference(
    model: LanguageModel, prompt: Sequence[int], own: Sequence[int], other: Sequence[int]
) -> float | None:
    """By how much the model prefers its own token where the answers part; None where they do not."""
    place = next((i for i, (left, right) in enumerate(zip(own, other, strict=True)) if left != right), None)
    if place is None:
        return None
    text = [*prompt, *own[:place]]
    with model.trying() as cache:
        segment = Segment(cache, torch.tensor(text), chain_shape(len(text)), (len(text) - 1,))
        logits = model.forward([segment]).logits[0].float()
    return float(logits[own[place]] - logits[other[place]])


def row_ms(model: LanguageModel, count: int = 20) -> float:
    """Milliseconds of a forward of one row, the median of some."""
    times = []
    with model.trying() as cache:
        for _ in range(count):
            began = time.perf_counter()
            model.forward([Segment(cache, torch.tensor([1]), chain_shape(1), (0,))])
            times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[count // 2]


def killed(model: HuggingFaceModel, prompt: list[int]) -> float:
    """Seconds from a kill -9 of the last process, in the middle of an answer, to the error; the model is over then."""
    stream = Engine(model).stream(prompt, SamplingParams(1000, ignore_eos=True))
    next(stream)
    os.kill(model._backend._ranks.others[-1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    began = time.perf_counter()
    try:
        for _ in stream:
            pass
    except ModelError:
        return time.perf_counter() - began
    raise SystemExit("the answer came to its end although a process was killed")


if __name__ == "__main__":
    main()
