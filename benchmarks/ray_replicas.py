"""Replicas on Ray under kills, and what Ray costs: two replicas of `truedraft serve --ray` on this machine.

    python benchmarks/ray_replicas.py [--requests 20000] [--clients 64] [--out FILE]

First so many requests to a small model (completions and chats, streamed and not, greedy, seeded and sampled; some
clients leave early), while one replica after another is killed with SIGKILL. Each must get the answer of plain decoding
where that is known, or an error that says so: 503 or 429 with Retry-After, or a last event that is an error. Then,
without kills, the throughput of SmolLM2 by Ray against two processes that are asked directly, in turns. Each part adds
a line to FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import ray

from common import RESULTS, Lines, note
from servers import PORT, Launch, Server
from soak import PROMPTS, Expected, exchange, expected_answers, judged
from truedraft import Engine, load_model

_REPLICAS = 2
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # so that a chat is its text
_QUESTIONS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at")


def draw(chance: random.Random, expected: Expected) -> tuple[str, dict[str, Any], str | None]:
    prompt, tokens, seed = chance.choice(PROMPTS), chance.choice((4, 8, 16)), chance.randrange(-1, 4)
    body: dict[str, Any] = {"max_tokens": tokens, "stream": chance.random() < 0.5}
    body |= {"temperature": 0} if seed < 0 else {"temperature": 1.0, "seed": seed}
    answer: str | None = expected[prompt, tokens, seed]
    if chance.random() < 0.2:
        body, answer = body | {"temperature": 0.8, "top_p": 0.9, "seed": None}, None
    if chance.random() < 0.3:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}, answer
    return "/v1/completions", body | {"prompt": prompt}, answer


def replicas_below(root: int) -> list[int]:
    """Process ids of the replicas that a process started, itself or by others."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (folder / "cmdline").read_bytes().decode(errors="replace")

    def below(pid: int) -> bool:
        return pid == root or (pid in parents and below(parents[pid]))

    return [pid for pid, name in names.items() if name.startswith("ray::ServeReplica:") and below(pid)]


@contextlib.contextmanager
def served_by(words: Sequence[str], logs: Path, count: int, name: str) -> Iterator[list[Server]]:
    launch = Launch(name, (sys.executable, "-m", "truedraft", "serve", "--port", PORT, "--no-playground", *words))
    servers = [Server(launch, logs / str(number)) for number in range(count)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


ON_RAY = ("--ray", "--replicas", str(_REPLICAS), "--threads", "1")


async def under_kills(server: Server, asked: argparse.Namespace, expected: Expected) -> Counter[str]:
    chance, numbers, came = random.Random(asked.seed), iter(range(asked.requests)), Counter[str]()

    async def client() -> None:
        for number in numbers:
            path, body, answer = draw(chance, expected)
            leaves = (0, chance.choice((0.0, 0.02, 0.1))) if chance.random() < 0.1 else None
            try:
                status, head, text = await exchange(server.port, path, body, leaves)
                what = "left" if leaves is not None else judged(status, head, text, body["stream"], answer)
            except (OSError, ValueError, TimeoutError) as error:
                what = f"wrong: {type(error).__name__}: {error}"
            came[what] += 1
            if what.startswith("told"):
                await asyncio.sleep(1.0)  # Retry-After
            if number % 500 == 0:
                note(f"{number} of {asked.requests}: {dict(came)}")

    async def killer() -> None:
        while True:
            await asyncio.sleep(asked.kill_every)
            victims = replicas_below(server.pid)
            if victims:
                os.kill(chance.choice(victims), signal.SIGKILL)
                came["killed"] += 1

    killing = asyncio.ensure_future(killer())
    await asyncio.gather(*(client() for _ in range(asked.clients)))
    killing.cancel()
    return came


def left_over() -> dict[str, float]:
    """By replica the requests that it still has a minute later, as each tells Ray."""
    line = r'^ray_truedraft_num_requests_(?:running|waiting)\{.*replica="(\w+)".*\} (\S+)$'
    ray.init(address="auto", log_to_driver=False)
    (node,) = ray.nodes()
    ray.shutdown()
    has: dict[str, float] = {}
    for _ in range(12):
        time.sleep(5.0)
        has.clear()
        text = httpx2.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
        for replica, value in re.findall(line, text, re.MULTILINE):
            has[replica] = has.get(replica, 0.0) + float(value)
        if len(has) >= _REPLICAS and not any(has.values()):
            break
    return has


async def load(ports: Sequence[int], of: str, requests: int, clients: int, tokens: int, streamed: bool) -> float:
    """Tokens a second of a closed loop over servers, each of which has its share of the clients.

    Prompts tell `of` which loop they are: what a server remembers of another loop's answers would be drafted from.
    """
    numbers, wrong = iter(range(requests)), 0

    async def client(port: int) -> None:
        nonlocal wrong
        for number in numbers:
            prompt = f"In {of}, chapter {number}: {_QUESTIONS[number % len(_QUESTIONS)]}"
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            status, _, _ = await exchange(port, "/v1/completions", body | {"ignore_eos": True, "stream": streamed})
            wrong += status != 200

    began = time.perf_counter()
    await asyncio.gather(*(client(ports[number % len(ports)]) for number in range(clients)))
    assert not wrong, f"{wrong} of {requests} were not answered"
    return requests * tokens / (time.perf_counter() - began)


def throughput(asked: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """By Ray and asked directly, in turns; the other servers are idle meanwhile."""
    words = ("--model", asked.throughput_model, "--drafter", "none")  # decisions by costs measured apart would differ
    rates: dict[str, list[float]] = {}
    with (
        served_by((*words, "--threads", "1"), logs, _REPLICAS, "direct") as direct,
        served_by((*words, *ON_RAY), logs, 1, "ray") as by_ray,
    ):
        ways = {"direct": [each.port for each in direct], "ray": [each.port for each in by_ray]}
        for ports in ways.values():
            asyncio.run(load(ports, "the first book", 8, 8, 8, False))
        for turn in range(asked.turns):
            for streamed, way in itertools.product((False, True), list(ways)[:: 1 if turn % 2 else -1]):
                of, name = f"book {turn}{streamed:d}", f"{way}{' streamed' if streamed else ''}"
                rate = asyncio.run(load(ways[way], of, asked.load, asked.load_clients, 48, streamed))
                rates.setdefault(name, []).append(rate)
                note(f"{name}: {rate:.1f} tokens a second")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    shares = {"share": middle["ray"] / middle["direct"]}
    shares["share_streamed"] = middle["ray streamed"] / middle["direct streamed"]
    sizes = {"requests": asked.load, "clients": asked.load_clients, "turns": asked.turns}
    about = {"part": "throughput", **sizes, "model": asked.throughput_model}
    return about | {"tokens_per_s": rates, **shares}


def kills(asked: argparse.Namespace, logs: Path) -> dict[str, Any]:
    expected = expected_answers(Engine(load_model("embedded:target"), prefix_cache_bytes=0))
    template = logs / "plain.jinja"
    template.write_text(_TEMPLATE)
    with served_by(("--model", "embedded:target", "--chat-template", str(template), *ON_RAY), logs, 1, "ray") as found:
        began = time.perf_counter()
        came = asyncio.run(under_kills(found[0], asked, expected))
        seconds, left = time.perf_counter() - began, left_over()
    wrong = [what for what in came if what.startswith("wrong")]
    killed = came.pop("killed", 0)
    held = not wrong and bool(left) and not any(left.values()) and came.total() == asked.requests
    sizes = {"requests": asked.requests, "clients": asked.clients, "kill_every_s": asked.kill_every}
    what = {"seconds": seconds, "killed": killed, "came": dict(came), "left_over": left, "held": held}
    return {"part": "kills", **sizes, **what}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="0 leaves the first part out")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--throughput-model", default="smollm2")
    parser.add_argument("--load", type=int, default=64, help="requests of a turn")
    parser.add_argument("--load-clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4, help="0 leaves the second part out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "ray.jsonl")
    asked = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        if asked.requests:
            records.append(kills(asked, Path(folder)))
        if asked.turns:
            records.append(throughput(asked, Path(folder)))
    for record in records:
        Lines(asked.out).add(record)
        print(json.dumps(record))
    return 0 if all(record.get("held", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
