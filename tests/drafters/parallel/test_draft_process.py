"""The other process: it drafts what this one would; its end, however it comes, costs no answer and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from support.parallel_drafting import (
    TEXTS,
    WAYS,
    broken_markov,
    dying_markov,
    failing_markov,
    markov,
    near_markov,
    seen,
    slow_markov,
    tiny_llama,
)
from support.tiny_models import PROMPTS, noisy
from support.virtual_time import VirtualTime
from truedraft import Engine, SamplingParams
from truedraft.certify import Stack, certify
from truedraft.drafters import DraftModel, ParallelDraft
from truedraft.drafters.parallel import DraftProcess, ahead_drafter
from truedraft.models.base import LanguageModel
from truedraft.verification import SpeculativeSampling

GREEDY, SAMPLED = WAYS["greedy"], WAYS["sampled"]
LENGTH = 3


def made(load: Callable[[], LanguageModel], own: LanguageModel | None = None) -> tuple[ParallelDraft, DraftProcess]:
    """A drafter whose process has the model that `load` makes there; here it has `own`, or the same."""
    process = DraftProcess(partial(ahead_drafter, load, LENGTH, 0.0))
    return ParallelDraft(DraftModel(own or load(), LENGTH), process), process


def in_turn() -> Engine:
    """With the same draft in this process."""
    return Engine(markov(1), DraftModel(near_markov(), LENGTH), controller="fixed", entropy=3)


def runs(pid: int) -> bool:
    """Whether there is such a process, dead ones that nobody waited for included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> bool:
    for _ in range(600):
        if not runs(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def drafter() -> Iterator[ParallelDraft]:
    made_drafter, process = made(near_markov)
    yield made_drafter
    assert process.alive and not made_drafter.held.requests
    process.close()


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
def test_answers_and_counts_are_those_of_the_draft_alone(drafter: ParallelDraft, params: SamplingParams) -> None:
    plain = in_turn().generate(TEXTS, params)
    answers = Engine(markov(1), drafter, controller="fixed", entropy=3).generate(TEXTS, params)
    assert list(map(seen, answers)) == list(map(seen, plain))
    report = drafter.report
    assert 0.0 < report["ahead_hit_rate"] < 1.0 and report["ahead_tokens"] > 0


def test_a_llama_in_another_process() -> None:
    target, prompts = noisy("llama", 0.05), [list(prompt) for prompt in PROMPTS]
    ahead, process = made(tiny_llama)
    plain = Engine(target, DraftModel(tiny_llama(), LENGTH), controller="fixed", entropy=3).generate(prompts, SAMPLED)
    assert list(map(seen, Engine(target, ahead, controller="fixed", entropy=3).generate(prompts, SAMPLED))) == list(
        map(seen, plain)
    )
    process.close()


def test_tokens_do_not_hang_on_how_fast_it_is(drafter: ParallelDraft) -> None:
    """Same answers, same counts and same hits, whether it is ready in time or late."""
    slow, process = made(slow_markov)
    before = dict(drafter.report)
    found = []
    for each in (drafter, slow):
        asked = [replace(params, max_tokens=16) for params in WAYS.values()]
        answers = Engine(markov(1), each, controller="fixed", entropy=3).generate(TEXTS[:3], asked)
        found.append(list(map(seen, answers)))
    assert found[0] == found[1]
    asked, hits = slow.report["proposals"], slow.report["proposals"] * slow.report["ahead_hit_rate"]
    was = before.get("proposals", 0)
    assert drafter.report["proposals"] - was == asked
    earlier = was * before.get("ahead_hit_rate", 0.0)
    assert drafter.report["proposals"] * drafter.report["ahead_hit_rate"] - earlier == pytest.approx(hits)
    process.close()


@pytest.mark.slow  # test_parallel_law sums the same distribution exactly
def test_a_certificate(drafter: ParallelDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, step_s=0.01)
    stack = Stack(markov(1), drafter, SpeculativeSampling())
    certificate = certify(stack, TEXTS, SamplingParams(max_tokens=24, temperature=1.0), batch=3, seconds=2.0)
    assert not certificate.failures


# ------------------------------------------------------------------------------------------ its end


def test_a_process_that_dies_costs_no_answer() -> None:
    """In the middle of drafting, with four requests under way: they go on in this process, with the same tokens."""
    params = [*WAYS.values(), SAMPLED]
    ahead, process = made(partial(dying_markov, 30), near_markov())
    pid = process.pid
    with pytest.warns(RuntimeWarning, match="'draft' goes on without async: .* ended with status 7") as told:
        answers = Engine(markov(1), ahead, controller="fixed", entropy=3).generate(TEXTS, params)
    plain = in_turn().generate(TEXTS, params)
    assert list(map(seen, answers)) == list(map(seen, plain))
    assert len(told) == 1 and not process.alive and not runs(pid) and not ahead.held.requests
    assert 0 < ahead.report["proposals"] < sum(each.stats.target_calls for each in answers)
    again = Engine(markov(1), ahead, controller="fixed", entropy=3).generate(TEXTS, params)
    assert list(map(seen, again)) == list(map(seen, plain))


def test_one_that_is_killed_between_two_steps() -> None:
    ahead, process = made(near_markov)
    engine = Engine(markov(1), ahead, controller="fixed", entropy=3)
    request = engine.submit([1, 2, 3], SAMPLED)
    for _ in range(4):
        engine.step()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="ended with status -9"):
        while not request.closed:
            engine.step()
    plain = in_turn().generate([1, 2, 3], SAMPLED)
    assert request.tokens[3:] == plain.token_ids and not request.warnings and engine.check_idle() == []


def test_a_draft_that_cannot_be_loaded_there_drafts_here() -> None:
    ahead, process = made(failing_markov, near_markov())
    with pytest.warns(RuntimeWarning, match="ended with status 1: FileNotFoundError: no such draft"):
        answer = Engine(markov(1), ahead, controller="fixed", entropy=3).generate([1, 2, 3], GREEDY)
    plain = in_turn().generate([1, 2, 3], GREEDY)
    assert seen(answer) == seen(plain) and not process.alive and ahead.report == {}


@pytest.mark.parametrize("forwards", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_a_draft_whose_forwards_fail_there_drafts_here(forwards: int) -> None:
    """At the first call, or while it drafts ahead."""
    ahead, _ = made(partial(broken_markov, forwards), near_markov())
    with pytest.warns(RuntimeWarning, match="ended with status 1: RuntimeError: the draft is broken"):
        answer = Engine(markov(1), ahead, controller="fixed", entropy=3).generate([1, 2, 3], GREEDY)
    assert seen(answer) == seen(in_turn().generate([1, 2, 3], GREEDY))


def test_ctrl_c_while_it_is_waited_for_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, process = made(near_markov)
    engine = Engine(markov(1), ahead, controller="fixed", entropy=3)
    request = engine.submit([1, 2, 3], SAMPLED)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patched:

        def interrupted(_: object) -> object:
            raise KeyboardInterrupt

        patched.setattr("truedraft.drafters.parallel.process.pickle.load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not process.alive and not runs(process.pid)
    with pytest.warns(RuntimeWarning, match="goes on without async"):
        while not request.closed:
            engine.step()
    assert request.tokens[3:] == in_turn().generate([1, 2, 3], SAMPLED).token_ids and not request.warnings
    assert not ahead.held.requests


def test_it_ends_with_the_drafter() -> None:
    ahead, process = made(near_markov)
    Engine(markov(1), ahead, controller="fixed", entropy=3).generate([1, 2, 3], GREEDY)
    pid = process.pid
    assert runs(pid)
    del ahead, process
    gc.collect()
    assert not runs(pid)


PARENT = """
import os, signal, sys
from functools import partial
from support.parallel_drafting import markov
from truedraft import Engine, SamplingParams
from truedraft.drafters import DraftModel, ParallelDraft
from truedraft.drafters.parallel import DraftProcess, ahead_drafter

process = DraftProcess(partial(ahead_drafter, markov, 3, 0.0))
engine = Engine(markov(1), ParallelDraft(DraftModel(markov(), 3), process), controller="fixed", entropy=3)
engine.generate([1, 2, 3], SamplingParams(max_tokens=8))
print(process.pid, flush=True)
"""


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", pytest.param("raise KeyboardInterrupt", marks=pytest.mark.slow)]
)
def test_it_ends_with_the_process_that_it_serves(end: str) -> None:
    """Which needs no guard of its main module, for nothing of it is imported there."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run([sys.executable, "-c", PARENT + end], env=environment, capture_output=True, text=True)
    pid = int(done.stdout)
    assert wait_until_gone(pid)
