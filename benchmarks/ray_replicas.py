"""Replicas on Ray under kills: two replicas of `truedraft serve --ray` on this machine.

    python benchmarks/ray_replicas.py [--requests 20000] [--clients 64] [--out FILE]

So many requests go to a small model (completions and chats, streamed and not, greedy, seeded and sampled; some clients
leave early), while one replica after another is killed with SIGKILL. Each must get the answer of plain decoding where
that is known, or an error that says so: 503 or 429 with Retry-After, or a last event that is an error. Adds a line to
FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import ray

from common import RESULTS, Lines
from servers import PORT, Launch, Server, serving
from soak import LEAVES, PROMPTS, Case, Expected, Tally, expected_answers, soak
from truedraft import Engine, load_model

_REPLICAS = 2
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # so that a chat is its text


def draw_case(chance: random.Random, expected: Expected) -> Case:
    prompt, tokens, seed = chance.choice(PROMPTS), chance.choice((4, 8, 16)), chance.randrange(-1, 4)
    body: dict[str, Any] = {"max_tokens": tokens, "stream": chance.random() < 0.5}
    body |= {"temperature": 0} if seed < 0 else {"temperature": 1.0, "seed": seed}
    answer: str | None = expected[prompt, tokens, seed]
    if chance.random() < 0.2:
        body, answer = body | {"temperature": 0.8, "top_p": 0.9, "seed": None}, None
    leaves = chance.choice(list(LEAVES)) if chance.random() < 0.1 else None
    if chance.random() < 0.3:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}, leaves, answer
    return "/v1/completions", body | {"prompt": prompt}, leaves, answer


def replicas_below(root: int) -> list[int]:
    """Process ids of the replicas that a process started, itself or by others."""
    found = []
    for child in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::ServeReplica:"):
                found.append(child.pid)
    return found


async def under_kills(server: Server, asked: argparse.Namespace, expected: Expected) -> tuple[Tally, int]:
    """What came of all requests, and how many replicas were killed."""
    chance, tally, killed = random.Random(asked.seed), Tally(), 0

    async def killer() -> None:
        nonlocal killed
        while True:
            await asyncio.sleep(asked.kill_every)
            if victims := replicas_below(server.pid):
                os.kill(chance.choice(victims), signal.SIGKILL)
                killed += 1

    killing = asyncio.ensure_future(killer())
    await soak(server.port, asked.requests, asked.clients, lambda: draw_case(chance, expected), tally)
    killing.cancel()
    return tally, killed


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


def kills(asked: argparse.Namespace, logs: Path) -> dict[str, Any]:
    expected = expected_answers(Engine(load_model("embedded:target"), prefix_cache_bytes=0))
    template = logs / "plain.jinja"
    template.write_text(_TEMPLATE)
    words = ("--model", "embedded:target", "--chat-template", str(template), "--threads", "1")
    ray_words = ("--ray", "--replicas", str(_REPLICAS), "--port", PORT, "--no-playground")
    launch = Launch("ray", (sys.executable, "-m", "truedraft", "serve", *words, *ray_words))
    with serving(launch, logs) as server:
        began = time.perf_counter()
        tally, killed = asyncio.run(under_kills(server, asked, expected))
        seconds, left = time.perf_counter() - began, left_over()
    fine = not tally.wrong and not tally.ended["refused"] and tally.ended.total() == asked.requests
    held = fine and bool(left) and not any(left.values())
    sizes = {"requests": asked.requests, "clients": asked.clients, "kill_every_s": asked.kill_every}
    what = {"seconds": seconds, "killed": killed, "came": dict(tally.ended), "left_over": left, "held": held}
    what |= {"wrong": tally.wrong[:20]}
    return {"part": "kills", **sizes, **what}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "ray.jsonl")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = kills(asked, Path(folder))
    Lines(asked.out).add(record)
    print(json.dumps(record))
    return 0 if record["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
