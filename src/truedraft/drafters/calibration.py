"""What was found out about heads on held-out text: how guesses survive, and which trees are better."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from truedraft.core.sampling import SamplingParams
from truedraft.core.survival import RAW, Survival
from truedraft.errors import ModelError, OptionError
from truedraft.theory.node_curve import NodeCurve

GREEDY, SAMPLED, COUPLED = "greedy", "sampled", "coupled"
LIKELIEST, COUNTED = "likeliest", "counted"
"""Trees that are chosen at each step, and the one that was counted for all."""
FACT = "survival"
"""Among what was found out about heads: for each depth the five numbers of `core.survival.Odds`."""


def kind_of(params: SamplingParams) -> str:
    """Which trees and promises are for requests with such options."""
    return GREEDY if params.greedy else SAMPLED


class Calibration:
    """Survival by the kind of requests: "greedy" at temperature 0, "sampled" and "coupled" at temperature 1.

    Between these temperatures the odds are taken in between, above 1 they are those of 1. Coupled requests know the
    target's noise, so their guesses survive otherwise. For kinds that are missing the heads' own probabilities serve.

    Args:
        kinds: what was fitted, as many depths each.
    """

    def __init__(self, kinds: Mapping[str, Survival] | None = None) -> None:
        self._kinds = dict(kinds or {})
        self._between: dict[tuple[str, float], Survival | None] = {}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Calibration:
        """From lists of numbers by kind, as facts hold them.

        Raises:
            ModelError: they are something else.
        """
        with _reading():
            return cls({kind: Survival.of(depths) for kind, depths in kept.items()})

    def __call__(self, params: SamplingParams) -> Survival | None:
        """What serves for a request; None where paths are chosen by the heads' own probabilities."""
        if params.greedy:
            return self._kinds.get(GREEDY)
        key = COUPLED if params.coupled else SAMPLED, min(params.temperature, 1.0)
        if key not in self._between:
            cold, hot = self._kinds.get(GREEDY), self._kinds.get(key[0])
            if key[1] < 1.0 and (cold or hot):
                cold, hot = cold or _raw_like(hot), hot or _raw_like(cold)
                hot = cold.between(hot, key[1])
            self._between[key] = hot
        return self._between[key]


def _raw_like(other: Survival | None) -> Survival:
    """The heads' own probabilities, for as many depths as another has."""
    assert other is not None
    return Survival((RAW,) * len(other.depths))


def curves_of(facts: Mapping[str, Any]) -> dict[str, NodeCurve]:
    """The curves in what was found out about heads when they were trained; none where nobody measured them.

    Raises:
        ModelError: there is something else in their place.
    """
    with _reading():
        trees = facts.get("trees", {}).items()
        kept = {kind: tree[LIKELIEST] for kind, tree in trees if LIKELIEST in tree}
        return {kind: NodeCurve.fit(zip(each["nodes"], each["tokens"], strict=True)) for kind, each in kept.items()}


def fixed_for(facts: Mapping[str, Any]) -> frozenset[str]:
    """Kinds of requests for which the counted tree brought more on held-out text than trees chosen at each step.

    With heads whose training did not compare them, the promises of both are compared here.

    Raises:
        ModelError: there is something else in the place of what was measured.
    """
    with _reading():
        trees = facts.get("trees", {}).items()
        return frozenset(kind for kind, tree in trees if tree.get("chosen", _promised_better(tree)) == COUNTED)


def _promised_better(tree: Mapping[str, Any]) -> str:
    """Which trees promise more, over the numbers of nodes at which both were replayed."""
    chosen = tree.get(LIKELIEST, {"nodes": (), "tokens": ()})
    tokens = dict(zip(chosen["nodes"], chosen["tokens"], strict=True))
    gains = [each["replayed"] - tokens[each["nodes"]] for each in tree.get("promises", ()) if each["nodes"] in tokens]
    return COUNTED if sum(gains) > 0.0 else LIKELIEST


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Say what is damaged."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OptionError) as error:
        raise ModelError(
            f"what was measured of the trees of these heads is damaged ({error}); fetch or train them again"
        ) from error
