"""What a certificate is made of: checks, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Part(Enum):
    """The parts of a certificate, in the order in which they are shown."""

    EXACT = "exact"
    EQUALITY = "greedy and coupled"
    STATISTICAL = "statistical"
    CONTROLS = "negative controls"
    INVARIANCE = "invariance"
    DRAFT_STATE = "draft state"
    DIVERGENCE = "divergence"


class Status(Enum):
    """What came of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    MEASURED = "measured"
    NOT_ENOUGH = "not enough evidence"
    DOES_NOT_APPLY = "does not apply"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        part: the heading that it stands under.
        name: what was checked, in a few words.
        status: what came of it; FAILS and NOT_ENOUGH keep a certificate from being issued.
        summary: one sentence, with the numbers that matter.
        facts: all numbers, for programs; plain values, lists and dictionaries.
    """

    part: Part
    name: str
    status: Status
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)
