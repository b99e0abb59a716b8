"""What is wrong with a sampler, by name: the fault under which its tokens are likeliest, if that explains them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.certify.e_process import CERTAIN
from truedraft.certify.samplers.evidence import PAIRS, Evidence
from truedraft.certify.samplers.tally import Tally

UNKNOWN = "none of the known faults"
DEPENDENT = "rows share their noise"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong.

    Attributes:
        fault: in a few words; `UNKNOWN` where no known fault explains the tokens as well as a free fit of each world.
        detail: how, or how much.
        log10_over_next: how much likelier the tokens are under it than under the next known fault of another name.
        next_fault: which that is.
        notes: what else was seen, a sentence each.
    """

    fault: str
    detail: str
    log10_over_next: float
    next_fault: str
    notes: tuple[str, ...]


def diagnose(evidence: Evidence, tallies: Sequence[Tally]) -> Diagnosis:
    """Name the fault.

    Every known fault has a likelihood in closed form, and so has the free fit (a Dirichlet average in each world, which
    pays for its freedom): the likeliest is named. Rows that depend on each other come first: under them no likelihood
    of single rows means anything.

    Args:
        evidence: of all rows.
        tallies: of the same, world by world.
    """
    logs = evidence.log_likelihoods()
    order = logs.argsort(descending=True).tolist()
    best = evidence.suspects[order[0]]
    other = next(number for number in order if evidence.suspects[number].fault != best.fault)
    lead = float(logs[order[0]] - logs[other]) / math.log(10.0)
    free = sum(evidence.log_e_of_worlds())
    pairs = evidence.log_dependence()
    kind = int(pairs.argmax())
    notes = tuple(_notes(tallies))
    if float(pairs[kind]) >= math.log(CERTAIN):
        return Diagnosis(DEPENDENT, PAIRS[kind], lead, best.fault, notes)
    if float(logs[order[0]]) < free:
        nearest = f"the nearest is {best.fault!r} ({best.detail})"
        return Diagnosis(UNKNOWN, nearest, lead, evidence.suspects[other].fault, notes)
    return Diagnosis(best.fault, best.detail, lead, evidence.suspects[other].fault, notes)


def _notes(tallies: Sequence[Tally]) -> list[str]:
    """What can be seen in single rows."""
    strays, forbidden, rows = (sum(getattr(each, name) for each in tallies) for name in ("strays", "forbidden", "rows"))
    notes = []
    if strays:
        notes.append(
            f"{strays} of {rows} rows go on behind a token that was not drafted: nobody knows the target there"
        )
    if forbidden:
        notes.append(f"{forbidden} tokens in {rows} rows have target probability 0")
    return notes
