"""Measurements of heads on held-out text, as stored with them: survival of guesses, and acceptance curves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.core.theory import AcceptanceCurve
from truedraft.drafters.heads.acceptance import RAW, AcceptanceOdds
from truedraft.errors import ModelError, OptionError

GREEDY, SAMPLED, COUPLED = "greedy", "sampled", "coupled"
LIKELIEST, COUNTED = "likeliest", "counted"
"""Trees chosen at each step, and one counted tree for all steps."""
FACT = "survival"
"""Key of the facts: for each depth the five numbers of `acceptance.Odds`."""
BEAMS_FACT = "beams"
"""Key of a recurrent head's facts: for "greedy" and "sampled" requests a list of objects with `beams`, `length`,
`nodes` and `tokens`, the last two lists of equal length."""
PROMISED_ON = "promised_on"
"""Key of the facts: the text on which acceptance curves were measured, in words."""


def kind_of(params: SamplingParams) -> str:
    """The kind of trees and acceptance curves for requests with such options."""
    return GREEDY if params.greedy else SAMPLED


class Calibration:
    """Odds of acceptance by the kind of requests: "greedy" at temperature 0, "sampled" and "coupled" at temperature 1.

    Between these temperatures, to the nearest hundredth, the odds are interpolated; above 1 they are those of 1.
    Missing kinds use the heads' own probabilities.
    """

    def __init__(self, kinds: Mapping[str, AcceptanceOdds] | None = None) -> None:
        self._kinds = dict(kinds or {})
        self._between: dict[tuple[str, float], AcceptanceOdds | None] = {}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Calibration:
        """From lists of numbers by kind, as facts hold them; raises `ModelError` if they are invalid."""
        with _reading("trees of these heads", "them"):
            return cls({kind: AcceptanceOdds.of(depths) for kind, depths in kept.items()})

    def __call__(self, params: SamplingParams) -> AcceptanceOdds | None:
        if params.greedy:
            return self._kinds.get(GREEDY)
        key = COUPLED if params.seeded else SAMPLED, round(min(params.temperature, 1.0), 2)
        if key not in self._between:
            cold, hot = self._kinds.get(GREEDY), self._kinds.get(key[0])
            if key[1] < 1.0 and (cold or hot):
                cold, hot = cold or _raw_like(hot), hot or _raw_like(cold)
                hot = cold.between(hot, key[1])
            self._between[key] = hot
        return self._between[key]


def _raw_like(other: AcceptanceOdds | None) -> AcceptanceOdds:
    assert other is not None
    return AcceptanceOdds((RAW,) * len(other.depths))


def tree_curves(facts: Mapping[str, Any], heads: int) -> dict[str, AcceptanceCurve]:
    """Acceptance curves of Medusa trees chosen at each step, by kind; raises `ModelError` if the facts are damaged."""
    with _reading("trees of these heads", "them"):
        kept = {kind: tree[LIKELIEST] for kind, tree in facts.get("trees", {}).items() if LIKELIEST in tree}
        return {kind: _curve_of(facts, each, lambda nodes: min(nodes, heads)) for kind, each in kept.items()}


@dataclass(frozen=True, slots=True)
class BeamCurve:
    """The acceptance curve of trees of `beams` beams of one length."""

    beams: int
    length: int
    curve: AcceptanceCurve


def beam_curves(facts: Mapping[str, Any], params: SamplingParams) -> list[BeamCurve]:
    """The acceptance curves of beams for such requests; raises `ModelError` if the facts are damaged."""
    found = []
    with _reading("beams of this head", "it"):
        for each in facts.get(BEAMS_FACT, {}).get(kind_of(params), []):
            length = each["length"]  # the search takes so many steps, even if few nodes are kept
            found.append(BeamCurve(each["beams"], length, _curve_of(facts, each, _always(length))))
    return found


def _always(depth: int) -> Callable[[int], int]:
    return lambda nodes: depth


def _curve_of(facts: Mapping[str, Any], kept: Mapping[str, Any], depth_of: Callable[[int], int]) -> AcceptanceCurve:
    points = zip(kept["nodes"], kept["tokens"], strict=True)
    return AcceptanceCurve.fit(points, depth_of, str(facts.get(PROMISED_ON, "")))


def fixed_for(facts: Mapping[str, Any]) -> frozenset[str]:
    """Kinds of requests for which the counted tree had the most tokens per call on held-out text.

    Falls back to expected tokens. Raises `ModelError` if the measurements are damaged.
    """
    with _reading("trees of these heads", "them"):
        trees = facts.get("trees", {}).items()
        return frozenset(kind for kind, tree in trees if tree.get("chosen", _expected_better(tree)) == COUNTED)


def _expected_better(tree: Mapping[str, Any]) -> str:
    """By expected tokens, over the numbers of nodes at which both were replayed."""
    chosen = tree.get(LIKELIEST, {"nodes": (), "tokens": ()})
    tokens = dict(zip(chosen["nodes"], chosen["tokens"], strict=True))
    gains = [each["replayed"] - tokens[each["nodes"]] for each in tree.get("promises", ()) if each["nodes"] in tokens]
    return COUNTED if sum(gains) > 0.0 else LIKELIEST


@contextlib.contextmanager
def _reading(what: str, whom: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OptionError) as error:
        raise ModelError(
            f"what was measured of the {what} is damaged ({error}); fetch or train {whom} again"
        ) from error
