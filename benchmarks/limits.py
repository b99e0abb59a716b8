"""Forwards against the memory's limit, a draft step, sampling, and starting up: `make bench-limits`, `make bench-gpu`.

Writes one JSON object. Bandwidth is measured before and after each model, in the same process, and the best of it
counts: B = bytes of weights / that bandwidth. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from truedraft import SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import batch_probs
from truedraft.core.proposal import Proposal
from truedraft.core.tree import chain_shape
from truedraft.costs import read_bandwidth
from truedraft.drafters import DraftModel
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.machine import this_machine, wait_for
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import SpeculativeSampling

CONTEXT = 256
ROWS = (1, 2, 4, 5, 8, 12, 16)


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/limits.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["own:bfloat16", "110M:bfloat16", "110M:float32", "500M:bfloat16"],
        help="SIZE:DTYPE, where SIZE is a padding size or own",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sizes = [size.split(":") for size in options.sizes]
    found: dict[str, Any] = {
        "what": "forwards of one request behind 256 cached tokens, a draft step, sampling, starting up; medians",
        "machine": dataclasses.asdict(this_machine(device)),
        "torch": torch.__version__,
        "threads": options.threads,
        "forwards": [forward_times(size, dtype, device, options.rounds) for size, dtype in sizes],
        "draft_step_s": draft_step(device, 20 * options.rounds),
        "sampling_s": sampling(device, 4 * options.rounds),
        "start_s": {"import": start("import truedraft"), "help": start("help")},
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def median_s(work: Callable[[], object], device: torch.device, rounds: int, times: int = 3) -> float:
    """Seconds of one call: the median over rounds of a few calls each."""
    found = []
    for _ in range(rounds):
        work()
        wait_for(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        wait_for(device)
        found.append((time.perf_counter() - began) / times)
    return statistics.median(found)


def forward_times(size: str, dtype: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Forwards of some rows, interleaved, against B."""
    model = load_model("embedded:target", pad_to=None if size == "own" else size, dtype=dtype, device=device)
    bandwidth = read_bandwidth(device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (CONTEXT + max(ROWS),), generator=generator).to(device)
    cache = model.new_cache()
    model.forward([Segment(cache, ids[:CONTEXT], chain_shape(CONTEXT), ())])
    cache.commit(range(CONTEXT))

    def forward(rows: int) -> None:
        model.forward([Segment(cache, ids[CONTEXT : CONTEXT + rows], chain_shape(rows), range(rows))])
        cache.commit([])

    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows in ROWS:
            times[rows].append(median_s(lambda rows=rows: forward(rows), device, 1))  # type: ignore[misc]
    bandwidth = max(bandwidth, read_bandwidth(device))
    least_s = model.weight_bytes / bandwidth
    medians = {rows: statistics.median(each) for rows, each in times.items()}
    return {
        "model": model.name,
        "note": model.note,
        "dtype": dtype,
        "fast_paths": list(model.fast_paths),
        "weight_bytes": model.weight_bytes,
        "bandwidth_bytes_per_s": bandwidth,
        "B_s": least_s,
        "forward_s": medians,
        "forward_in_B": {rows: each / least_s for rows, each in medians.items()},
        "eight_over_one": medians[8] / medians[1],
        "sixteen_over_one": medians[16] / medians[1],
        "mbu_of_one": least_s / medians[1],
    }


def draft_step(device: torch.device, steps: int) -> dict[str, float]:
    """Seconds of one drafted token of the embedded draft: forward, distribution, draw, and its share of the
    catch-up."""
    model = load_model("embedded:draft", device=device)
    return {
        "greedy": draft_step_of(model, SamplingParams(), steps),
        "temperature 1": draft_step_of(model, SamplingParams(temperature=1.0), steps),
        "temperature 1, top-p 0.9": draft_step_of(model, SamplingParams(temperature=1.0, top_p=0.9), steps),
    }


def draft_step_of(model: HuggingFaceModel, params: SamplingParams, count: int) -> float:
    """The same for one kind of request, in chains of 4 that are all accepted: then the draft catches up by two."""
    drafter = DraftModel(model, num_speculative_tokens=4)
    tokens = torch.randint(0, 8192, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    request = DraftRequest(1, params, list(tokens))
    drafter.begin(request)
    steps = iter(range(10**9))

    def step() -> None:
        noise = KeyedNoise(1, len(request.tokens), next(steps), greedy=params.greedy)
        with torch.inference_mode():
            proposal = drafter.propose([request], [Budget(4)], [noise])[0]
            emitted = (*proposal.tree.host_ids, 7)
            request.tokens.extend(emitted)
            drafter.observe([request], [StepOutcome(proposal, tuple(range(4)), emitted, None)])
        if len(request.tokens) > CONTEXT + 400:
            drafter.end(request)
            del request.tokens[CONTEXT:]
            drafter.begin(request)

    for _ in range(count // 3):
        step()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append((time.perf_counter() - began) / 4)
    return statistics.median(found)


def sampling(device: torch.device, rounds: int) -> dict[str, float]:
    """Distributions, verification and noise at temperature 1, top-p 0.9, vocabulary 32,000, distributions of about 3
    nats, 8 rows."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = rows_of_entropy(8, 32_000, 3.0).to(device)
    draft = batch_probs(rows_of_entropy(7, 32_000, 3.0).to(device), [(params, 7)])[0]
    chain = Proposal.chain(draft.argmax(dim=-1), draft)
    rule = SpeculativeSampling()
    steps = iter(range(10**9))

    def one_request() -> None:
        probs = batch_probs(logits, [(params, 8)])
        rule.verify([chain], probs, [KeyedNoise(3, 100, next(steps))])

    def eight_requests() -> None:
        probs = batch_probs(logits, [(params, 1)] * 8)
        rule.verify([Proposal.empty()] * 8, probs, [KeyedNoise(i, 100, next(steps)) for i in range(8)])

    return {
        "chain of 7 drafts": median_s(one_request, device, rounds),
        "8 requests": median_s(eight_requests, device, rounds),
    }


def rows_of_entropy(rows: int, vocab: int, nats: float) -> torch.Tensor:
    """Gaussian logits, scaled by bisection until the distribution has that entropy."""
    generator = torch.Generator().manual_seed(rows)
    found = []
    for _ in range(rows):
        base = torch.randn(vocab, generator=generator)
        low, high = 0.0, 60.0
        for _ in range(40):
            scale = (low + high) / 2
            dist = torch.softmax(base.double() * scale, dim=-1)
            entropy = float(torch.special.entr(dist).sum())
            low, high = (scale, high) if entropy > nats else (low, scale)
        found.append(base * low)
    return torch.stack(found)


def start(what: str) -> float:
    """Seconds of a process that imports the package, or shows help, less those of an empty one; median of 7."""
    command = [sys.executable, "-c", what] if what != "help" else [sys.executable, "-m", "truedraft", "--help"]
    empty = statistics.median(process_s([sys.executable, "-c", ""]) for _ in range(7))
    whole = statistics.median(process_s(command) for _ in range(7))
    return whole if what == "help" else whole - empty


def process_s(command: list[str]) -> float:
    """Seconds of one process."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
