"""The loop: the same paths where that is promised, the same distribution everywhere, errors, resuming, records."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from process.worlds import Failing, Letters, Walk, Wells
from truedraft.errors import OptionError, ProcessError
from truedraft.process import (
    Chains,
    Cheaper,
    Corrected,
    Draft,
    Extrapolation,
    Known,
    LastOutput,
    Process,
    Seen,
    Stays,
    Surrogate,
    Windows,
    speculate,
)
from truedraft.process.loop import plain_steps

FRESH = LastOutput()


def run(
    process: Process,
    steps: int,
    start: Tensor | Chains | None = None,
    *,
    draft: Draft = FRESH,
    window: int | Windows | None = 4,
    **options: Any,
) -> Chains:
    """From the process's own start; None is that."""
    return speculate(process, process.start() if start is None else start, steps, draft=draft, window=window, **options)


# ------------------------------------------------------------------------------------------ laws of paths


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_paths_of_letters_have_the_law_of_the_plain_chain(window: int) -> None:
    count = 20_000
    start = torch.zeros(count, dtype=torch.int64)
    chains = run(Letters(), 4, start, draft=Letters.draft, window=window, seed=window, keep_path=True)
    before, after = chains.path[:, :-1], chains.path[:, 1:]
    assert (before[:, 0] == 0).all() and torch.equal(chains.path[:, -1], chains.states)
    shares = torch.bincount((after * torch.tensor([64, 16, 4, 1])).sum(1), minlength=256) / count
    paths = torch.cartesian_prod(*[torch.arange(4)] * 4)
    exact = Letters.table[torch.cat([torch.zeros(256, 1, dtype=torch.int64), paths[:, :-1]], 1), paths].prod(1)
    assert ((shares - exact).abs() <= 5 * (exact * (1 - exact) / count).sqrt() + 2 / count).all()
    assert (shares[exact == 0] == 0).all()
    assert 0 < chains.accepted.sum() < chains.drafted.sum() or not window


# ------------------------------------------------------------------------------------------ long chains


@pytest.mark.parametrize("window", [1, 3, None])
def test_long_chains_of_letters_visit_them_as_plain_ones_do(window: int | None) -> None:
    start = torch.zeros(400, dtype=torch.int64)
    chains = run(Letters(), 60, start, draft=Letters.draft, window=window, seed=5)
    power = torch.linalg.matrix_power(Letters.table, 60)[0]
    shares = torch.bincount(chains.states, minlength=4) / 400
    assert (shares - power).abs().max() < 5 * 0.5 / 20
    assert chains.accepted.sum() > 0 or window is None


@pytest.mark.parametrize("draft", [LastOutput(), Extrapolation(0.5), Corrected(lambda x, t: -0.5 * x)])
def test_long_chains_in_wells_spread_as_plain_ones_do(draft: Draft) -> None:
    start = Wells().start(1).expand(1500, -1)
    plain, drafted = (run(Wells(), 40, start, draft=draft, window=window, seed=window) for window in (0, 4))
    assert drafted.steps_per_call > 1.3
    for power in (1, 2, 4):
        left, right = plain.states**power, drafted.states**power
        error = ((left.var(0) + right.var(0)) / 1500).sqrt()
        assert ((left.mean(0) - right.mean(0)).abs() < 5 * error).all()


# ------------------------------------------------------------------------------------------ seeds


def walk(window: int | Windows | None, draft: Draft, steps: int = 60, chains: Tensor | Chains | None = None) -> Chains:
    process = Walk(0.8)
    start = process.initial(torch.zeros(4, 3, dtype=torch.float64)) if chains is None else chains
    return run(process, steps, start, draft=draft, window=window, seed=9, keep_path=True)


NEAR = Surrogate(lambda thetas: -0.45 * thetas.square().sum(-1))


@pytest.mark.parametrize("draft", [Stays(), NEAR], ids=["stays", "surrogate"])
@pytest.mark.parametrize("window", [1, 5, None])
def test_shared_noise_gives_the_same_path_whatever_is_drafted(window: int | None, draft: Draft) -> None:
    plain, drafted = walk(0, Stays()), walk(window, draft)
    assert torch.equal(plain.path, drafted.path) and torch.equal(plain.states, drafted.states)
    if window == 5:
        assert drafted.rounds < 0.8 * plain.rounds
        assert torch.equal(drafted.calls + drafted.accepted, drafted.at)


def test_under_shared_noise_a_chain_goes_on_from_a_state() -> None:
    whole = walk(3, NEAR)
    later = Chains.begin(whole.path[:, 25], seed=9, at=25)
    assert torch.equal(walk(5, Stays(), chains=later).path[:, 25:], whole.path[:, 25:])


def wells(**options: int | None) -> Chains:
    return run(Wells(), 50, keep_path=True, **{"seed": 2, **options})


def test_the_same_seed_gives_the_same_path_for_the_same_draft_and_window() -> None:
    assert torch.equal(wells().path, wells().path)
    assert not torch.equal(wells().path, wells(seed=3).path)
    assert not torch.equal(wells().path, wells(window=3).path), "the same path is not promised for other windows"


@pytest.mark.parametrize("rounds", [1, 7])
def test_a_run_that_is_broken_off_goes_on_as_if_it_were_not(rounds: int) -> None:
    part = wells(rounds=rounds)
    before = part.states.clone()
    whole = run(Wells(), 50, part, keep_path=True)
    assert torch.equal(whole.path, wells().path) and whole.rounds == wells().rounds
    assert torch.equal(part.states, before) and part.rounds == rounds, "what was passed stays as it was"


def test_chains_of_a_batch_are_those_that_run_beside_fewer_others() -> None:
    few = run(Wells(), 50, Wells().start()[:2], seed=2)
    assert torch.equal(few.states, wells().states[:2])


# ------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("raises", [True, False])
def test_a_failing_step_ends_its_chain_alone(window: int, raises: bool) -> None:
    chains = run(Failing(1.8, raises), 30, Wells().start(12), window=window, seed=1, keep_path=True)
    ended = torch.tensor([error is not None for error in chains.errors])
    assert ended.any() and not ended.all()
    assert (chains.at[~ended] == 30).all()
    for chain in torch.nonzero(ended)[:, 0].tolist():
        error = chains.errors[chain]
        assert isinstance(error, RuntimeError if raises else ProcessError)
        assert "no force" in str(error) or not raises
        assert (chains.states[chain].abs() > 1.8).any(), "it stands where its step fails"
        assert (chains.path[chain, : int(chains.at[chain])].abs() <= 1.8).all()


def test_failing_steps_end_as_many_chains_as_in_the_plain_process() -> None:
    """A draft that leads to where the step fails is judged like any other."""
    start, ends = torch.zeros(300, 2, dtype=torch.float64), []
    for window in (0, 4):
        chains = run(Failing(1.8, raises=True), 15, start, window=window, seed=4)
        ends.append(sum(error is not None for error in chains.errors) / 300)
    assert 0.1 < ends[0] < 0.9 and abs(ends[0] - ends[1]) < 5 * 0.5 * (2 / 300) ** 0.5


class Blind(Draft):
    """Guesses nothing at all behind some steps."""

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        return torch.where((steps % 3 == 2)[:, None], torch.nan, points - points**3)


def test_a_guess_that_is_none_drafts_no_further() -> None:
    chains = run(Wells(), 30, draft=Blind(), window=5, seed=4)
    assert chains.errors == [None] * 5 and (chains.at == 30).all()
    assert 1.5 < chains.steps_per_call <= 3.0 and (chains.drafted <= 20).all() and chains.acceptance_rate > 0.99


def test_options_out_of_range_are_refused() -> None:
    for options in ({"steps": -1}, {"steps": 2, "window": -1}, {"steps": 2, "window": 1.5}):
        with pytest.raises(OptionError):
            run(Wells(), **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one row or more"):
        run(Wells(), 2, Wells().start()[:0])
    with pytest.raises(OptionError, match="most"):
        Windows(0)


def test_an_evaluation_without_a_row_for_each_point_is_refused() -> None:
    class Short(Wells):
        def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
            return points[:1]

    with pytest.raises(ProcessError, match="1 rows for 5 points"):
        run(Short(), 2, window=0)


# ------------------------------------------------------------------------------------------ records and drafts


def test_every_step_is_shown_once_in_order_and_counted() -> None:
    seen: list[Seen] = []
    chains = run(Wells(), 20, window=3, seed=7, watch=seen.append, keep_path=True)
    for chain in range(5):
        shown = [zip(each.chains, each.steps, each.outcomes, strict=True) for each in seen]
        own = [(int(step), outcome) for rows in shown for number, step, outcome in rows if number == chain]
        assert [step for step, _ in own] == list(range(20))
        assert all(torch.equal(outcome, chains.path[chain, step + 1]) for step, outcome in own)
    kept = sum(int(each.kept.sum()) for each in seen if each.kept is not None)
    assert kept == int(chains.accepted.sum())
    assert chains.evaluations == int((chains.calls + chains.drafted).sum())
    assert chains.rounds == int(chains.calls.max())


def test_extrapolation_and_correction_by_hand() -> None:
    points = torch.tensor([[[2.0], [1.0]]])
    known = Known(points, torch.tensor([[[3.2], [3.0]]]), torch.tensor([[5, 4]]), torch.tensor([2]))
    asked = torch.tensor([[2.5]])
    guess = lambda draft: float(draft.guess(asked, asked, torch.tensor([7]), known))  # noqa: E731
    assert guess(LastOutput()) == pytest.approx(3.2)
    assert guess(Extrapolation()) == pytest.approx(3.6)
    assert guess(Extrapolation(0.5)) == pytest.approx(3.4)
    assert guess(Cheaper(lambda x, t: 10 * x)) == pytest.approx(25.0)
    assert guess(Corrected(lambda x, t: 10 * x)) == pytest.approx(25.0 + 3.2 - 20.0)


@pytest.mark.parametrize(("made", "newest"), [(0, [2.0, 1.0]), (1, [3.0, 2.0]), (2, [4.0, 3.0]), (3, [5.0, 4.0])])
def test_what_is_known_are_the_last_two_outputs(made: int, newest: list[float]) -> None:
    """A round asked for 3, 4 and 5 behind 1 and 2, and the first so many count; a second chain makes none."""
    known = Known.nothing(torch.zeros(2, 1), torch.zeros(2, 1), 2)
    chains, steps = torch.tensor([0, 1]), torch.arange(3)[:, None].expand(3, 2)
    for outputs, some in (([1.0, 2.0], 2), ([3.0, 4.0, 5.0], made)):
        told = torch.tensor(outputs)[:, None, None].expand(-1, 2, 1)
        known.add(chains, told, told, steps[: len(outputs)], torch.tensor([some, 0]))
    assert known.outputs[0, :, 0].tolist() == newest and known.count.tolist() == [2, 0]
    assert known.outputs[1, :, 0].tolist() == [0.0, 0.0]


class Dear(Wells):
    """Its calls, and their points, take seconds of a clock that only they move, and each look at it a little."""

    def __init__(self, call_s: float, point_s: float) -> None:
        super().__init__(step=0.02)
        self.call_s, self.point_s, self.now = call_s, point_s, 0.0

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        self.now += self.call_s + self.point_s * len(points)
        return super().evaluate(points, steps)

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now


@pytest.mark.parametrize("chains", [1, 4])
def test_windows_are_chosen_where_batches_are_free_and_not_where_they_cost_their_points(
    chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(process: Dear, window: int | Windows) -> Chains:
        monkeypatch.setattr("truedraft.process.loop.time", process)
        return run(process, 400, Wells().start(chains), window=window)

    free = Dear(3e-3, 0.0)
    drafted = timed(free, Windows(most=8, clock=free.perf_counter))
    fixed = min(timed(Dear(3e-3, 0.0), window).rounds for window in (1, 2, 4, 8))
    assert drafted.rounds + drafted.trials < 1.6 * fixed < 130, "learning included"
    linear = Dear(0.0, 3e-3)
    plain = timed(linear, Windows(most=8, clock=linear.perf_counter))
    assert plain.evaluations < 1.05 * 400 * chains and plain.trials <= 9


@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_one_slow_round_does_not_end_drafting(late_s: float) -> None:
    clock = Dear(3e-3, 0.0)
    windows = Windows(most=8, clock=clock.perf_counter)
    windows.times.begin(lambda points: 3e-3, 1, 8)
    left, rounds = 400, 0
    while left > 1:
        window, rounds = windows.choose(1, left), rounds + 1
        if window:  # every draft stays; another program runs within the first round
            seconds = 3e-3 + 2e-4 * window + 1e-3 + late_s
            windows.observe([window], [window], window + 1, (1e-5, 2e-4 * window, 3e-3, seconds))
            late_s = 0.0
        else:
            seconds = 3.2e-3 * min(windows.together, left)
            rounds += min(windows.together, left) - 1
            windows.observe([0], [0], 1, (1e-5, 0.0, 3e-3, 3.2e-3))
        clock.now += seconds
        left -= window + 1 if window else min(windows.together, left)
    assert rounds < 80


@pytest.mark.parametrize(("rest_s", "most"), [(1e-3, 3), (2e-4, 12)])
def test_a_run_begins_with_few_drafts_where_keeping_all_would_not_pay(rest_s: float, most: int) -> None:
    """A plain step takes 0.1 ms and a round of 8 1.1 ms or 0.3; none is kept."""
    clock = Dear(0.0, 0.0)
    windows = Windows(most=8, clock=clock.perf_counter)
    windows.times.begin(lambda points: 3e-5 + 1e-6 * points, 1, 8)
    drafted = 0
    for _ in range(40):
        if window := windows.choose(1, 1000):
            windows.observe([window], [0], window + 1, (1e-5, 5e-5, 4e-5, 9e-5 + rest_s), together=1)
            drafted += 1
        else:
            windows.observe([0], [0], 1, (1e-5, 0.0, 3e-5, 1e-4), together=windows.together)
    assert 0 < drafted <= most


def test_what_a_plain_step_takes_leaves_out_what_is_done_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = Dear(1.0, 0.0)
    monkeypatch.setattr("truedraft.process.loop.time", dear)

    def watch(seen: Seen) -> None:
        dear.call_s = 3e-3  # from the second step on

    made, target_s, step_s = plain_steps(dear, Chains.begin(Wells().start(1)), torch.tensor([0]), 5, watch)
    assert (made, target_s, step_s) == (5, pytest.approx(3e-3, rel=0.01), pytest.approx(3e-3, rel=0.02))


def test_drafts_that_are_rejected_whole_now_and_then_do_not_end_drafting() -> None:
    """Three of ten, in no order: 6.6 steps a round in the time of 3.6. What follows stays as often as ever."""
    plain = 0
    for seed in range(10):
        clock, chance = Dear(0.0, 0.0), random.Random(seed)
        windows = Windows(most=8, clock=clock.perf_counter)
        windows.times.begin(lambda points: 1e-3, 1, 8)
        for _ in range(100):
            window = windows.choose(1, 10_000)
            if window:
                kept = window if chance.random() < 0.7 else 0
                windows.observe([window], [kept], window + 1, (1e-5, 1e-3, 1e-3, 4e-3), together=1)
            else:
                windows.observe([0], [0], 1, (1e-5, 0.0, 1e-3, 1.1e-3), together=windows.together)
                plain += windows._decision.reason == "plain"
            clock.now += 4e-3
    assert plain < 200, "of 1,000 rounds; where verdicts are taken to follow one another 475"


# ------------------------------------------------------------------------------------------ on a CUDA device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WORLDS: dict[str, tuple[Process, Tensor, Draft]] = {
    "gaussian": (Wells(), Wells().start(), LastOutput()),
    "shared noise": (Walk(0.8), Walk(0.8).initial(torch.zeros(4, 2, dtype=torch.float64)), Stays()),
}


def run_on(world: str, device: str, window: int | None) -> Chains:
    process, start, draft = WORLDS[world]
    return run(process, 60, start.to(device), draft=draft, window=window, seed=3, keep_path=True)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_paths_are_those_of_the_cpu_up_to_the_last_bits_of_functions(world: str, window: int) -> None:
    host, device = run_on(world, "cpu", window), run_on(world, "cuda", window)
    assert host.path is not None and device.path is not None
    assert device.path.device.type == "cuda"
    assert torch.allclose(host.path, device.path.cpu(), rtol=1e-9, atol=1e-9)
    assert host.rounds == device.rounds


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("world", WORLDS)
def test_windows_are_chosen_there(world: str) -> None:
    chains = run_on(world, "cuda", None)
    assert not any(chains.errors) and bool((chains.at == 60).all())
