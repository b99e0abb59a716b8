"""Measuring: known costs come back, the drafter is asked as the engine asks it, and time limits hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from timed_doubles import Clock, TimedDrafter, TimedModel

from support.tiny_models import noisy, packed
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import DraftRequest, Features, NoDrafter, StepOutcome
from truedraft.engine.policy import Effort, measure_drafter, measure_target
from truedraft.engine.policy.measuring import piecewise
from truedraft.errors import DrafterError, OptionError, VocabularyMismatchError
from truedraft.progress import unwatched
from truedraft.testing import MarkovModel, ScriptedDrafter

ONCE = Effort(budget_s=0.0, least_rounds=1, most_rounds=1)
THRICE = Effort(budget_s=60.0, least_rounds=3, most_rounds=3)


def linear(rows: int, contexts: tuple[int, ...]) -> float:
    """2 ms, 0.1 ms a row, a microsecond for each row and cached token, 0.5 ms a further request."""
    each = rows / len(contexts)
    return 2e-3 + 1e-4 * rows + sum(1e-6 * each * length for length in contexts) + 5e-4 * (len(contexts) - 1)


def test_the_cost_of_a_target_comes_back() -> None:
    clock = Clock()
    cost = measure_target(TimedModel.of(clock, linear), effort=THRICE, clock=clock)
    for rows, contexts in [(1, (128,)), (64, (1024,)), (5, (700,)), (16, (1500,)), (8, (128,) * 8), (6, (200, 300))]:
        assert cost(rows, contexts) == pytest.approx(linear(rows, contexts), rel=1e-6)


@pytest.mark.parametrize(("slow", "saved_s"), [(1.0, 1e-3), (10.0, 0.0)])
def test_what_plain_forwards_save_where_many_follow_each_other(slow: float, saved_s: float) -> None:
    """A millisecond from the 30th on; where so many take too long nobody looks."""
    clock = Clock()
    plain = 0

    def settling(rows: int, contexts: tuple[int, ...]) -> float:
        nonlocal plain
        plain = plain + 1 if rows == 1 else 0
        return slow * (linear(rows, contexts) - 1e-3 * (plain > 30))

    cost = measure_target(TimedModel.of(clock, settling), effort=THRICE, clock=clock)
    assert cost.settles_s == pytest.approx(saved_s)
    assert cost(1, [128]) == pytest.approx(slow * linear(1, (128,)) - saved_s)
    assert cost(2, [128]) == pytest.approx(slow * linear(2, (128,)))
    assert cost(2, [128, 128]) == pytest.approx(slow * linear(2, (128, 128)) - saved_s, rel=1e-3)


def test_a_slow_moment_does_not_count() -> None:
    """One forward in 29 takes a second more; medians of nine rounds do not see it."""
    clock = Clock()
    calls = 0

    def disturbed(rows: int, contexts: tuple[int, ...]) -> float:
        nonlocal calls
        calls += 1
        return linear(rows, contexts) + (calls % 29 == 0)

    effort = Effort(budget_s=1e9, least_rounds=9, most_rounds=9)
    cost = measure_target(TimedModel.of(clock, disturbed), effort=effort, clock=clock)
    assert cost(8, [512]) == pytest.approx(linear(8, (512,)), rel=1e-6)


@pytest.mark.parametrize("context_length", [1, 5, 64, 200, 640])
def test_small_contexts_are_not_exceeded(context_length: int) -> None:
    clock = Clock()
    longest = 0

    def watched(rows: int, contexts: tuple[int, ...]) -> float:
        nonlocal longest
        longest = max(longest, max(contexts) + rows // len(contexts))
        return 1e-3

    cost = measure_target(TimedModel.of(clock, watched, context_length), effort=ONCE, clock=clock)
    assert longest <= max(2, context_length)
    assert cost(1, [1]) == pytest.approx(1e-3)


def test_a_real_model_is_measured_and_left_as_it_was() -> None:
    model = packed("llama")
    seen: list[tuple[float, str]] = []
    cost = measure_target(model, effort=ONCE, progress=lambda *each: seen.append(each))
    assert cost(1, [128]) > 0.0
    assert cost(64, [192]) >= cost(1, [128])
    assert model.pool.in_use == 0
    done, label = seen[-1]
    assert done == 1.0
    assert "llama" in label
    assert [each[0] for each in seen] == sorted(each[0] for each in seen)


def test_filled_caches_hold_what_a_first_token_left() -> None:
    """Measured attention must read memory that was written: other values could be denormal, and slow."""
    model = packed("llama")
    lengths: list[int] = []
    release = model.release_cache

    def inspect(cache):  # type: ignore[no-untyped-def]
        lengths.append(cache.length)
        for keys, values in cache.entries():
            assert torch.equal(keys, keys[:, :1].expand_as(keys))
            assert torch.equal(values, values[:, :1].expand_as(values))
        release(cache)

    model.release_cache = inspect  # type: ignore[method-assign]
    measure_target(model, effort=ONCE)
    assert sorted(set(lengths)) == [128, 192]


def test_the_cost_of_a_drafter_comes_back_by_depth() -> None:
    clock = Clock()
    drafter = TimedDrafter(clock, depth=4)
    target = TimedModel.of(clock, linear)
    cost = measure_drafter(drafter, target, effort=THRICE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2, 3, 4]
    for depth in range(1, 5):
        assert cost(depth) == pytest.approx(4e-3 + 2e-3 * depth)
        assert cost.of_nodes(depth) == pytest.approx(cost(depth))
    assert not drafter.live


def test_the_drafter_is_treated_as_in_the_engine() -> None:
    clock = Clock()
    drafter = TimedDrafter(clock, depth=12)
    measure_drafter(drafter, TimedModel.of(clock, linear, 64), effort=Effort(1e9, 30, 30), clock=clock)
    assert len(drafter.ended) > 1  # requests that grew long gave way to new ones
    assert drafter.longest <= 64
    accepted = {len(outcome.path) / len(outcome.proposal.tree) for _, outcome in drafter.outcomes if outcome.path}
    assert 1.0 in accepted
    assert min(accepted) < 1.0
    for request, outcome in drafter.outcomes:
        assert request < 0
        tokens = [outcome.proposal.tree.host_ids[node] for node in outcome.path]
        assert list(outcome.tokens[:-1]) == tokens
        assert outcome.hidden is None
    assert {budget.depth for budget in drafter.budgets} == {1, 2, 3, 4, 5, 6, 7, 8, 12}


def test_a_proposal_counts_for_the_depth_that_it_has() -> None:
    clock = Clock()
    cost = measure_drafter(TimedDrafter(clock, depth=4, most=2), TimedModel.of(clock, linear), effort=ONCE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2]


def test_a_cascade_counts_for_the_levels_that_it_took_on_a_text_without_repeats() -> None:
    """Its first guess is always right and the second never: a chain of four takes two levels."""

    class Saving(TimedDrafter):
        levels = 0

        def propose(
            self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
        ) -> list[Proposal]:
            seen.append(list(batch[0].tokens[:3]))
            self.levels = (budgets[0].depth + 1) // 2
            return super().propose(batch, budgets, noise)

    seen: list[list[int]] = []
    clock = Clock()
    target = TimedModel.of(clock, linear)
    cost = measure_drafter(Saving(clock, depth=4), target, effort=THRICE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2]
    assert cost(1) == pytest.approx(4e-3 + 2e-3 * 1.5, abs=1.1e-3)
    assert cost(2) == pytest.approx(4e-3 + 2e-3 * 3.5, abs=1.1e-3)
    assert all(len(set(tokens)) == target.vocab_size for tokens in seen)


def test_a_drafter_that_finds_nothing_costs_its_search() -> None:
    clock = Clock()
    cost = measure_drafter(TimedDrafter(clock, most=0), TimedModel.of(clock, linear), effort=ONCE, clock=clock)
    assert cost(1) == cost(4) == pytest.approx(4e-3)


def test_no_drafter_costs_nothing() -> None:
    assert measure_drafter(NoDrafter(), MarkovModel.random(5, 0)).points == ()


def test_prompt_lookup_finds_what_repeats() -> None:
    cost = measure_drafter(PromptLookup(3), MarkovModel.random(50, 0, context_length=256), effort=ONCE)
    assert [(point.depth, point.nodes) for point in cost.points] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)])
@pytest.mark.parametrize(("branching", "nodes"), [((1, 1, 1), [1, 2, 3]), ((2, 2), [2, 6])])
def test_draft_models_are_measured_as_chains_and_trees(
    params: SamplingParams | None, branching: tuple[int, ...], nodes: list[int]
) -> None:
    draft = noisy("llama", 0.3)
    cost = measure_drafter(DraftModel(draft, branching=branching), packed("llama"), params=params, effort=ONCE)
    assert [point.nodes for point in cost.points] == nodes
    assert cost(1) > 0.0
    assert draft.pool.in_use == 0


def test_hidden_vectors_are_given_to_those_that_want_them() -> None:
    class Hungry(TimedDrafter):
        features: Features | None = Features()

    drafter = Hungry(Clock(), depth=2)
    target = packed("llama")
    measure_drafter(drafter, target, effort=ONCE)
    for _, outcome in drafter.outcomes:
        assert outcome.hidden is not None
        assert outcome.hidden.shape == (1, 48)
    assert target.pool.in_use == 0


def test_a_drafter_that_does_not_fit_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError):
        measure_drafter(DraftModel(MarkovModel.random(5, 0)), MarkovModel.random(6, 0))


def test_a_drafter_that_fails_says_so_in_one_sentence() -> None:
    def broken(tokens: object) -> list[list[int]]:
        raise ZeroDivisionError("oh no")

    with pytest.raises(DrafterError, match=r"'scripted' failed while .* measured \(ZeroDivisionError: oh no\)"):
        measure_drafter(ScriptedDrafter(broken), MarkovModel.random(5, 0))


def test_a_drafter_that_fails_is_told_the_end() -> None:
    class Failing(TimedDrafter):
        def observe(self, batch: list[DraftRequest], outcomes: list[StepOutcome]) -> None:  # type: ignore[override]
            raise RuntimeError("full")

    drafter = Failing(Clock())
    with pytest.raises(DrafterError, match="full"):
        measure_drafter(drafter, MarkovModel.random(5, 0))
    assert not drafter.live


def test_rounds_interleave_and_stop_when_time_is_up() -> None:
    clock = Clock()
    seen: list[tuple[str, int]] = []

    def measure(key: str, number: int) -> bool:
        seen.append((key, number))
        clock.now += 1.0
        return True

    progress: list[float] = []
    rounds = list(piecewise("abc", measure, Effort(10.0, 2, 50), lambda done, _: progress.append(done), "x", clock))[-1]
    assert rounds == 3  # a round takes 3 s, the warm-up too: 12 s are over after the third
    assert [number for _, number in seen] == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    assert len({tuple(key for key, number in seen if number == n) for n in range(3)}) == 3
    assert progress[-1] == 1.0 and progress[0] == pytest.approx(1 / (3 * 51))
    seen.clear()
    assert list(piecewise("abc", measure, Effort(0.0, 2, 50), unwatched, "x", clock))[-1] == 2
    assert list(piecewise("abc", measure, Effort(1e9, 2, 4), unwatched, "x", clock))[-1] == 4


@pytest.mark.parametrize("values", [(-1.0, 1, 1), (float("nan"), 1, 1), (1.0, 0, 1), (1.0, 3, 2)])
def test_an_effort_that_measures_nothing_is_refused(values: tuple[float, int, int]) -> None:
    with pytest.raises(OptionError, match="least_rounds"):
        Effort(*values)
