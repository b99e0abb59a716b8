"""Certificates for the embedded models: every drafter and rule, by temperature, without and with seeds, one and eight.

One line of JSON for each certificate, written as it is finished; a run that is started again goes on behind them.
Exit status 0 if all of a run were issued or measured, 1 if a check failed, 3 if the time was too short to tell.
Greedy and seeded requests are judged by comparison whatever the lossless rule, so their certificates are counted for
all of these rules and made with one. Portfolios follow, eight requests together: every member in turn and merged two by
two, and `auto` under the learning controller too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines, heldout_ids, note
from truedraft import SamplingParams, load_model
from truedraft.certify import Part, Report, Stack, Status, certify
from truedraft.drafters.specs import from_spec
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import IncompatibleRuleError
from truedraft.machine import dtype_name, machine_facts
from truedraft.models.base import LanguageModel
from truedraft.verification.specs import rule_from_spec

DRAFTERS = (
    "prompt-lookup",
    "draft,num_speculative_tokens=4",
    "draft,branching=2-2-1",
    "medusa,nodes=8",
    "redrafter,beams=4,length=4,nodes=8",
    "redrafter,beams=4,length=4,nodes=8,sampled=true",
)
PORTFOLIOS = ("auto", "portfolio(draft;prompt-lookup)")
LEARNING = "goodput"
LOSSLESS = ("speculative", "block")
LOSSY = ("speculative,lenience=0.5", "typical")
TEMPERATURES = (0.0, 0.7, 1.0)
BATCHES = (1, 8)
_PROMPT = 48
_TOKENS = 24
_LOSSY = 0.25


@dataclass(frozen=True, slots=True)
class Cell:
    """One certificate: `rules` are those that it counts for; the controller is that of a portfolio."""

    drafter: str
    rules: tuple[str, ...]
    temperature: float
    seeded: bool
    batch: int
    controller: str = "in-turn"

    @property
    def key(self) -> str:
        mode = "coupled" if self.seeded else "plain"  # as the kept records have it
        own = "" if self.controller == "in-turn" else f" | {self.controller}"
        return f"{self.drafter} | {'+'.join(self.rules)} | {self.temperature:g} | {mode} | batch {self.batch}{own}"


def cells() -> Iterator[Cell]:
    """Of portfolios, too: each greedy, and at temperature 1 without and with seeds; `auto` also as it is served."""
    cold, *warm = TEMPERATURES
    for drafter, batch in itertools.product(DRAFTERS, BATCHES):
        yield Cell(drafter, LOSSLESS, cold, False, batch)
        for temperature in warm:
            yield Cell(drafter, LOSSLESS, temperature, True, batch)
            for rule in LOSSLESS:
                yield Cell(drafter, (rule,), temperature, False, batch)
    for drafter, rule, temperature in itertools.product(DRAFTERS, LOSSY, (cold, warm[-1])):
        yield Cell(drafter, (rule,), temperature, False, BATCHES[-1])  # measured, in place of a certificate
    modes = ((cold, False), (warm[-1], False), (warm[-1], True))
    for drafter, (temperature, seeded) in itertools.product(PORTFOLIOS, modes):
        yield Cell(drafter, LOSSLESS[:1], temperature, seeded, BATCHES[-1])
    for temperature, seeded in modes[:2]:
        yield Cell(PORTFOLIOS[0], LOSSLESS[:1], temperature, seeded, BATCHES[-1], LEARNING)


def short_cells() -> Iterator[Cell]:
    """Every drafter and portfolio once greedy and once at temperature 1, eight requests together."""
    for drafter in (*DRAFTERS, *PORTFOLIOS):
        for temperature in (TEMPERATURES[0], TEMPERATURES[-1]):
            yield Cell(drafter, LOSSLESS[:1], temperature, False, BATCHES[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "certificates.jsonl")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each certificate")
    parser.add_argument(
        "--short", action="store_true", help="each drafter greedy and at temperature 1, and that is all"
    )
    parser.add_argument("--limit", type=int, help="at most so many certificates")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = Lines(options.out)
    asked = short_cells() if options.short else cells()
    todo = [cell for cell in asked if cell.key not in kept.cells][: options.limit]
    if not todo:
        return 0
    target = load_model("embedded:target")
    prompts = heldout_ids(target, _PROMPT)
    started, statuses = time.perf_counter(), {0}
    for number, cell in enumerate(todo, start=1):
        record = _certified(cell, target, prompts, options.minutes * 60.0)
        if record is None:
            continue
        kept.add(record)
        statuses.add(1 if record["failures"] else 3 if record["undecided"] else 0)
        times = f"{record['took_s']:.0f} s, {time.perf_counter() - started:.0f} s in all"
        note(f"{number} of {len(todo)}: {record['verdict']}; {cell.key}; {times}")
    return 1 if 1 in statuses else max(statuses)


def _certified(cell: Cell, target: LanguageModel, prompts: list[list[int]], seconds: float) -> dict[str, Any] | None:
    """The record of one certificate; None where rule and drafter refuse each other."""
    drafter = from_spec(cell.drafter, target)
    rule = rule_from_spec(cell.rules[0])
    try:
        rule.check(drafter.kinds, drafter.name)
    except IncompatibleRuleError:
        return None
    params = SamplingParams(max_tokens=_TOKENS, temperature=cell.temperature, seed=1 if cell.seeded else None)
    started = time.perf_counter()
    # A divergence is measured on the way: no fault has to be found, and no deviation to be excluded.
    seconds *= 1.0 if rule.lossless else _LOSSY
    stack = Stack(target, drafter, rule, controller=controller_from_spec(cell.controller), entropy=1)
    certificate = certify(stack, prompts, params, batch=cell.batch, seconds=seconds)
    return {
        "cell": cell.key,
        **asdict(cell),
        "drafters": list(drafter.members),
        "compared_tokens_of_an_answer": _TOKENS,
        "minutes": seconds / 60.0,
        "dtype": dtype_name(target.dtype),
        "took_s": round(time.perf_counter() - started, 1),
        "verdict": certificate.verdict,
        **_short(certificate),
        "machine": machine_facts(),
    }


def _short(certificate: Report) -> dict[str, Any]:
    record = certificate.as_dict()
    figures: dict[str, Any] = {name: record[name] for name in ("certified", "lossless", "failures", "undecided")}
    for finding in certificate.findings:
        facts = finding.facts
        if finding.part is Part.STATISTICAL and finding.status is not Status.DOES_NOT_APPLY:
            name = "tokens" if "tests" in facts else "joint"
            kept = ("tokens", "answers", "tests", "cells", "smallest_adjusted_p_value", "adjusted_p_value")
            figures[name] = {key: facts[key] for key in (*kept, "smallest_detectable_tv") if key in facts}
        if finding.part is Part.DIVERGENCE:
            figures.setdefault("divergence", {}).update(facts)
    controls = [finding for finding in certificate.findings if finding.part is Part.CONTROLS]
    figures["controls_found"] = sum(finding.status is Status.HOLDS for finding in controls)
    figures["controls"] = len(controls)
    figures["checks"] = len(certificate.findings)
    figures["failed"] = [f"{finding.name}: {finding.summary}" for finding in certificate.failures]
    return figures


if __name__ == "__main__":
    sys.exit(main())
