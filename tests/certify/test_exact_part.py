"""The exact part of a certificate holds for right rules, for all kinds of draws, and measures lossy ones.

Nothing here is left to chance: noise is either summed over or keyed by fixed seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from certify.planted_faults import markov
from truedraft import SamplingParams
from truedraft.certify.cells import decision_cells, probs_of
from truedraft.certify.checks import Context, Finding, Part, Stack, Status
from truedraft.certify.exact import TOLERANCE, Exact
from truedraft.certify.worlds import Choice, build
from truedraft.core.proposal import DrawKind
from truedraft.drafters import NoDrafter
from truedraft.errors import IncompatibleRuleError
from truedraft.verification import (
    BlockVerification,
    LenientSampling,
    Rule,
    SpeculativeSampling,
    TypicalAcceptance,
)
from truedraft.verification.rule import JudgedRow, Outcome

HOST = torch.device("cpu")
CAUGHT = 0.01
FIXED, DRAWN, REMOVED, COUPLED = (
    DrawKind.DETERMINISTIC,
    DrawKind.INDEPENDENT,
    DrawKind.WITHOUT_REPLACEMENT,
    DrawKind.COUPLED,
)
KERNEL, SHIPPED = "kernel", "batched code, every decision cell"


class Drawing(NoDrafter):
    """Says that it makes such draws."""

    kinds = frozenset()  # type: ignore[assignment]

    def __init__(self, kinds: frozenset[DrawKind]) -> None:
        super().__init__()
        self.kinds = kinds  # type: ignore[misc]


def findings(rule: Rule, *kinds: DrawKind, seeded: bool = False, by: Rule | None = None) -> dict[str, Finding]:
    done: list[float] = []
    stack = Stack(markov(0), Drawing(frozenset(kinds)), rule, by)
    params = SamplingParams(temperature=1.0, seed=0 if seeded else None)
    found = Exact().run(Context(stack, [[1]], params, tell=done.append))
    assert done == sorted(done) and done[-1] == 1.0
    assert {each.part for each in found} == {Part.EXACT}
    return {each.name: each for each in found}


def statuses(found: dict[str, Finding]) -> dict[str, Status]:
    return {name: each.status for name, each in found.items()}


# ------------------------------------------------------------------------------- right rules


@pytest.mark.parametrize(
    "kinds",
    [(), (FIXED,), (DRAWN,), (REMOVED,), (COUPLED,), (FIXED, DRAWN, REMOVED)],
    ids=lambda kinds: "+".join(kind.value for kind in kinds) or "nothing",
)
def test_speculative_sampling_holds(kinds: tuple[DrawKind, ...]) -> None:
    found = findings(SpeculativeSampling(), *kinds)
    assert statuses(found) == dict.fromkeys([KERNEL, SHIPPED], Status.HOLDS)
    assert all(each.facts["largest_distance"] < TOLERANCE for each in found.values())
    if set(kinds) - {COUPLED}:
        facts = found[SHIPPED].facts
        assert facts["proposals"] >= 40 and facts["cells"] > 2 * facts["proposals"]
        assert f"{facts['proposals']:,} proposals, {facts['cells']:,} cells" in found[SHIPPED].summary


@pytest.mark.parametrize("kinds", [(FIXED,), (DRAWN,), (FIXED, DRAWN)], ids=["fixed", "drawn", "both"])
def test_block_verification_holds(kinds: tuple[DrawKind, ...]) -> None:
    assert statuses(findings(BlockVerification(), *kinds)) == dict.fromkeys([KERNEL, SHIPPED], Status.HOLDS)


def test_draws_that_a_rule_cannot_judge_are_refused() -> None:
    with pytest.raises(IncompatibleRuleError, match="without replacement"):
        findings(BlockVerification(), REMOVED)


# ------------------------------------------------------------------------------- lossy rules


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (LenientSampling(0.5), DRAWN),
        (LenientSampling(0.5).greedy_form, FIXED),
        (TypicalAcceptance(), FIXED),
        (TypicalAcceptance(), DRAWN),
    ],
    ids=lambda each: each.value if isinstance(each, DrawKind) else type(each).__name__,
)
def test_lossy_rules_are_measured(rule: Rule, kind: DrawKind) -> None:
    (found,) = findings(rule, kind).values()
    assert found.status is Status.MEASURED
    assert found.facts["distance_from_target"] > found.facts["mean_distance"] > CAUGHT
    assert found.facts["distance_from_kernel"] < TOLERANCE
    assert f"{found.facts['mean_distance']:.2g} from the target's distribution in the mean" in found.summary
    chooses_paths = not isinstance(rule, LenientSampling)
    assert (found.facts["compared_with_kernel"] < found.facts["proposals"]) == chooses_paths


def test_the_milder_rule_is_nearer_and_one_by_hand() -> None:
    """One token of two, drafted: it stays with min(1, p/l), so at l = 1/2 and p = 2/5 it is emitted 4/5 of the time."""
    distances = [findings(LenientSampling(share), FIXED).popitem()[1].facts["mean_distance"] for share in (0.9, 0.5)]
    assert 0.0 < distances[0] < distances[1]
    world = build(2, [(Choice(0, FIXED),)], "dense", "dense")
    world.target.weights(())[:] = [2, 3]
    world.drafters[0].weights(())[:] = [5, 1]
    (case,) = world.every_proposal()
    (probs,) = probs_of(decision_cells(LenientSampling(0.5), [case]), 1)
    assert sum(mass for verdict, mass in probs.items() if verdict.tokens[0] == 0) == pytest.approx(0.8, abs=TOLERANCE)


def test_a_lossy_rule_that_does_not_do_what_its_kernel_says_fails() -> None:
    class Hides(LenientSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            return LenientSampling(0.8).outcomes(group)

    (found,) = findings(Hides(0.5), FIXED).values()
    assert found.status is Status.FAILS
    assert found.facts["distance_from_kernel"] > CAUGHT
