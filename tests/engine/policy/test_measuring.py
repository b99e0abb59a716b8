"""Measuring: known costs come back, the drafter is called as the engine calls it, and time limits hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from support.fake_times import FakeClock, TimedDrafter, timed_model
from support.recorded_time import UNRECORDED, recorded_model
from support.tiny_models import noisy, packed
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.stats import Settling
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import DraftRequest, Features, NoDrafter, StepOutcome
from truedraft.engine.policy import Effort, measure_drafter, measure_target, measuring, read_bandwidth
from truedraft.engine.policy.measuring import piecewise
from truedraft.errors import DrafterError, OptionError, VocabularyMismatchError
from truedraft.machine import this_machine
from truedraft.progress import unwatched
from truedraft.testing import MarkovModel

ONCE = Effort(budget_s=0.0, least_rounds=1, most_rounds=1)
THRICE = Effort(budget_s=60.0, least_rounds=3, most_rounds=3)


def linear(rows: int, contexts: tuple[int, ...]) -> float:
    """2 ms, 0.1 ms a row, a microsecond for each row and cached token, 0.5 ms a further request."""
    each = rows / len(contexts)
    return 2e-3 + 1e-4 * rows + sum(1e-6 * each * length for length in contexts) + 5e-4 * (len(contexts) - 1)


def test_the_cost_of_a_target_comes_back() -> None:
    clock = FakeClock()
    cost = measure_target(timed_model(clock, linear), effort=THRICE, clock=clock)
    for rows, contexts in [(1, (128,)), (64, (1024,)), (5, (700,)), (16, (1500,)), (8, (128,) * 8), (6, (200, 300))]:
        assert cost(rows, contexts) == pytest.approx(linear(rows, contexts), rel=1e-6)


@pytest.mark.parametrize(("slow", "saved_s"), [(1.0, 1e-3), (10.0, 0.0)])
def test_what_plain_forwards_save_where_many_follow_each_other(slow: float, saved_s: float) -> None:
    """A millisecond from the 30th on; where so many take too long nobody looks."""
    clock = FakeClock()
    plain = 0

    def settling(rows: int, contexts: tuple[int, ...]) -> float:
        nonlocal plain
        plain = plain + 1 if rows == 1 else 0
        return slow * (linear(rows, contexts) - 1e-3 * (plain > 30))

    cost = measure_target(timed_model(clock, settling), effort=THRICE, clock=clock)
    assert cost.settles_s == pytest.approx(saved_s)
    assert cost(1, [128]) == pytest.approx(slow * linear(1, (128,)) - saved_s)
    assert cost(2, [128]) == pytest.approx(slow * linear(2, (128,)))
    assert cost(2, [128, 128]) == pytest.approx(slow * linear(2, (128, 128)) - saved_s, rel=1e-3)


def test_two_slow_moments_of_three_do_not_count() -> None:
    """Of each kind of forward every third takes what it should, also of those that follow each other at the end."""
    clock = FakeClock()
    calls: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def disturbed(rows: int, contexts: tuple[int, ...]) -> float:
        calls[rows, contexts] += 1
        return linear(rows, contexts) * (1.0 + (calls[rows, contexts] % 3 > 0))

    effort = Effort(budget_s=1e9, least_rounds=3, most_rounds=3)
    cost = measure_target(timed_model(clock, disturbed), effort=effort, clock=clock)
    assert cost(8, [512]) == pytest.approx(linear(8, (512,)), rel=1e-6)
    assert cost.settles_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("context_length", [1, 5, 64, 200, 640])
def test_small_contexts_are_not_exceeded(context_length: int) -> None:
    clock = FakeClock()
    longest = 0

    def watched(rows: int, contexts: tuple[int, ...]) -> float:
        nonlocal longest
        longest = max(longest, max(contexts) + rows // len(contexts))
        return 1e-3

    cost = measure_target(timed_model(clock, watched, context_length), effort=ONCE, clock=clock)
    assert longest <= max(2, context_length)
    assert cost(1, [1]) == pytest.approx(1e-3)


def test_a_real_model_is_measured_and_left_as_it_was() -> None:
    model = packed("llama")
    seen: list[tuple[float, str]] = []
    cost = measure_target(model, effort=ONCE, progress=lambda *each: seen.append(each))
    assert 0.0 < cost(1, [128]) <= cost(64, [192])
    assert model.pool.in_use == 0
    assert seen[-1][0] == 1.0 and "llama" in seen[-1][1]
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
    clock = FakeClock()
    drafter = TimedDrafter(clock, depth=4)
    target = timed_model(clock, linear)
    cost = measure_drafter(drafter, target, effort=THRICE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2, 3, 4]
    for depth in range(1, 5):
        assert cost(depth) == pytest.approx(4e-3 + 2e-3 * depth)
        assert cost.of_nodes(depth) == pytest.approx(cost(depth))
    assert not drafter.live


def test_the_drafter_is_treated_as_in_the_engine() -> None:
    clock = FakeClock()
    drafter = TimedDrafter(clock, depth=12)
    measure_drafter(drafter, timed_model(clock, linear, 64), effort=Effort(1e9, 30, 30), clock=clock)
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
    clock, target = FakeClock(), timed_model(FakeClock(), linear)
    cost = measure_drafter(TimedDrafter(clock, depth=4, most=2), target, effort=ONCE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2]
    nothing = measure_drafter(TimedDrafter(clock, most=0), target, effort=ONCE, clock=clock)
    assert nothing(1) == nothing(4) == pytest.approx(4e-3), "the search"
    assert measure_drafter(NoDrafter(), target).points == ()


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
    clock = FakeClock()
    target = timed_model(clock, linear)
    cost = measure_drafter(Saving(clock, depth=4), target, effort=THRICE, clock=clock)
    assert [point.depth for point in cost.points] == [1, 2]
    assert cost(1) == pytest.approx(4e-3 + 2e-3 * 1.5, abs=1.1e-3)
    assert cost(2) == pytest.approx(4e-3 + 2e-3 * 3.5, abs=1.1e-3)
    assert all(len(set(tokens)) == target.vocab_size for tokens in seen)


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

    drafter = Hungry(FakeClock(), depth=2)
    target = packed("llama")
    measure_drafter(drafter, target, effort=ONCE)
    for _, outcome in drafter.outcomes:
        assert outcome.hidden is not None
        assert outcome.hidden.shape == (1, 48)
    assert target.pool.in_use == 0


def test_a_drafter_that_fails_or_does_not_fit_is_named_and_told_the_end() -> None:
    class Failing(TimedDrafter):
        def observe(self, batch: list[DraftRequest], outcomes: list[StepOutcome]) -> None:  # type: ignore[override]
            raise ZeroDivisionError("oh no")

    drafter = Failing(FakeClock())
    with pytest.raises(DrafterError, match=r"'scripted' failed while .* measured \(ZeroDivisionError: oh no\)"):
        measure_drafter(drafter, MarkovModel.random(5, 0))
    assert not drafter.live
    with pytest.raises(VocabularyMismatchError):
        measure_drafter(DraftModel(MarkovModel.random(5, 0)), MarkovModel.random(6, 0))


def test_rounds_interleave_and_stop_when_time_is_up() -> None:
    clock = FakeClock()
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


SHORT = Effort(1.0, 3, 25)
DRAFT_S = 0.5e-3


def seconds(rows: int) -> float:
    """Of a large model on a GPU: nearly all of it is reading the weights."""
    return 5.5e-3 + 1e-5 * rows


@pytest.mark.parametrize("effort", [ONCE, SHORT], ids=["one round", "as at the first request"])
def test_what_a_target_costs_is_what_its_replays_take(effort: Effort) -> None:
    clock = FakeClock()
    cost = measure_target(recorded_model("target", clock, seconds), effort=effort, clock=clock)
    for rows in (1, 2, 5, 16, 33, 64):
        assert cost(rows, [128]) == pytest.approx(seconds(rows), rel=1e-9)
        assert cost(rows, [448]) == pytest.approx(seconds(rows), rel=1e-9)
    assert cost(8, [128] * 8) == pytest.approx(seconds(8), rel=1e-9)
    assert cost.settles_s == 0.0


def test_what_a_draft_costs_is_what_its_replays_take() -> None:
    """A level of depth is a forward, and the first one catches up: by two rows where all was accepted, in round 1."""
    clock = FakeClock()
    target, draft = recorded_model("target", clock, seconds), recorded_model("draft", clock, lambda rows: DRAFT_S)
    cost = measure_drafter(DraftModel(draft, 4), target, effort=Effort(0.0, 2, 2), clock=clock)
    for depth in (1, 2, 3, 4):
        assert cost(depth) == pytest.approx(depth * DRAFT_S, rel=1e-9)


def test_where_no_forward_is_ever_settled_they_count_as_they_are() -> None:
    clock = FakeClock()
    model = recorded_model("target", clock, seconds, forgets=True)
    cost = measure_target(model, effort=SHORT, clock=clock)
    assert cost(8, [128]) == pytest.approx(UNRECORDED * seconds(8))
    assert clock.now < 110.0, "it is not tried again and again"
    drafted = measure_drafter(DraftModel(model, 2), MarkovModel.random(97, 0, context_length=512), effort=ONCE)
    assert [point.depth for point in drafted.points] == [1, 2]


def test_rounds_measure_until_that_was_settled() -> None:
    """A key settles at its third time; later another one makes all begin anew. The first round takes no budget."""
    clock = FakeClock()
    seen: dict[str, int] = dict.fromkeys("ab", 0)
    settled: list[tuple[str, int]] = []

    def measure(key: str, number: int) -> bool:
        clock.now += 1.0
        seen[key] += 1
        if seen[key] == 5:
            seen.update(dict.fromkeys("ab", 1))
        if seen[key] < 3:
            return False
        settled.append((key, number))
        return True

    assert list(piecewise("ab", measure, Effort(3.0, 2, 9), unwatched, "x", clock))[-1] == 2
    assert sorted(settled) == sorted((key, number) for key in "ab" for number in (-1, 0, 1))
    assert clock.now > 106.0


def test_a_key_that_never_settles_is_soon_tried_once_a_round() -> None:
    clock = FakeClock()
    calls: list[int] = []

    def measure(key: str, number: int) -> bool:
        clock.now += 1.0
        calls.append(number)
        return False

    assert list(piecewise("a", measure, Effort(8.0, 1, 99), unwatched, "x", clock))[-1] == 3
    assert calls == [-1] * 6 + [0, 1, 2]


def test_settled_is_what_warms_nothing_up() -> None:
    class Counts:
        warmups = 3

    one, other = Counts(), Counts()
    settling, said = Settling(one, other), []
    for warmups in (3, 4, 3, 0):  # 0: other weights, whose count began anew
        other.warmups = warmups
        said.append(settling.settled)
    assert said == [True, False, True, False]
    assert Settling(one, other).settled


def test_the_fastest_read_counts_and_bytes_are_those_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 9.0, 9.0, 0.5, 1.0, 2.0, 1.0, 0.25, 4.0])
    monkeypatch.setattr(measuring, "_seconds", lambda *_: next(seconds))
    assert read_bandwidth(size_bytes=1 << 10, repetitions=2) == 4096.0


@pytest.mark.parametrize(
    ("size", "repetitions", "words"),
    [(0, 1, "got 0"), (-8, 1, "got -8"), (12, 1, "multiple of 8"), (8, 0, "repetitions"), (1 << 60, 1, "GiB")],
)
def test_what_cannot_be_read_is_refused(size: int, repetitions: int, words: str) -> None:
    assert read_bandwidth(size_bytes=1 << 20, repetitions=1) > 0.0
    with pytest.raises(OptionError, match=words):
        read_bandwidth(size_bytes=size, repetitions=repetitions)


def test_the_machine() -> None:
    found = this_machine()
    assert found["cpu"] and found["device"] == "cpu"
    assert (found["cores"], found["threads"]) == (os.cpu_count(), torch.get_num_threads())
