"""The exact part of a certificate for seeded and greedy requests, and the tiny worlds that all of it is summed on.

Nothing here is left to chance: noise is either summed over or keyed by fixed seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_exact_part import CAUGHT, DRAWN, FIXED, HOST, KERNEL, REMOVED, SHIPPED, findings, statuses
from torch import Tensor

from truedraft.certify import exact
from truedraft.certify.checks import Status
from truedraft.certify.exact import TOLERANCE, answer_probs, expected_verdict, judged_cases, wide_cases
from truedraft.certify.worlds import World, build, worlds_for
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.testing import altered
from truedraft.verification import (
    ArgmaxRule,
    CoupledSampling,
    Rule,
    SpeculativeSampling,
)
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome


def test_seeded_and_greedy_requests_hold() -> None:
    found = findings(CoupledSampling(), *DrawKind)
    names = ["coupled kernel", "coupled walks", "coupled distribution, every cell", "greedy walks"]
    assert statuses(found) == dict.fromkeys(names, Status.HOLDS)
    assert found["coupled walks"].facts["walks"] > 400 and found["greedy walks"].facts["walks"] > 250
    assert findings(SpeculativeSampling(), seeded=True).keys() == {KERNEL, SHIPPED, *names}


# ------------------------------------------------------------------------------- coupled rules broken on purpose


def follows_draft(rule: Rule) -> Rule:
    """Follows the first drafted child, wherever there is one."""

    def accept(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        verdicts = []
        for proposal, verdict in zip(proposals, rule.verify(proposals, probs, noise), strict=True):
            first = next(iter(proposal.tree.shape.children[0]), None)
            took = None if first is None or verdict.path else proposal.tree.host_ids[first]
            verdicts.append(verdict if took is None else Verdict((), (took,), Origin.RECOVERED))
        return BatchVerdicts.made(verdicts)

    return altered(rule, accept=accept)


FOLLOWS_DRAFT = altered(follows_draft(CoupledSampling()), greedy_form=follows_draft(ArgmaxRule()))


class TiesToTheHighest(ArgmaxRule):
    """Ties go to the highest id: all else is right."""

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        turned = [(dist == dist.amax(dim=-1, keepdim=True)) * torch.arange(1, dist.shape[-1] + 1.0) for dist in probs]
        return super().accept(proposals, turned, noise)


class WarmerDist(CoupledSampling):
    """Judges at another temperature than the target's."""

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        return super().accept(proposals, [dist**0.8 for dist in probs], noise)


@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        (FOLLOWS_DRAFT, {"coupled walks", "coupled distribution, every cell", "greedy walks"}),
        (altered(CoupledSampling(), greedy_form=TiesToTheHighest()), {"greedy walks"}),
        (WarmerDist(), {"coupled walks", "coupled distribution, every cell"}),
        (SpeculativeSampling(), {"coupled walks", "coupled distribution, every cell", "greedy walks"}),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Rule) else "",
)
def test_a_broken_coupled_rule_fails(rule: Rule, failing: set[str]) -> None:
    found = findings(SpeculativeSampling(), seeded=True, by=rule)
    assert {name for name, status in statuses(found).items() if status is Status.FAILS} == failing
    if "coupled distribution, every cell" in failing:
        assert found["coupled distribution, every cell"].facts["largest_distance"] > CAUGHT
    for name in failing - {"coupled distribution, every cell"}:
        assert "are judged otherwise; the first emits" in found[name].summary


def test_a_coupled_kernel_that_follows_the_draft_fails() -> None:
    class ByDraft(CoupledSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            (row,) = group
            return super().outcomes([JudgedRow(row.draws[0].q if row.draws else row.p, row.draws)])

    found = findings(ByDraft(), DRAWN)
    assert {name for name, status in statuses(found).items() if status is Status.FAILS} == {"coupled kernel"}


def test_the_walks_hold_ties_and_every_kind_of_draw() -> None:
    asked = judged_cases()
    assert {kind for walk in asked for kind in walk.case.proposal.kinds} == set(DrawKind)
    greedy = [walk for walk in asked if walk.greedy]
    tied = [walk for walk in greedy if int((walk.case.probs[0] == walk.case.probs[0].amax()).sum()) > 1]
    assert len(tied) > 50
    assert {walk.case.probs.dtype for walk in greedy} == {torch.float64, torch.float32, torch.bfloat16}
    assert {len(walk.expected.path) for walk in asked if not walk.greedy} >= {0, 1, 2}
    case = build(3, [], "dense", "dense", largest=1).every_proposal()[0]
    assert expected_verdict(case, None).tokens == (0,)


def test_walks_over_many_tokens_go_to_their_end_or_stop_before() -> None:
    asked = wide_cases()
    assert {len(walk.expected.path) for walk in asked} == {1, 2}
    assert {walk.greedy for walk in asked} == {True, False}


def test_a_choice_that_is_wrong_among_many_tokens_alone_fails() -> None:
    class LeavesOut(CoupledSampling):
        """Looks at the likelier half of a large vocabulary only."""

        def accept(
            self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
        ) -> BatchVerdicts:
            return super().accept(proposals, [self._likely(dist) for dist in probs], noise)

        @staticmethod
        def _likely(dist: Tensor) -> Tensor:
            return dist * (dist >= dist.median(dim=-1, keepdim=True).values) if dist.shape[-1] > 1000 else dist

    found = findings(SpeculativeSampling(), seeded=True, by=LeavesOut())
    assert {name for name, status in statuses(found).items() if status is Status.FAILS} == {"coupled walks"}


def test_answers_are_found_wrong_where_only_one_place_of_a_cell_is() -> None:
    """Beside the edges of the cells the answer is another one."""

    class Wrong(CoupledSampling):
        def accept(
            self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
        ) -> BatchVerdicts:
            moved = [
                dist.roll(1, -1) if own.differences[0] > 5 else dist for dist, own in zip(probs, noise, strict=True)
            ]  # type: ignore[attr-defined]
            return super().accept(proposals, moved, noise)

    assert answer_probs(CoupledSampling(), HOST).moved == 0.0
    assert answer_probs(Wrong(), HOST).moved > CAUGHT


# ------------------------------------------------------------------------------- the worlds


def worlds() -> list[World]:
    return worlds_for(frozenset({FIXED, DRAWN, REMOVED}))


def test_worlds_hold_chains_trees_and_several_draws_of_every_kind() -> None:
    for each in worlds():
        assert sum(case.probability for case in each.every_proposal()) == pytest.approx(1.0, abs=TOLERANCE)
    cases = [case for world in worlds() for case in world.every_proposal()]
    assert {kind for case in cases for kind in case.proposal.kinds} == {FIXED, DRAWN, REMOVED}
    assert {world.target.vocab for world in worlds()} == {2, 3, 4}
    shapes = {case.proposal.tree.shape for case in cases}
    assert {shape.is_chain for shape in shapes} == {True, False}
    assert {shape.depth for shape in shapes} >= {0, 1, 2, 3}
    mixed = [{draw.kind for draw in draws} for case in cases for draws in case.proposal.draws]
    assert {FIXED, DRAWN, REMOVED} in mixed
    repeats = [draws for case in cases for draws in case.proposal.draws if len({d.child for d in draws}) < len(draws)]
    assert repeats  # two draws that name one child
    assert any(not case.probs.all() for case in cases)  # distributions with zeros


def test_batches_hold_different_trees_and_requests_with_nothing_drafted() -> None:
    batches = list(exact._batches(worlds_for(frozenset({DRAWN}))))
    shapes = [[case.proposal.tree.shape for _, cases in batch for case in cases] for batch in batches]
    assert max(len(set(each)) for each in shapes) > 5
    assert any(len(shape) == 0 for each in shapes for shape in each)
