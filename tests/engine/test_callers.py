"""Threads and tasks at one engine, and requests that leave at any moment: nobody waits by luck, nobody is harmed.

Where a thread has to wait for another one it does so for an event or by looking at it, so nothing depends on speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

import pytest

from support.answers import finished, fixed
from truedraft import Engine, SamplingParams
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.engine import StepRecord
from truedraft.engine.loop import FairLock
from truedraft.errors import OptionError, PromptError, TruedraftError
from truedraft.models.base import ForwardOutput, Segment
from truedraft.testing import MarkovModel, ScriptedDrafter

VOCAB = 8
PATIENCE_S = 60.0
LONG = SamplingParams(max_tokens=30)


class Interrupted(MarkovModel):
    """Does something in the middle of one of its forwards."""

    def __init__(self, call: int, act: Callable[[], object]) -> None:
        super().__init__(MarkovModel.random(VOCAB, seed=1).probs)
        self._left = call
        self._act = act

    def forward(self, segments) -> ForwardOutput:  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == 0:
            self._act()
        return super().forward(segments)


def plain(prompt: list[int], params: SamplingParams = LONG) -> list[int]:
    return Engine(MarkovModel.random(VOCAB, seed=1)).generate(prompt, params).token_ids


def in_thread(act: Callable[[], object]) -> bool:
    """Whether another thread comes to the end of this while the calling one stands still."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def by_threads(count: int, act: Callable[[int], object]) -> None:
    """Calls it by so many threads at once, each with its number."""
    threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_turns_come_in_the_order_in_which_threads_asked() -> None:
    order, turns = list[int](), FairLock()

    def take(number: int) -> None:
        with turns:
            assert turns.mine
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(5)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while turns.waiting <= number:
                time.sleep(0.001)
        assert not turns.try_now()
    take(5)  # asks again at once, and still comes after those who waited
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == [0, 1, 2, 3, 4, 5]
    assert not turns.mine and turns.try_now() and turns.mine
    turns.give_back()


@pytest.mark.parametrize("handed", [False, True])
def test_who_gives_up_waiting_does_not_stop_the_others(handed: bool) -> None:
    """Ctrl-C while waiting, and at the very moment when the turn came."""
    turns = FairLock()

    class Place:
        def acquire(self) -> None:
            if handed:
                turns.give_back()
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    place = Place()
    with pytest.raises(KeyboardInterrupt):
        assert turns.try_now()
        turns._waiting.append(place)  # type: ignore[arg-type]
        turns._wait(place)  # type: ignore[arg-type]
    assert turns.waiting == 0
    if not handed:
        turns.give_back()
    assert turns.try_now()


def test_submitting_does_not_wait_and_the_request_takes_part_in_the_next_step() -> None:
    others: list[object] = []

    def submit() -> None:
        others.append(engine.submit([2, 5], SamplingParams(max_tokens=4)))

    sizes: list[int] = []
    came: list[bool] = []
    engine = Engine(Interrupted(5, lambda: came.append(in_thread(submit))))
    engine.listeners.append(lambda record: sizes.append(len(record.requests)))
    answer = engine.generate([3, 1], LONG)
    assert came == [True]
    assert sizes[:9] == [1] * 5 + [2] * 4  # there and gone in four steps, one for each of its tokens
    assert answer.token_ids == plain([3, 1])
    (other,) = others
    assert other.closed and other.pieces[-1].answer.token_ids == plain([2, 5])[:4]  # type: ignore[attr-defined]


def test_cancelling_does_not_wait_and_takes_effect_after_the_step() -> None:
    sizes: list[int] = []
    came: list[bool] = []
    model = Interrupted(5, lambda: came.append(in_thread(lambda: engine.cancel(other))))
    engine = Engine(model)
    engine.listeners.append(lambda record: sizes.append(len(record.requests)))
    other = engine.submit([2, 5], LONG)
    answer = engine.generate([3, 1], LONG)
    assert came == [True]
    assert sizes[:7] == [2] * 5 + [1] * 2
    assert answer.token_ids == plain([3, 1])
    (left,) = finished(engine, [other])
    assert (left.finish_reason, left.token_ids) == ("cancelled", plain([2, 5])[:5])
    assert model.pool.in_use == 0


@pytest.mark.parametrize("started", [1, 3])
def test_a_stream_that_is_collected_in_mid_step_harms_nobody(started: int) -> None:
    """Python closes forgotten generators where it likes: here by the stepping thread, inside the target's forward."""
    streams: list[Iterator[object]] = []
    model = Interrupted(6, streams.clear)
    draft = MarkovModel.random(VOCAB, seed=2)
    engine = fixed(model, DraftModel(draft, 3))
    streams.append(engine.stream([2, 5], LONG))
    for _ in range(started):
        next(streams[0])
    answers = engine.generate([[3, 1], [1, 1]], LONG)
    assert streams == []
    assert [answer.token_ids for answer in answers] == [plain([3, 1]), plain([1, 1])]
    assert all(answer.warnings == () and answer.stats.recoveries == 0 for answer in answers)
    assert model.pool.in_use == draft.pool.in_use == 0
    assert engine.step() is False


def test_threads_that_answer_at_once_answer_as_alone() -> None:
    model = MarkovModel.random(VOCAB, seed=1)
    draft = MarkovModel.random(VOCAB, seed=2)
    engine = fixed(model, DraftModel(draft, 3), max_batch=3)
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        if number % 2:
            pieces = engine.stream([number, 1], LONG)
            got[number] = [token for piece in pieces for token in piece.token_ids]
        else:
            got[number] = engine.generate([number, 1], LONG).token_ids

    by_threads(6, ask)
    assert got == {number: plain([number, 1]) for number in range(6)}
    assert model.pool.in_use == draft.pool.in_use == 0


def test_a_request_of_another_engine_is_not_cancelled() -> None:
    one, other = (Engine(MarkovModel.random(VOCAB, seed=1)) for _ in range(2))
    request = one.submit([3, 1], LONG)
    for wrong in (request, "request", None):
        with pytest.raises(PromptError, match="no request of this engine"):
            other.cancel(wrong)  # type: ignore[arg-type]
    while one.step():
        pass
    assert request.finish_reason == "length"
    one.cancel(request)  # over: stays as it is
    assert request.finish_reason == "length" and sum(piece.answer is not None for piece in request.pieces) == 1


def test_a_step_inside_a_step_is_refused() -> None:
    engine = Engine(MarkovModel.random(VOCAB, seed=1))
    found: list[TruedraftError] = []

    def again(times: StepRecord) -> None:
        for ask in (engine.step, lambda: engine.generate([1], LONG)):
            with pytest.raises(TruedraftError, match="inside a step") as caught:
                ask()
            found.append(caught.value)

    engine.listeners.append(again)
    assert engine.generate([3, 1], SamplingParams(max_tokens=2)).token_ids == plain([3, 1])[:2]
    assert len(found) == 4
    engine.listeners.clear()
    while engine.step():
        pass
    assert engine.target.pool.in_use == 0  # type: ignore[attr-defined]


def test_ctrl_c_while_a_neighbour_is_closed_does_not_keep_it_waiting() -> None:
    """The neighbour's thread closes what the interrupted step left open."""

    class Stubborn(ScriptedDrafter):
        def end(self, request):  # type: ignore[no-untyped-def]
            if not self.ended:
                super().end(request)
                raise KeyboardInterrupt
            super().end(request)

    model = MarkovModel.random(VOCAB, seed=1)
    engine = fixed(model, Stubborn(lambda tokens: []))
    stream = engine.stream([3, 1], SamplingParams(max_tokens=2))
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([2, 5], LONG)
    pieces = list(stream)
    assert pieces[-1].answer is not None and pieces[-1].answer.token_ids == plain([3, 1])[:2]
    assert model.pool.in_use == 0


class Paced(MarkovModel):
    """Takes a moment for each forward, in which other threads come."""

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        time.sleep(0.002)
        return super().forward(segments)


def test_a_caller_that_is_alone_steps_in_its_own_thread() -> None:
    engine = Engine(MarkovModel.random(VOCAB, seed=1))
    threads: set[int] = set()
    engine.listeners.append(lambda _: threads.add(threading.get_ident()))
    engine.generate([3, 1], LONG)
    list(engine.stream([3, 1], LONG))
    assert threads == {threading.get_ident()}


def test_several_callers_share_a_driver_that_ends_with_the_work() -> None:
    engine = Engine(Paced(MarkovModel.random(VOCAB, seed=1).probs))
    names: list[str] = []
    engine.listeners.append(lambda _: names.append(threading.current_thread().name))
    barrier = threading.Barrier(4)
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        barrier.wait(PATIENCE_S)
        got[number] = engine.generate([number, 1], LONG).token_ids

    by_threads(4, ask)
    assert got == {number: plain([number, 1]) for number in range(4)}
    assert "truedraft-driver" in names and len(names) < 3 * len(got[0])
    while engine._loop._driver is not None:
        time.sleep(0.001)
    names.clear()
    engine.generate([3, 1], LONG)
    assert set(names) == {threading.current_thread().name}


def test_a_consumer_that_stops_reading_holds_nobody_up() -> None:
    engine = Engine(Paced(MarkovModel.random(VOCAB, seed=1).probs))
    slow = engine.stream([2, 5], LONG)
    next(slow)
    assert engine.generate([3, 1], LONG).token_ids == plain([3, 1])
    assert [token for piece in slow for token in piece.token_ids] == plain([2, 5])[1:]


def test_what_a_listener_raises_reaches_every_caller_and_the_engine_goes_on() -> None:
    engine = Engine(Paced(MarkovModel.random(VOCAB, seed=1).probs))

    def broken(record: StepRecord) -> None:
        if len(record.requests) == 2 and record.contexts[0] > 6:
            raise ZeroDivisionError("listener")

    engine.listeners.append(broken)
    raised: list[Exception] = []

    def ask(number: int) -> None:
        try:
            engine.generate([number, 1], LONG)
        except ZeroDivisionError as error:
            raised.append(error)

    by_threads(2, ask)
    assert 1 <= len(raised) <= 2
    engine.listeners.clear()
    assert engine.generate([3, 1], LONG).token_ids == plain([3, 1])
    assert engine.target.pool.in_use == 0  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ tasks of an event loop

Value = TypeVar("Value")
FOREVER = 2_000_000


def engine_of(context: int = 4096) -> Engine:
    return fixed(MarkovModel.random(6, seed=1, context_length=context), PromptLookup(min_ngram=1))


def run(work: Coroutine[None, None, Value]) -> Value:
    """In an event loop; a mistake of ours must not stand still for ever."""
    return asyncio.run(asyncio.wait_for(work, 120.0))


def test_answers_are_those_of_generate() -> None:
    engine, params = engine_of(), SamplingParams(max_tokens=20, seed=3, temperature=1.0)
    prompts = [[1, 2, 3], [4], [5, 5, 0, 2]]
    alone, several = engine.generate(prompts[0], params), engine.generate(prompts, params)

    async def ask() -> None:
        assert (await engine.agenerate(prompts[0], params)).token_ids == alone.token_ids
        assert [each.token_ids for each in await engine.agenerate(prompts, params)] == [e.token_ids for e in several]
        together = await asyncio.gather(*(engine.agenerate(each, params) for each in prompts))
        assert [each.token_ids for each in together] == [each.token_ids for each in several]
        samples = await engine.agenerate([1, 2], SamplingParams(max_tokens=4, n=3, temperature=1.0))
        assert len(samples.others) == 2
        pieces = [piece async for piece in engine.astream(prompts[0], params)]
        assert [token for piece in pieces for token in piece.token_ids] == alone.token_ids
        assert [piece.answer is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    run(ask())
    assert engine.check_idle() == []


def test_what_is_wrong_is_raised_as_by_generate() -> None:
    engine = engine_of()

    async def ask() -> None:
        with pytest.raises(PromptError, match="no tokenizer"):
            await engine.agenerate("text")
        with pytest.raises(PromptError, match="one SamplingParams"):
            await engine.agenerate([1], [SamplingParams()])  # type: ignore[call-overload]
        with pytest.raises(OptionError, match="must be 1 for a stream"):
            async for _ in engine.astream([1], SamplingParams(n=2, temperature=1.0)):
                pass
        refused, answered = await engine.agenerate([[99], [1]], SamplingParams(max_tokens=2))
        assert (refused.finish_reason, answered.finish_reason) == ("error", "length")

    run(ask())


def test_a_cancelled_task_cancels_its_request_and_the_others_go_on() -> None:
    engine = engine_of(FOREVER)

    async def ask() -> None:
        there = asyncio.Event()
        engine.listeners.append(lambda record: loop.call_soon_threadsafe(there.set))
        loop = asyncio.get_running_loop()
        endless = asyncio.create_task(engine.agenerate([1, 2], SamplingParams(max_tokens=FOREVER // 2)))
        await there.wait()
        short = await engine.agenerate([3], SamplingParams(max_tokens=8))
        assert short.finish_reason == "length" and not endless.done(), "the event loop goes on meanwhile"
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        while engine.step():  # whatever step is being made
            await asyncio.sleep(0)

    run(ask())
    assert engine.check_idle() == []


@pytest.mark.parametrize("how", ["break", "cancel", "close"])
def test_a_stream_that_is_left_is_cancelled(how: str) -> None:
    engine = engine_of(FOREVER)
    params = SamplingParams(max_tokens=FOREVER // 2)

    async def read() -> None:
        async for piece in engine.astream([1, 2], params):
            if piece.token_ids and how == "break":
                break

    async def ask() -> None:
        if how == "cancel":
            task = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "break":
            await read()
            gc.collect()
            await asyncio.sleep(0)
        else:
            async with contextlib.aclosing(engine.astream([1, 2], params)) as pieces:
                await anext(pieces)
        while engine.step():
            await asyncio.sleep(0)

    run(ask())
    assert engine.check_idle() == []


def test_threads_and_tasks_share_the_steps() -> None:
    engine, params = engine_of(), SamplingParams(max_tokens=200, ignore_eos=True)
    expected = engine.generate([1, 2, 3], params).token_ids
    together: set[int] = set()
    engine.listeners.append(lambda record: together.add(len(record.requests)))
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(engine.generate([1, 2, 3], params).token_ids)) for _ in range(2)
    ]

    async def ask() -> None:
        for thread in threads:
            thread.start()
        answers = await asyncio.gather(*(engine.agenerate([1, 2, 3], params) for _ in range(3)))
        found.extend(answer.token_ids for answer in answers)
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])

    run(ask())
    assert found == [expected] * 5 and max(together) > 1


def test_an_error_of_a_listener_reaches_who_waits() -> None:
    engine = engine_of()

    def fail(record: StepRecord) -> None:
        raise ZeroDivisionError("a listener's")

    engine.listeners.append(fail)

    async def ask() -> None:
        with pytest.raises(ZeroDivisionError, match="a listener's"):
            await engine.agenerate([1, 2], SamplingParams(max_tokens=5))
        engine.listeners.clear()
        assert len((await engine.agenerate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True))).token_ids) == 5

    run(ask())
