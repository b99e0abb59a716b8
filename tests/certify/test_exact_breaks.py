"""The exact part of a certificate fails for rules broken on purpose: in a kernel, in what ships, or in both.

Nothing here is left to chance: noise is summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from test_exact_part import CAUGHT, DRAWN, FIXED, KERNEL, REMOVED, SHIPPED, findings, statuses
from torch import Tensor

from support.broken_rules import (
    AcceptsAlways,
    DrawsFromTarget,
    PassesByWeight,
)
from truedraft.certify.cells import decision_cells, mass_that_moves
from truedraft.certify.checks import Status
from truedraft.certify.exact import TOLERANCE
from truedraft.certify.worlds import Choice, build
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.verification import (
    BlockVerification,
    Rule,
    SpeculativeSampling,
)
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (AcceptsAlways(), DRAWN),
        (AcceptsAlways(), FIXED),
        (DrawsFromTarget(), REMOVED),
        (PassesByWeight(), DRAWN),
    ],
    ids=lambda each: each.value if isinstance(each, DrawKind) else type(each).__name__,
)
def test_a_rule_with_one_wrong_part_fails_with_its_distance(rule: Rule, kind: DrawKind) -> None:
    """By its kernel and by what ships alike; both follow the broken part, so they still agree with each other."""
    found = findings(rule, kind)
    assert set(statuses(found).values()) == {Status.FAILS}
    assert found[KERNEL].facts["largest_distance"] > CAUGHT
    assert f"{found[KERNEL].facts['largest_distance']:.1e}" in found[KERNEL].summary
    assert found[SHIPPED].facts["distance_from_target"] > CAUGHT
    assert (
        f"{found[SHIPPED].facts['distance_from_target']:.2g} from the target's distribution (" in found[SHIPPED].summary
    )


class FirstNumber:
    """The number of the first draw of a tree row decides about all of them."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self._noise.uniform(purpose, depth, 0 if purpose is Purpose.ACCEPT else index)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        return self._noise.gumbel(depth, vocab, device)


def hiding(rule: type[SpeculativeSampling], **wrong: Callable) -> Rule:
    """A rule with a wrong part, whose kernel says what the right rule does."""
    kernel = rule()
    return type("Hides", (rule,), {**wrong, "outcomes": lambda self, group: kernel.outcomes(group)})()


@pytest.mark.parametrize(
    "rule",
    [
        hiding(SpeculativeSampling, accept_probability=lambda self, p_x, q_x: 1.1 * p_x / (q_x + 1e-300)),
        hiding(
            SpeculativeSampling,
            accept_probability=lambda self, p_x, q_x: 0.9 * SpeculativeSampling().accept_probability(p_x, q_x),
        ),
        hiding(
            BlockVerification,
            pass_probability=lambda self, weight, mass: 0.9 * BlockVerification().pass_probability(weight, mass),
        ),
    ],
    ids=["too much", "too little", "block"],
)
def test_a_right_kernel_does_not_hide_what_verify_does(rule: Rule) -> None:
    found = findings(rule, DRAWN)
    assert statuses(found) == {KERNEL: Status.HOLDS, SHIPPED: Status.FAILS}
    assert found[SHIPPED].facts["distance_from_kernel"] > CAUGHT
    # The residual is drawn from too seldom or too often: the answers' distribution differs, in the first batch by less.
    assert found[SHIPPED].facts["distance_from_target"] > CAUGHT / 10


def test_a_wrong_kernel_fails_though_verify_is_right() -> None:
    class WrongKernel(SpeculativeSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            return AcceptsAlways().outcomes(group)

    found = findings(WrongKernel(), DRAWN)
    assert set(statuses(found).values()) == {Status.FAILS}
    assert found[SHIPPED].facts["distance_from_target"] < TOLERANCE
    assert found[SHIPPED].facts["distance_from_kernel"] > CAUGHT


def test_a_number_that_decides_twice_fails() -> None:
    class OneNumber(SpeculativeSampling):
        def accept(
            self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
        ) -> BatchVerdicts:
            return super().accept(proposals, probs, [FirstNumber(own) for own in noise])

    found = findings(OneNumber(), REMOVED)
    assert statuses(found) == {KERNEL: Status.HOLDS, SHIPPED: Status.FAILS}
    assert found[SHIPPED].facts["distance_from_target"] > CAUGHT


def test_decisions_that_hang_together_are_noticed() -> None:
    """In the middle of every cell all is right; beside it the last token looks at the number that accepted."""

    class Hangs(SpeculativeSampling):
        def accept(
            self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
        ) -> BatchVerdicts:
            verdicts = SpeculativeSampling().verify(proposals, probs, noise)
            changed = [
                replace(verdict, tokens=(*verdict.tokens[:-1], 0))
                if any(0.4 < value % 0.5 < 0.48 for value in own.script.values())  # type: ignore[attr-defined]
                else verdict
                for verdict, own in zip(verdicts, noise, strict=True)
            ]
            return BatchVerdicts.made(changed)

    cases = build(3, [(Choice(0, DRAWN),)], "dense", "dense").every_proposal()
    for rule, least, most in ((SpeculativeSampling(), 0.0, 0.0), (Hangs(), CAUGHT, 1.0)):
        cells = decision_cells(rule, cases)
        assert least <= mass_that_moves(rule, cases, cells) <= most
