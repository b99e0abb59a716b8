"""A bounded share of the time, by processor time; nothing where the engine is full; bets that hold their level."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from support.two_domains import Unthreaded, ask, learning, prompts, trained, untrained
from truedraft import SamplingParams
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.training.online import Learner
from truedraft.training.online.student import OWN, Candidate, Comparison, GainTest, Student
from truedraft.training.online.traffic import Answered, Score


class Time:
    """Two clocks that go on when they are told to."""

    def __init__(self) -> None:
        self.passed = self.computed = 0.0

    def compute(self, seconds: float) -> None:
        self.computed += seconds
        self.passed += 1.5 * seconds  # others computed, too


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_the_share_of_the_time_is_bounded_at_every_moment(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, chance = Time(), random.Random(0)
    learner = Unthreaded(share=share, clock=lambda: clocks.passed, processor=lambda: clocks.computed)
    engine = learning(trained(), learner)
    longest = 0.0

    def work(_: Student) -> bool:
        nonlocal longest
        seconds = chance.choice([0.001, 0.1, 2.0])
        longest = max(longest, seconds)
        clocks.compute(seconds)
        return True

    monkeypatch.setattr(Student, "work", work)
    for _ in range(300):
        rest_s = learner.turn()
        assert clocks.computed <= share * clocks.passed + longest
        clocks.passed += rest_s
        assert clocks.computed <= share * clocks.passed + 1e-9
    assert clocks.computed > 0.6 * min(share, 1 / 1.5) * clocks.passed, "and what may be used is used"
    assert learner.status.time_share == pytest.approx(clocks.computed / clocks.passed)
    assert engine.learner is learner  # it works as long as there is one


def test_nothing_is_done_while_the_engine_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = []
    monkeypatch.setattr(Student, "work", lambda self: bool(worked.append(1)) or True)
    learner = Unthreaded(share=1.0)
    engine = learning(trained(), learner, max_batch=2)
    requests = [engine.submit(each, SamplingParams(max_tokens=8)) for each in prompts(0, 3)]
    learner.turn()
    engine.step()
    assert engine.is_full
    learner.turn()
    assert not worked
    engine.cancel(requests[2])
    engine.cancel(requests[1])
    assert not engine.is_full and learner.turn() == 0.0
    assert worked


def test_a_thread_of_the_lowest_priority_learns_beside_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    monkeypatch.setattr("truedraft.training.online.learner.os.setpriority", lambda *given: seen.append(given[1:]))
    learner = Learner(share=1.0)
    engine = learning(trained(), learner)
    until = time.monotonic() + 60.0
    while not learner.status.trials and time.monotonic() < until:
        ask(engine, prompts(0, 8))
    assert learner.status.trials and not learner.status.failures
    (thread,) = [each for each in threading.enumerate() if each.name == "truedraft-learner"]
    assert seen == [(thread.native_id, 19)] and thread.daemon
    learner.close()
    assert not thread.is_alive() and learner.status.answers_bytes == 0
    ask(engine, prompts(0, 2))  # and the engine goes on without it
    assert learner.status.answers_bytes == 0 and torch.get_num_threads() == threads


def test_a_thread_ends_with_its_engine_and_one_that_died_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(share=1.0)
    engine = learning(trained(), learner)
    ask(engine, prompts(0, 2))
    thread = learner._thread
    assert thread is not None
    del engine
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive() and not learner.status.failures

    def broken(self: Learner) -> float:
        raise RuntimeError("planted")

    monkeypatch.setattr(Learner, "turn", broken)
    learner = Learner(share=1.0)
    engine = learning(trained(), learner)
    ask(engine, prompts(0, 2))
    assert learner._thread is not None
    learner._thread.join(30.0)
    assert learner.status.failures == 1 and "planted" in caplog.text
    ask(engine, prompts(0, 2))  # and the engine goes on without it


NULLS: dict[str, Callable[[random.Random], float]] = {
    "even": lambda chance: chance.choice([-1.0, 1.0]),
    "mostly none": lambda chance: chance.choice([0.0] * 8 + [-0.5, 0.5]),
    "rare losses": lambda chance: -0.95 if chance.random() < 0.05 else 0.05,
    "rare gains": lambda chance: 0.95 if chance.random() < 0.05 else -0.05,
}


@pytest.mark.parametrize("name", NULLS)
def test_bets_on_nothing_are_won_no_more_often_than_their_level(name: str) -> None:
    """Looked at behind every answer; a level of 0.05 leaves less than 0.05 and four standard deviations."""
    chance, runs, level, won = random.Random(name), 600, 0.05, 0
    for _ in range(runs):
        test = GainTest()
        for _ in range(60):
            test.see(NULLS[name](chance))
            if test.sure(level):
                won += 1
                break
    assert won <= level * runs + 4 * (level * (1 - level) * runs) ** 0.5
    gaining = GainTest()
    for _ in range(30):
        gaining.see(chance.gauss(0.4, 0.3))
    assert gaining.sure(0.01) and not gaining.sure(1e-12), "and a gain is seen"


def played(gain_of: Callable[[int], float], seed: int, answers: int = 80, every: int = OWN) -> Comparison:
    """A comparison whose candidate is replaced behind every few answers; kept guesses gain so much on average."""
    chance, head = random.Random(seed), untrained(RedrafterHead)
    found = Comparison(Candidate(head), Candidate(head), 0.05, set())
    for number in range(answers):
        answer = Answered(torch.zeros(11, dtype=torch.int64), torch.zeros(11, 4), 0.0)
        answer.number = number
        kept = 50 + 100 * gain_of(number // every) + chance.choice([-4, 4])
        answer.scores = {found.new.number: Score(100, 50, round(kept)), found.old.number: Score(100, 50, 50)}
        assert found.waiting([answer]) == [answer]
        found.see(answer)
        assert not found.waiting([answer])
        if found.gains or found.loses:
            break
        if found.own == every:
            found.renew(Candidate(head))
    return found


def test_candidates_one_behind_the_other_share_a_level() -> None:
    """None brings more: of 300 rows of ten, one is let in with 0.05; 0.05 and four standard deviations are 30."""
    assert sum(played(lambda _: 0.0, seed).gains for seed in range(300)) <= 30


def test_evidence_of_one_candidate_counts_for_the_next_but_it_must_gain_itself() -> None:
    found = played(lambda _: 0.02, 0)
    assert found.gains and not found.loses and found.count > OWN and OWN <= found.own < found.count
    found = played(lambda number: 0.1 if number == 0 else -0.02, 0, 2 * OWN - 2, OWN - 1)
    assert found.count == 2 * OWN - 2 and not found.gains
    found = played(lambda _: -0.03, 0)
    assert found.loses and not found.gains
