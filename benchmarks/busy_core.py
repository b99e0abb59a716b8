"""The default drafters beside plain decoding while other processes take the cores: `make bench-busy`.

Both take turns, an answer to the same prompt each: idle, then beside each kind of load, round after round, so that a
slow moment of the machine meets all of them. Adds a line of JSON to a file. Run it on an otherwise idle machine with
two cores or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines
from contest import estimate, one_round
from truedraft import Engine, SamplingParams, load_model
from truedraft.engine.prompts import encode_prompt
from truedraft.machine import dtype_name, machine_facts
from truedraft.measure.bench import PLAIN, OurEngine, Row, grouped

ANSWER = 64  # tokens
PROMPTS = (
    "Explain how a compiler turns a program into machine code.",
    "Write a short story about a lighthouse keeper.",
    "List five uses of copper and explain each of them.",
    "What is the difference between a virus and a bacterium?",
    "def quicksort(items):",
)
_LOOP = """import os
for core in {cores}:
    if not os.fork():
        os.sched_setaffinity(0, {{core}})
        while True: pass
os.wait()
"""
LOADS = {
    "idle": "",
    "a loop, pinned": _LOOP.format(cores="[os.cpu_count() - 1]"),
    "a loop on each core": _LOOP.format(cores="range(os.cpu_count())"),
}
DEFAULT = "auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "busy_auto.jsonl")
    parser.add_argument("--model", default="embedded:target", help="a folder")
    parser.add_argument("--pad-to", help="a size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options)
    Lines(options.out).add(found)
    print(json.dumps(found))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = load_model(options.model, pad_to=options.pad_to)
    params = SamplingParams(max_tokens=ANSWER, temperature=options.temperature, ignore_eos=True)
    systems = [OurEngine(name, Engine(model, name)) for name in ("none", DEFAULT)]
    systems[0].name = PLAIN
    for system in systems:
        system.engine.measure(params)
    prompts = grouped([(text, encode_prompt(model, text), params) for text in PROMPTS], 1)
    rows: dict[str, list[Row]] = {load: [] for load in options.loads}
    for number in range(options.rounds + 1):
        for load in options.loads:
            with running(LOADS[load]):
                found = one_round(systems, [prompts[number % len(prompts)]], number)
            rows[load] += found if number else []  # the first warms up
    return {
        "of_plain": {load: estimate(own, DEFAULT, PLAIN, median=True) for load, own in rows.items()},
        "what": f"tokens a second of answers of {ANSWER} tokens by {Path(options.model).name}, temperature "
        f"{options.temperature}; medians over turns of an answer",
        "machine": machine_facts(),
        "rounds": options.rounds,
        "threads": options.threads,
        "fast_paths": model.fast_paths,
        "dtype": dtype_name(model.dtype),
        "systems": {each.name: {load: summary(own, each.name) for load, own in rows.items()} for each in systems},
    }


def summary(rows: Sequence[Row], name: str) -> dict[str, Any]:
    speeds = [row.tokens_per_s for row in rows if row.system == name]
    return {"per_s": round(statistics.median(speeds), 2), "turns": [round(each, 1) for each in speeds]}


@contextlib.contextmanager
def running(program: str) -> Iterator[None]:
    """Beside a program, which is killed with all that it started."""
    if not program:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    time.sleep(0.5)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
