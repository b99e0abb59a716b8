"""What coupled noise costs in acceptance, and what block verification gains: tokens per target call, and no times.

Each way to draft and judge answers the shipped prompts by the same noise. Rounds of one answer to each prompt follow
each other until there are enough; what was counted is written after each way of each round, and a run that is started
again goes on from there. Standard errors are over prompts, with all rounds of a prompt together; differences are
paired by prompt. Writes one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.proposal import Proposal
from truedraft.drafters import Drafter, Medusa, from_spec
from truedraft.drafters.base import DraftRequest
from truedraft.embedded import embedded_heads, heldout_prompts_file
from truedraft.machine import dtype_name
from truedraft.models.base import LanguageModel
from truedraft.verification import BlockVerification, SpeculativeSampling

TEMPERATURES = (0.7, 1.0)
REDRAFTER = "redrafter,beams=4,length=4,nodes=8"
MEDUSA_NODES = (8, 32)
DRAFTERS = (
    "prompt-lookup",
    "draft,num_speculative_tokens=4",
    "draft,branching=2-2-1",
    *(f"medusa,nodes={nodes}" for nodes in MEDUSA_NODES),
    f"{REDRAFTER},sampled=false",
    f"{REDRAFTER},sampled=true",
)
BLOCKS = ("draft,num_speculative_tokens=4", "draft,num_speculative_tokens=8")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to draft and judge.

    Attributes:
        drafter: by its word.
        temperature: of the requests.
        judged: "speculative" or "block", the rules; or "coupled", requests with a seed, judged by comparison.
        unheard: whether Medusa heads are kept from the noise of seeded requests.
    """

    drafter: str
    temperature: float
    judged: str = "speculative"
    unheard: bool = False


class UnheardNoise(Medusa):
    """Medusa heads that draft for seeded requests as for any other: what they were before they heard the noise."""

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """See `Medusa.propose`."""
        return super().propose(batch, budgets, [KeyedNoise(0, 0, 0, greedy=True)] * len(batch))


def comparisons() -> dict[str, list[tuple[Way, Way]]]:
    """Pairs of ways by what they show; the second one is what the first is held against."""
    coupling, hearing, block = [], [], []
    for drafter, temperature in itertools.product(DRAFTERS, TEMPERATURES):
        # Seeded requests get the same beams whether those of other requests are drawn or not.
        coupled = Way(drafter.partition(",sampled=")[0], temperature, "coupled")
        coupling.append((coupled, Way(drafter, temperature)))
    for nodes, temperature in itertools.product(MEDUSA_NODES, TEMPERATURES):
        coupled = Way(f"medusa,nodes={nodes}", temperature, "coupled")
        hearing.append((coupled, dataclasses.replace(coupled, unheard=True)))
    for drafter, temperature in itertools.product(BLOCKS, TEMPERATURES):
        block.append((Way(drafter, temperature, "block"), Way(drafter, temperature)))
    return {"coupled against the optimal rule": coupling, "heads that hear the noise": hearing, "block": block}


def main() -> None:
    """Count what is missing and write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rules.json"))
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers to each prompt")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further round after so many")
    parser.add_argument("--only", default="", help="only drafters whose word begins so")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-fast-paths", action="store_true", help="plain forwards; the counts hardly depend on it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()][: options.limit]
    target = load_model("embedded:target", fast_paths=not options.no_fast_paths)
    pairs = {
        name: [pair for pair in each if pair[0].drafter.startswith(options.only)]
        for name, each in comparisons().items()
    }
    ways = list(dict.fromkeys(itertools.chain.from_iterable(itertools.chain(*pairs.values()))))
    found: dict[str, Any] = {
        "what": f"tokens per target call on {len(prompts)} shipped prompts, {options.tokens} tokens each",
        "torch": torch.__version__,
        "dtype": dtype_name(target.dtype),
        "fast_paths": list(target.fast_paths),
        "prompts": len(prompts),
        "tokens": options.tokens,
    }
    counts = counted_before(options.out, found)
    began = time.monotonic()
    for round_number in range(options.rounds):
        if time.monotonic() - began > 60 * options.minutes:
            break
        for number, way in enumerate(ways, 1):
            rounds = counts.setdefault(way, [])
            if len(rounds) > round_number:
                continue
            rounds.append(count(target, way, prompts, options.tokens, round_number))
            write(options.out, found | report(counts, pairs))
            spent = time.monotonic() - began
            print(f"round {round_number + 1}: {number} of {len(ways)} ways, {spent:.0f} s", file=sys.stderr)
    write(options.out, found | report(counts, pairs))
    print(json.dumps(found | report(counts, pairs)))


def count(
    target: LanguageModel, way: Way, prompts: Sequence[str], tokens: int, round_number: int
) -> list[tuple[int, int]]:
    """Emitted tokens and target calls for each prompt."""
    rule = BlockVerification() if way.judged == "block" else SpeculativeSampling()
    engine = Engine(
        target, drafter_of(way, target), rule, max_batch=len(prompts), controller="fixed", entropy=round_number
    )
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=way.temperature,
            seed=len(prompts) * round_number + number if way.judged == "coupled" else None,
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]
    answers = engine.generate(list(prompts), params)
    warned = [warning for answer in answers for warning in answer.warnings]
    if warned:
        raise RuntimeError(f"{way}: {warned[0]}")
    return [(answer.stats.emitted_tokens, answer.stats.target_calls) for answer in answers]


def drafter_of(way: Way, target: LanguageModel) -> Drafter:
    """The drafter of a way."""
    if way.unheard:
        return UnheardNoise.load(embedded_heads("medusa"), nodes=int(way.drafter.partition("nodes=")[2]))
    return from_spec(way.drafter, target)


Counts = dict[Way, list[list[tuple[int, int]]]]
"""By way, for each round and prompt: emitted tokens, target calls."""


def counted_before(out: Path, settings: dict[str, Any]) -> Counts:
    """What an earlier run with the same settings counted."""
    if not out.exists():
        return {}
    record = json.loads(out.read_text())
    if any(record.get(name) != value for name, value in settings.items()):
        return {}
    return {Way(**each["way"]): [[(e, c) for e, c in run] for run in each["counts"]] for each in record["ways"]}


def write(out: Path, record: dict[str, Any]) -> None:
    """Replace the file whole, so that a run that is stopped leaves one that can be read."""
    fresh = out.with_suffix(".part")
    fresh.write_text(json.dumps(record) + "\n")
    fresh.replace(out)


def report(counts: Counts, pairs: dict[str, list[tuple[Way, Way]]]) -> dict[str, Any]:
    """Everything that follows from the counts; comparisons of ways that are not counted yet are left out."""
    compared = {
        name: [compare(new, old, counts) for new, old in each if new in counts and old in counts]
        for name, each in pairs.items()
    }
    ways = [
        {"way": dataclasses.asdict(way)} | summary(totals(rounds)) | {"rounds": len(rounds), "counts": rounds}
        for way, rounds in counts.items()
    ]
    return {"comparisons": compared, "ways": ways}


def totals(rounds: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Emitted tokens and target calls of each prompt, all rounds together."""
    return [(sum(e for e, _ in prompt), sum(c for _, c in prompt)) for prompt in zip(*rounds, strict=True)]


def summary(of_prompts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Tokens per target call with its standard error over prompts, and how many tokens they are."""
    ratio, parts = ratio_of(of_prompts)
    return {
        "mean_acceptance_length": ratio,
        "standard_error": error_of(parts),
        "emitted_tokens": sum(emitted for emitted, _ in of_prompts),
        "target_calls": sum(calls for _, calls in of_prompts),
    }


def compare(new: Way, old: Way, counts: Counts) -> dict[str, Any]:
    """Two ways in their common rounds: the difference of tokens per target call, paired by prompt."""
    common = min(len(counts[new]), len(counts[old]))
    of_new, of_old = (totals(counts[way][:common]) for way in (new, old))
    (ratio, parts), (before, others) = ratio_of(of_new), ratio_of(of_old)
    error = error_of([a - b for a, b in zip(parts, others, strict=True)])
    return {
        "way": dataclasses.asdict(new),
        "against": dataclasses.asdict(old),
        "mean_acceptance_length": [ratio, before],
        "standard_error": [error_of(parts), error_of(others)],
        "difference": ratio - before,
        "difference_standard_error": error,
        "relative": ratio / before - 1,
        "tokens": [sum(emitted for emitted, _ in each) for each in (of_new, of_old)],
    }


def ratio_of(of_prompts: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
    """Emitted tokens over target calls, and how far each prompt pulls it: their mean's error is the ratio's."""
    calls = statistics.fmean(c for _, c in of_prompts)
    ratio = statistics.fmean(e for e, _ in of_prompts) / calls
    return ratio, [(e - ratio * c) / calls for e, c in of_prompts]


def error_of(parts: Sequence[float]) -> float:
    """The standard error of a mean; 0 of a single prompt, which says nothing of others."""
    return statistics.stdev(parts) / math.sqrt(len(parts)) if len(parts) > 1 else 0.0


if __name__ == "__main__":
    main()
