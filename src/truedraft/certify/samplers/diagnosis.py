"""What is wrong with a sampler, by name: the fault under which its tokens are likeliest, if that explains them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from truedraft.certify.e_process import CERTAIN
from truedraft.certify.samplers.evidence import PAIRS, Evidence
from truedraft.certify.samplers.tally import Tally

UNKNOWN = "none of the known faults"
DEPENDENT = "rows share their noise"


def diagnose(evidence: Evidence, tallies: Sequence[Tally]) -> dict[str, Any]:
    """Name the fault.

    Every known fault has a likelihood in closed form, and so has the free fit (a Dirichlet average in each world, which
    pays for its freedom): the likeliest is named. Rows that depend on each other come first: under them no likelihood
    of single rows means anything.

    Args:
        evidence: of all rows.
        tallies: of the same, world by world.

    Returns:
        The fault, `UNKNOWN` where no known one explains the tokens as well as a free fit of each world; its detail, how
        or how much; the next fault of another name, and how much less likely the tokens are under that; what else was
        seen, a sentence each.
    """
    logs = evidence.log_likelihoods()
    order = logs.argsort(descending=True).tolist()
    best = evidence.suspects[order[0]]
    other = next(number for number in order if evidence.suspects[number].name != best.name)
    lead = float(logs[order[0]] - logs[other]) / math.log(10.0)
    free = sum(evidence.log_e_of_worlds())
    pairs = evidence.log_dependence()
    kind = int(pairs.argmax())
    found = {
        "fault": best.name,
        "detail": best.detail,
        "log10_over_next": lead,
        "next_fault": evidence.suspects[other].name,
        "notes": _notes(tallies),
    }
    if float(pairs[kind]) >= math.log(CERTAIN):
        return found | {"fault": DEPENDENT, "detail": PAIRS[kind], "next_fault": best.name}
    if float(logs[order[0]]) < free:
        return found | {"fault": UNKNOWN, "detail": f"the nearest is {best.name!r} ({best.detail})"}
    return found


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
