"""What beams of some widths and lengths bring by the number of nodes: kept with a recurrent head when it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from truedraft.errors import ModelError, OptionError
from truedraft.theory.node_curve import NodeCurve

FACT = "beams"
"""Among a head's facts: for "greedy" and "sampled" requests a list of objects with `beams`, `length`, `nodes` and
`tokens`, the last two lists of equal length."""


@dataclass(frozen=True, slots=True)
class BeamCurve:
    """Tokens per target call by nodes, for trees of so many beams of one length."""

    beams: int
    length: int
    curve: NodeCurve


def beam_curves(facts: Mapping[str, Any], greedy: bool) -> list[BeamCurve]:
    """The curves among a head's facts; none where nobody measured them.

    Raises:
        ModelError: there is something else in their place.
    """
    try:
        kept = facts.get(FACT, {}).get("greedy" if greedy else "sampled", [])
        return [
            BeamCurve(each["beams"], each["length"], NodeCurve.fit(zip(each["nodes"], each["tokens"], strict=True)))
            for each in kept
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OptionError) as error:
        raise ModelError(
            f"what was measured of the beams of this head is damaged ({error}); fetch or train it again"
        ) from error
