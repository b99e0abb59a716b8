"""A server under many short requests of all kinds, from clients that come and go as they like: `make soak`.

    python benchmarks/soak.py [--requests 100000] [--clients 48] [--seed 0] [--out FILE]

Requests differ in prompt, sampling, streaming, structure, predictions and what may draft; some clients close the
connection before, in the middle of, or without reading their answer; the drafter fails now and then. Every request must
be answered or refused, greedy and seeded answers must be those of plain decoding, and at the end no slot, cache or
block may be left over and memory must not have grown. The last line of standard output is a JSON object; exit status 0
if all of that held.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import uvicorn

from common import note, posted
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.drafters import DraftRequest, PromptLookup
from truedraft.drafters.portfolio import Portfolio
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.server import ServerOptions, application

_WARM = 0.2  # of the requests, behind which memory may not grow any more
_GROWTH = 1.10
_PATIENCE_S = 120.0
PROMPTS = (
    "class Stack:\n    def push(self, item):",
    "import os\n\ndef walk(folder):",
    "# A list of primes\nprimes = [",
    "def test_",
    "x",
)
_FORMS = ({"regex": "[a-z]{3}-[0-9]{2}"}, {"choice": ["yes", "no"]}, {"json": {"type": "integer", "maximum": 99}})


class Unreliable(PromptLookup):
    """Prompt lookup that fails now and then."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(min_ngram=1)
        self._chance = chance

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        if self._chance.random() < 1 / 2000:
            raise RuntimeError("a planted fault")
        return super().propose(batch, budgets, noise)


LEAVES = {"left before": (0, 0.0), "left during": (60, 0.0), "left unread": (0, 0.05)}
"""Of clients that do not wait for an answer: bytes that they read, and seconds until they go."""


@dataclass
class Tally:
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # bytes of this process after so many requests


Expected = dict[tuple[str, int, int], str]
"""What plain decoding answers, by prompt, number of tokens and seed: -1 is greedy."""


Case = tuple[str, dict[str, Any], str | None, str | None]
"""Path and body of a request, how its client leaves (of `LEAVES`), and the text of the answer, where it is known."""


def draw_case(chance: random.Random, expected: Expected) -> Case:
    prompt, tokens = chance.choice(PROMPTS), chance.choice((1, 4, 8, 16))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    greedy, text = expected[prompt, tokens, -1], None
    kind = chance.randrange(6)
    if kind == 0:
        text = greedy
    elif kind == 1:
        seed = chance.randrange(4)
        body |= {"temperature": 1.0, "seed": seed}
        text = expected[prompt, tokens, seed]
    elif kind == 2:
        body |= {"temperature": 1.0, "top_p": 0.9, "n": chance.choice((1, 2, 3)), "presence_penalty": 0.5}
    elif kind == 3:
        body |= {"structured_outputs": chance.choice(_FORMS), "max_tokens": 16}
    elif kind == 4:
        body |= {"prediction": {"content": greedy or "x"}, "logprobs": 2}
        text = greedy
    else:
        body |= {"stop": ["\n", "("], "logit_bias": {"17": 2.0}, "temperature": 0.7}
    if chance.random() < 0.1:
        body["speculation"] = {"enabled": False}
    if chance.random() < 0.02:
        return "/v1/completions", body | {"temperature": -1}, None, None
    body["stream"] = chance.random() < 0.5
    return "/v1/completions", body, chance.choices((None, *LEAVES), (0.85, 0.05, 0.07, 0.03))[0], text


async def exchange(
    port: int, path: str, body: dict[str, Any], leaves: tuple[int, float] | None = None
) -> tuple[int, str, str]:
    """Status, head and body of an answer; nothing for a client that leaves, see `LEAVES`."""
    async with posted(port, json.dumps(body).encode(), path) as reader:
        if leaves is not None:
            await asyncio.sleep(leaves[1])
            if leaves[0]:
                await reader.read(leaves[0])
            return 0, "", ""
        head, _, rest = (await asyncio.wait_for(reader.read(), _PATIENCE_S)).partition(b"\r\n\r\n")
    told = head.decode().lower()
    text = (unchunked(rest) if "chunked" in told else rest).decode()
    return int(told.split(" ", 2)[1]) if told else 0, told, text


def judged(status: int, head: str, text: str, streamed: bool, answer: str | None) -> str:
    """What became of a request, in a word or two; what begins with "wrong" may not happen."""
    if status in (429, 503):
        told = '"error"' in text and "retry-after" in head
        return f"told {status}" if told else f"wrong: {status} without a reason: {text[:200]}"
    if status == 400 and "Traceback" not in text:
        return "refused"
    if status != 200:
        return f"wrong: status {status}: {text[:200]}"
    if not streamed:
        choice = json.loads(text)["choices"][0]
        found = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    else:
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        if events and events[-1].startswith('{"error"'):
            return "told in the stream"
        if not events or events[-1] != "[DONE]":
            return f"wrong: a stream without its end: {text[-200:]}"
        choices = [each for event in events[:-1] for each in json.loads(event)["choices"] if not each["index"]]
        found = "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)
    if answer is None:
        return "answered"
    return "right" if found == answer else f"wrong: {found!r} is not {answer!r}"


async def ask(port: int, case: Case, tally: Tally) -> None:
    """Send one request and judge its answer; one that was told to come again later is waited for."""
    path, body, leaves, expected = case
    try:
        status, head, text = await exchange(port, path, body, LEAVES[leaves] if leaves else None)
        what = leaves or judged(status, head, text, bool(body.get("stream")), expected)
    except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
        what = f"wrong: {type(error).__name__}: {error}"
    if what.startswith("wrong"):
        tally.wrong.append(f"{body}: {what}")
    tally.ended[what.partition(":")[0]] += 1
    if what.startswith("told"):
        await asyncio.sleep(1.0)  # Retry-After


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size or b"0", 16)
        if not count:
            break
        parts.append(body[:count])
        body = body[count + 2 :]
    return b"".join(parts)


async def soak(port: int, requests: int, clients: int, draw: Callable[[], Case], tally: Tally) -> None:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await ask(port, draw(), tally)
            if number % max(requests // 50, 1) == 0:
                tally.memory.append((number, psutil.Process().memory_info().rss))
                note(f"{number} of {requests}: {dict(tally.ended)}")

    await asyncio.gather(*(client() for _ in range(clients)))


def expected_answers(engine: Engine) -> Expected:
    found = {}
    for prompt, tokens, seed in itertools.product(PROMPTS, (1, 4, 8, 16), range(-1, 4)):
        way = SamplingParams(tokens) if seed < 0 else SamplingParams(tokens, 1.0, seed=seed)
        found[prompt, tokens, seed] = engine.generate(prompt, way).text or ""
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    logging.getLogger("truedraft").setLevel(logging.CRITICAL)  # the planted faults
    target = load_model("embedded:target")
    expected = expected_answers(Engine(target, prefix_cache_bytes=0))
    drafter = Portfolio([from_spec("draft", target), Unreliable(random.Random(asked.seed))])
    engine = Engine(target, with_own_drafts(drafter), max_batch=16, prefix_cache_bytes=1 << 22)
    app, service = application(engine, ServerOptions(max_queue=64, no_playground=True), "soak")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    began = time.monotonic()
    tally, port = Tally(), listening.getsockname()[1]
    asyncio.run(soak(port, asked.requests, asked.clients, lambda: draw_case(chance, expected), tally))
    seconds = time.monotonic() - began
    deadline = time.monotonic() + 30
    while not service.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    server.should_exit = True
    thread.join(30)
    record = report(engine, service.is_idle, tally, asked.requests, seconds)
    line = json.dumps(record)
    if asked.out is not None:
        asked.out.write_text(line + "\n")
    print(line)
    return 0 if record["held"] else 1


def report(engine: Engine, idle: bool, tally: Tally, requests: int, seconds: float) -> dict[str, Any]:
    warm = [memory for number, memory in tally.memory if number >= _WARM * requests]
    growth = max(warm[-3:]) / max(warm[:3]) if len(warm) > 6 else None
    models = [engine.target, *(each.model for each in engine.drafter.members.values() if each.model is not None)]
    held = {
        "all answered or refused": sum(tally.ended.values()) == requests,
        "none wrong": not tally.wrong and not tally.ended["told in the stream"],
        "nothing waits or runs": idle,
        "nothing is left over": engine.check_idle() == [],
        "caches are given back": all(each.pool is None or each.pool.in_use == 0 for each in models),
        "drafters hold nothing": not any(each.held.requests for each in engine.drafter.members.values()),
        "memory is flat": growth is None or growth <= _GROWTH,
    }
    about = {"held": all(held.values()), "checks": held, "requests": requests, "seconds": seconds}
    came = {"ended": dict(tally.ended), "wrong": tally.wrong[:20], "memory_growth": growth, "memory": tally.memory}
    return about | came | {"torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
