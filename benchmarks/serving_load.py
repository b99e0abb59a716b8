"""Clients of a server of completions: closed and open loops, over plain sockets so that they cost little themselves."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import posted


@dataclass(frozen=True)
class Request:
    prompt: str | Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        fields = {"model": "model", "prompt": self.prompt, "max_tokens": self.max_tokens}
        rest = {"temperature": self.temperature, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**fields, **rest, **self.more}).encode()


@dataclass(frozen=True)
class Load:
    requests: Sequence[Request]
    clients: int


@dataclass(frozen=True)
class Answered:
    tokens: int
    first_s: float
    total_s: float

    @property
    def per_token_s(self) -> float:
        return (self.total_s - self.first_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class LoadResult:
    """What came of a load."""

    tokens: int  # of all answers
    seconds: float  # from the first request to the last answer
    tokens_per_s: float  # of all together
    first_s: float  # median time to the first token
    per_token_s: float  # median time between tokens of an answer
    per_token_p95_s: float  # the same for the slowest of twenty answers

    @classmethod
    def of(cls, answers: Sequence[Answered], seconds: float) -> LoadResult:
        tokens = sum(each.tokens for each in answers)
        times = sorted(each.per_token_s for each in answers)
        slow = times[min(int(0.95 * len(times)), len(times) - 1)]
        first = statistics.median(each.first_s for each in answers)
        return cls(tokens, seconds, tokens / seconds, first, statistics.median(times), slow)


async def ask(port: int, request: Request) -> Answered:
    """Send one request and read its stream.

    Raises:
        RuntimeError: it was not answered.
    """
    began = time.perf_counter()
    async with posted(port, request.body()) as reader:
        status = await reader.readline()
        first, tokens, last = None, 0, began
        seen: list[bytes] = []
        async for line in reader:
            if not line.startswith(b"data: {"):
                seen = [*seen[-20:], line]
                continue
            now = time.perf_counter()
            if b'"usage":{' in line or b'"usage": {' in line:
                usage = json.loads(line[6:])
                tokens = usage["usage"]["completion_tokens"]
                if usage["choices"]:
                    last = now
                continue
            first = now if first is None else first
            last = now
    if b" 200 " not in status or first is None:
        raise RuntimeError(f"not answered: {status!r} {seen[-3:]}")
    return Answered(tokens, first - began, last - began)


async def closed_loop(port: int, load: Load) -> LoadResult:
    """Each client sends its next request when its last one is answered."""
    waiting = iter(load.requests)
    answers: list[Answered] = []

    async def client() -> None:
        while (request := next(waiting, None)) is not None:
            answers.append(await ask(port, request))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    return LoadResult.of(answers, time.perf_counter() - began)


async def open_loop(port: int, load: Load, rate: float, chance: random.Random) -> LoadResult:
    """Requests come by themselves, `rate` a second at random (Poisson), whatever was answered."""
    began = time.perf_counter()
    asked = []
    for request in load.requests:
        asked.append(asyncio.ensure_future(ask(port, request)))
        await asyncio.sleep(chance.expovariate(rate))
    answers = await asyncio.gather(*asked)
    return LoadResult.of(answers, time.perf_counter() - began)
