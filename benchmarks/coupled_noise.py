"""Choosing tokens by coupled noise: the shipped rule against the definition, in turns, over distributions of several
shapes.

The definition works out Gumbel noise and log p for the whole vocabulary, row by row: what the rule itself did before it
looked for the tokens that may win. `read_s` is one pass over the distributions that finds the largest number of each
row: no way that looks at all of them can be faster than the memory lets it. Writes one JSON object. Run it on an
otherwise idle machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truedraft import SamplingParams
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import Proposal
from truedraft.drafters.draws import OpenNode, drawing_for
from truedraft.machine import this_machine, wait_for
from truedraft.verification import CoupledSampling
from truedraft.verification.coupled import coupled_choice

SIZES = ((16, 150_000), (8, 32_000), (1, 8_192))
"""Rows and vocabulary; the last one is that of the embedded models."""
SHAPES = {
    "dense": SamplingParams(temperature=1.0, seed=1),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50, seed=1),
    "top-p 0.5": SamplingParams(temperature=1.0, top_p=0.5, seed=1),
}


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coupled_noise.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    found: dict[str, Any] = {
        "what": "seconds to choose the token of each row by coupled noise; medians of runs in turns",
        "machine": dataclasses.asdict(this_machine(device)),
        "torch": torch.__version__,
        "threads": options.threads,
        "rounds": options.rounds,
        "choices": [choices(rows, vocab, shape, device, options.rounds) for rows, vocab in SIZES for shape in SHAPES],
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def choices(rows: int, vocab: int, shape: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """One token for each of so many requests, and one distribution over so many tokens each."""
    generator = torch.Generator().manual_seed(rows)
    # A spread of 3 in the logits: 5 to 7 nats, flatter than a language model's distributions mostly are.
    logits = (torch.randn(rows, vocab, generator=generator) * 3.0).to(device)
    dist = probs_from_logits(logits, SHAPES[shape])
    probs, rule, nothing = list(dist.split(1)), CoupledSampling(), [Proposal.empty()] * rows

    def shipped(noise: list[KeyedNoise]) -> list[int]:
        return [verdict.tokens[0] for verdict in rule.verify(nothing, probs, noise)]

    def definition(noise: list[KeyedNoise]) -> list[int]:
        pairs = zip(probs, noise, strict=True)
        return torch.cat([coupled_choice(row, own.gumbel(0, vocab, device)) for row, own in pairs]).tolist()

    def reading(noise: list[KeyedNoise]) -> Tensor:
        return dist.amax(dim=-1)

    ways = {"shipped_s": shipped, "definition_s": definition, "read_s": reading}
    times, different = in_turns(ways, rows, device, rounds)
    return {
        "rows": rows,
        "vocab": vocab,
        "law": shape,
        "tokens_with_mass": float((dist > 0).sum(dim=-1).double().mean()),
        **{name: statistics.median(each) for name, each in times.items()},
        "least_shipped_s": min(times["shipped_s"]),
        "different_tokens": different,
        **drafting(logits, SHAPES[shape], dist, device, rounds),
    }


def in_turns(
    ways: dict[str, Callable[[list[KeyedNoise]], Any]], rows: int, device: torch.device, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds of each way in each round, and how many tokens the first two chose differently."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    different = 0
    for step in range(rounds):
        given = []
        for name, way in ways.items():
            noise = [KeyedNoise(seed, 100 + step, step) for seed in range(rows)]  # fresh, as each keeps its numbers
            wait_for(device)
            began = time.perf_counter()
            given.append(way(noise))
            wait_for(device)
            times[name].append(time.perf_counter() - began)
        different += sum(one != other for one, other in zip(given[0], given[1], strict=True))
    return times, different


def drafting(
    logits: Tensor, params: SamplingParams, dist: Tensor, device: torch.device, rounds: int
) -> dict[str, float]:
    """Drawing 8 children of each row, less the time for the distribution itself."""
    drawing = drawing_for(params, 8)
    drawn, alone = [], []
    for step in range(rounds):
        nodes = [OpenNode(KeyedNoise(seed, 100 + step, step), 0, 0, 8) for seed in range(len(dist))]
        for times, work in (
            (drawn, lambda nodes=nodes: drawing.draw(logits, params, nodes)),  # type: ignore[misc]
            (alone, lambda: probs_from_logits(logits, params)),
        ):
            wait_for(device)
            began = time.perf_counter()
            work()
            wait_for(device)
            times.append(time.perf_counter() - began)
    return {"eight_children_s": statistics.median(drawn) - statistics.median(alone)}


if __name__ == "__main__":
    main()
