"""The engine without a server, for `serving.py`: is asked with loads, and answers with what came of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import be_asked
from serving_load import Answered, LoadResult
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec

_BURN = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.01 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.01 * (1 - share))
"""


def answer(engine: Engine, load: dict[str, Any]) -> LoadResult:
    waiting = [
        (each["prompt"], SamplingParams(each["max_tokens"], each["temperature"])) for each in reversed(load["requests"])
    ]
    running, done = [], []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < load["clients"]:
            running.append(engine.submit(*waiting.pop()))
        engine.step()
        done += [request for request in running if request.closed]
        running = [request for request in running if not request.closed]
    seconds = time.perf_counter() - began
    answers = [request.pieces[-1].answer for request in done]
    found = [
        Answered(len(each.token_ids), each.timing.first_token_s or 0.0, each.timing.total_s)
        for each in answers
        if each is not None
    ]
    return LoadResult.of(found, seconds)


def answering() -> Callable[[dict[str, Any]], dict[str, Any]]:
    target = load_model("embedded:target", pad_to="500M")
    engine = Engine(target, with_own_drafts(from_spec("draft,num_speculative_tokens=12", target)), prefix_cache_bytes=0)
    engine.measure()

    def ask(asked: dict[str, Any]) -> dict[str, Any]:
        burner = subprocess.Popen([sys.executable, "-c", _BURN, str(asked["burn"])])
        try:
            return asdict(answer(engine, asked["load"]))
        finally:
            burner.kill()
            burner.wait()

    return ask


if __name__ == "__main__":
    be_asked(answering)
