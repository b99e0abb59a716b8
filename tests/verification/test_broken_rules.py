"""Rules broken on purpose: each must be caught, by the kernel's recursion and through the shipped `verify`.

Every world here is also judged by the rule that is not broken, which passes to 1e-12: the worlds have the power.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from decision_cells import Key, ScriptedNoise, by_kernel, by_verify, cell_probs, completed, kernel_dist, step_dist
from small_worlds import A1, A2, A3, F1, F2, NODES, W2, W3, Case, World, build, every_proposal, gap
from torch import Tensor

from support.broken_rules import AcceptsAlways, AcceptsWithoutRatio, DrawsFromTarget, JudgesAnotherDist, RemovesNothing
from truedraft.core.noise import Purpose
from truedraft.core.proposal import Proposal
from truedraft.verification import CoupledSampling, SpeculativeSampling
from truedraft.verification.exact import target_dist
from truedraft.verification.rule import JudgedRow, Outcome
from truedraft.verification.walk import Number

EXACT, CAUGHT = 1e-12, 0.01


class ForgetsWhatLeft(SpeculativeSampling):
    """Judges each of several candidates as if those before it had not been rejected."""

    def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
        return p_x


class RestsOnlyTheToken(SpeculativeSampling):
    """After a rejection takes only the rejected token out of p, as is right for one-hot distributions alone."""

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        rest = p * (q < p)
        mass = rest.sum(dim=-1, keepdim=True)
        return torch.where(mass > 0, rest / mass, p)


class RemovesWithoutScaling(SpeculativeSampling):
    """q is not renormalised after a removal."""

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        return q.scatter(-1, tokens, 0.0)


BROKEN: list[tuple[type[SpeculativeSampling], World]] = [
    (AcceptsAlways, build("broken", 3, [A1, A1])),
    (AcceptsAlways, build("broken", 3, [F1, F1])),
    (AcceptsAlways, build("broken", 3, [W2])),
    (AcceptsWithoutRatio, build("broken", 3, [A1, A1])),
    (DrawsFromTarget, build("broken", 3, [A1, A1])),
    (DrawsFromTarget, build("broken", 4, [F2])),
    (DrawsFromTarget, build("broken", 3, [A2, A1])),
    (RestsOnlyTheToken, build("broken", 5, [A1, A1])),
    (RemovesWithoutScaling, build("broken", 3, [W3], "dense", "dense")),
    (RemovesWithoutScaling, build("broken two", 4, [W2], "dense", "dense")),
    (RemovesNothing, build("broken", 3, [W2, A1])),
    (RemovesNothing, build("broken", 4, [NODES["sampled, then fixed"]])),
    (JudgesAnotherDist, build("broken", 3, [A1, A1])),
    (JudgesAnotherDist, build("broken", 3, [A3])),
    (JudgesAnotherDist, build("broken", 4, [W2])),
]
NAMES = [f"{rule.__name__}-{i}" for i, (rule, _) in enumerate(BROKEN)]


@pytest.mark.parametrize(("broken", "world"), BROKEN, ids=NAMES)
def test_a_broken_rule_is_caught_by_the_kernel_and_by_verify(broken: type, world: World) -> None:
    assert by_kernel(SpeculativeSampling(), world) < EXACT
    assert by_verify(SpeculativeSampling(), world) < EXACT
    assert by_kernel(broken(), world) > CAUGHT
    assert by_verify(broken(), world) > CAUGHT


def test_a_kernel_that_hides_what_verify_does_is_caught() -> None:
    """An exact kernel beside a broken `verify`: the cells are measured, so they differ from the kernel."""

    class Hides(SpeculativeSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            return SpeculativeSampling().outcomes(group)

    class HidesAcceptance(Hides):
        def accept_probability(self, p_x: Number, q_x: Number) -> Number:
            return 1.1 * p_x / (q_x + 1e-300)

    class HidesResidual(Hides):
        def rejected(self, p: Tensor, q: Tensor) -> Tensor:
            return p

    class HidesRemoval(Hides):
        def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
            return q

    for rule, plan in [(HidesAcceptance(), A1), (HidesResidual(), A1), (HidesRemoval(), W2), (ForgetsWhatLeft(), F2)]:
        world = build("hidden", 3, [plan])
        cases = every_proposal(world)
        gaps = [gap(dist, kernel_dist(rule, case)) for case, dist in zip(cases, cell_probs(rule, cases), strict=True)]
        assert max(gaps) > CAUGHT
        assert by_kernel(rule, world) < EXACT
        assert by_verify(rule, world) > CAUGHT


# ------------------------------------------------------------------------------- one key for two decisions


class OneKey:
    """Noise in which several decisions read one number."""

    def __init__(self, noise: ScriptedNoise, same_as: Callable[[Key], Key]) -> None:
        self._noise, self._same_as = noise, same_as

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self._noise.script[self._same_as((purpose, depth, index))]

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        return None


GRID = 2000


def dist_on_a_grid(cases: Sequence[Case], same_as: Callable[[Key], Key], key: Key) -> dict[tuple[int, ...], float]:
    """The distribution of the first token when all decisions read `key`, summed over a grid finer than any tolerance
    here."""
    dist: dict[tuple[int, ...], float] = {}
    grid = [(i + 0.5) / GRID for i in range(GRID)]
    for case in cases:
        noise = [OneKey(ScriptedNoise({key: u}), same_as) for u in grid]
        verdicts = SpeculativeSampling().verify([case.proposal] * GRID, [case.probs] * GRID, noise)
        for verdict in verdicts:
            first = verdict.tokens[:1]
            dist[first] = dist.get(first, 0.0) + case.probability / GRID
    return dist


ACCEPT = (Purpose.ACCEPT, 0, 0)


def test_acceptance_and_recovered_token_on_one_key_are_caught() -> None:
    """Given a rejection u is in [p/q, 1): the residual's first tokens would never be drawn."""
    world = build("key", 3, [A1])
    dist = dist_on_a_grid(every_proposal(world), lambda key: ACCEPT, ACCEPT)
    assert gap(dist, target_dist(world.target.dist, 1)) > CAUGHT


def test_two_draws_of_one_node_on_one_key_are_caught() -> None:
    """The second sibling is judged with a number that is known to be large: it is accepted too rarely."""
    world = build("siblings", 3, [A2])
    world.target.fix((), [10, 7, 3])
    world.drafters["a"].fix((), [1, 3, 6])  # after token 2 is rejected, p is (8/9, 1/9, 0) and then (1, 0, 0)
    shared = dist_of_two_draws(world, lambda key: ACCEPT if key[0] is Purpose.ACCEPT else key, 400, 1)
    apart = dist_of_two_draws(world, lambda key: key, 40, 40)
    assert gap(shared, target_dist(world.target.dist, 1)) > 2 * CAUGHT
    assert gap(apart, target_dist(world.target.dist, 1)) < CAUGHT / 2


def dist_of_two_draws(
    world: World, same_as: Callable[[Key], Key], rows: int, columns: int
) -> dict[tuple[int, ...], float]:
    grid = [((i + 0.5) / rows, (j + 0.5) / columns) for i in range(rows) for j in range(columns)]
    dist: dict[tuple[int, ...], float] = {}
    for case in every_proposal(world):
        scripts = [
            {ACCEPT: u, (Purpose.ACCEPT, 0, 1): v, (Purpose.RECOVERED, 0, 0): 0.5, (Purpose.BONUS, 1, 0): 0.5}
            for u, v in grid
        ]
        noise = [OneKey(ScriptedNoise(script), same_as) for script in scripts]
        for verdict in SpeculativeSampling().verify([case.proposal] * len(grid), [case.probs] * len(grid), noise):
            dist[verdict.tokens[:1]] = dist.get(verdict.tokens[:1], 0.0) + case.probability / len(grid)
    return dist


def test_draft_and_acceptance_on_one_key_are_caught() -> None:
    """The number that drew the token also judges it."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.8]], dtype=torch.float64)
    first: dict[tuple[int, ...], float] = {}
    slices = 10
    grid = [((i + 0.5) / 200, (j + 0.5) / slices) for i in range(200) for j in range(slices)]
    proposals = [Proposal.chain(torch.tensor([int(u >= 0.2)]), q) for u, _ in grid]
    noise = [ScriptedNoise({ACCEPT: u, (Purpose.RECOVERED, 0, 0): v}) for u, v in grid]
    for verdict in SpeculativeSampling().verify(proposals, [p] * len(grid), noise):
        first[verdict.tokens[:1]] = first.get(verdict.tokens[:1], 0.0) + 1 / len(grid)
    assert gap(first, {(0,): 0.5, (1,): 0.5}) > CAUGHT


def test_the_grid_itself_is_fine_enough() -> None:
    """The same grids with a key for each decision stay within the grid's own error, far below what counts as caught."""
    world = build("key", 3, [A1])
    cases = every_proposal(world)
    dist: dict[tuple[int, ...], float] = {}
    side = 50
    grid = [((i + 0.5) / side, (j + 0.5) / side) for i in range(side) for j in range(side)]
    for case in cases:
        noise = [ScriptedNoise({ACCEPT: u, (Purpose.RECOVERED, 0, 0): v}) for u, v in grid]
        for verdict in SpeculativeSampling().verify([case.proposal] * len(grid), [case.probs] * len(grid), noise):
            dist[verdict.tokens[:1]] = dist.get(verdict.tokens[:1], 0.0) + case.probability / len(grid)
    assert gap(dist, target_dist(world.target.dist, 1)) < 0.006


# ------------------------------------------------------------------------------- predictable choice


def test_dropping_drawn_tokens_by_their_probability_is_caught() -> None:
    """Not the rule but the drafter is broken here: a token that was drawn and found unlikely is not shown."""
    world = build("dropped", 3, [A1])
    cases = every_proposal(world)
    hidden = []
    for case in cases:
        token = case.proposal.tree.host_ids[0]
        dropped = float(case.proposal.probs[0, token]) < 0.4
        hidden.append(Case(case.probability, Proposal.empty(), case.probs[:1]) if dropped else case)
    assert any(not len(case.proposal.tree) for case in hidden) and any(len(case.proposal.tree) for case in hidden)
    step = step_dist(hidden, cell_probs(SpeculativeSampling(), hidden))
    assert gap(completed(step, world.target.dist, 2), target_dist(world.target.dist, 2)) > CAUGHT


def test_a_coupled_rule_that_judges_by_the_draft_distribution_is_caught() -> None:
    class FollowsDraft(CoupledSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            (row,) = group
            return super().outcomes([JudgedRow(row.draws[0].q if row.draws else row.p, row.draws)])

    world = build("coupled", 3, [A1, A1])
    assert by_kernel(CoupledSampling(), world) < EXACT
    assert by_kernel(FollowsDraft(), world) > CAUGHT
