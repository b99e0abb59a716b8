"""`agenerate` and `astream`: the answers of `generate` in an event loop that goes on, cancelled with their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from truedraft import Engine, SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.drafters import PromptLookup
from truedraft.errors import OptionError, PromptError
from truedraft.testing import MarkovModel

Value = TypeVar("Value")
FOREVER = 2_000_000


def engine_of(context: int = 4096) -> Engine:
    return Engine(MarkovModel.random(6, seed=1, context_length=context), PromptLookup(min_ngram=1), controller="fixed")


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
