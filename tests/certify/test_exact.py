"""The exact part of a certificate: it holds for right rules, measures lossy ones, fails for those broken on purpose.

Nothing here is left to chance: noise is either summed over or keyed by fixed seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from certify.planted_faults import findings_of, markov
from support.broken_rules import AcceptsAlways, DrawsFromTarget, PassesByWeight, hiding
from support.faulty_parts import replaced_probs
from truedraft import SamplingParams
from truedraft.certify import exact, faults
from truedraft.certify.cells import decision_cells, mass_that_moves, probs_of
from truedraft.certify.checks import Finding, Stack, Status
from truedraft.certify.exact import TOLERANCE, Exact, answer_probs, expected_verdict, judged_cases, wide_cases
from truedraft.certify.worlds import Choice, World, build, worlds_for
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters import NoDrafter
from truedraft.errors import IncompatibleRuleError
from truedraft.testing import altered
from truedraft.verification import (
    ArgmaxRule,
    BlockVerification,
    CoupledSampling,
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
    stack = Stack(markov(0), Drawing(frozenset(kinds)), rule, by)
    params = SamplingParams(temperature=1.0, seed=0 if seeded else None)
    return findings_of(Exact(), stack, params, 1, [[1]])


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


# ------------------------------------------------------------------------------- rules broken on purpose


@pytest.mark.parametrize(
    ("rule", "kind"),
    [(AcceptsAlways(), DRAWN), (AcceptsAlways(), FIXED), (DrawsFromTarget(), REMOVED), (PassesByWeight(), DRAWN)],
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


def test_a_right_kernel_does_not_hide_what_verify_does() -> None:
    rule = hiding(SpeculativeSampling, accept_probability=lambda self, p_x, q_x: 1.1 * p_x / (q_x + 1e-300))
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
    one_number = faults.given_another(SpeculativeSampling(), lambda own, probs, noise: (own, probs, FirstNumber(noise)))
    found = findings(one_number, REMOVED)
    assert statuses(found) == {KERNEL: Status.HOLDS, SHIPPED: Status.FAILS}
    assert found[SHIPPED].facts["distance_from_target"] > CAUGHT


def test_decisions_that_hang_together_are_noticed() -> None:
    """In the middle of every cell all is right; beside it the last token looks at the number that accepted."""

    def hangs(verdict: Verdict, proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
        beside = any(0.4 < value % 0.5 < 0.48 for value in noise.script.values())  # type: ignore[attr-defined]
        return replace(verdict, tokens=(*verdict.tokens[:-1], 0)) if beside else verdict

    cases = build(3, [(Choice(0, DRAWN),)], "dense", "dense").every_proposal()
    sound = SpeculativeSampling()
    for rule, least, most in ((sound, 0.0, 0.0), (faults.judging(sound, hangs), CAUGHT, 1.0)):
        cells = decision_cells(rule, cases)
        assert least <= mass_that_moves(rule, cases, cells) <= most


# ------------------------------------------------------------------------------- seeded and greedy requests


def test_seeded_and_greedy_requests_hold() -> None:
    found = findings(CoupledSampling(), *DrawKind)
    names = ["coupled kernel", "coupled walks", "coupled distribution, every cell", "greedy walks"]
    assert statuses(found) == dict.fromkeys(names, Status.HOLDS)
    assert found["coupled walks"].facts["walks"] > 400 and found["greedy walks"].facts["walks"] > 250
    assert findings(SpeculativeSampling(), seeded=True).keys() == {KERNEL, SHIPPED, *names}


# ------------------------------------------------------------------------------- coupled rules broken on purpose


def follows_draft(verdict: Verdict, proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
    """Follows the first drafted child, wherever there is one."""
    first = next(iter(proposal.tree.shape.children[0]), None)
    if first is None or verdict.path:
        return verdict
    return Verdict((), (proposal.tree.host_ids[first],), Origin.RECOVERED)


def highest_first(probs: Tensor) -> Tensor:
    """Ties go to the highest id: all else is right."""
    return (probs == probs.amax(dim=-1, keepdim=True)) * torch.arange(1, probs.shape[-1] + 1.0)


COUPLED_RULE, GREEDY_RULE = CoupledSampling(), ArgmaxRule()
DRAFT_FOLLOWED = faults.judging(COUPLED_RULE, follows_draft)


@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        (
            altered(DRAFT_FOLLOWED, greedy_form=faults.judging(GREEDY_RULE, follows_draft)),
            {"coupled walks", "coupled distribution, every cell", "greedy walks"},
        ),
        (altered(COUPLED_RULE, greedy_form=replaced_probs(GREEDY_RULE, highest_first)), {"greedy walks"}),
        (replaced_probs(COUPLED_RULE, lambda p: p**0.8), {"coupled walks", "coupled distribution, every cell"}),
        (SpeculativeSampling(), {"coupled walks", "coupled distribution, every cell", "greedy walks"}),
    ],
    ids=["follows the draft", "ties to the highest", "another temperature", "speculative sampling"],
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
    def likelier_half(p: Tensor) -> Tensor:
        return p * (p >= p.median(dim=-1, keepdim=True).values) if p.shape[-1] > 1000 else p

    found = findings(SpeculativeSampling(), seeded=True, by=replaced_probs(COUPLED_RULE, likelier_half))
    assert {name for name, status in statuses(found).items() if status is Status.FAILS} == {"coupled walks"}


def test_answers_are_found_wrong_where_only_one_place_of_a_cell_is() -> None:
    """Beside the edges of the cells the answer is another one."""

    def moved(own: Proposal, probs: Tensor, noise: Noise) -> faults.Given:
        return own, probs.roll(1, -1) if noise.differences[0] > 5 else probs, noise  # type: ignore[attr-defined]

    assert answer_probs(COUPLED_RULE, HOST).moved == 0.0
    assert answer_probs(faults.given_another(COUPLED_RULE, moved), HOST).moved > CAUGHT


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
