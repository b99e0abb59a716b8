"""The default drafters beside plain decoding while other processes take the cores: `make bench-busy`.

Both take turns, an answer to the same prompt each: idle, then beside each kind of load, round after round, so that a
slow moment of the machine meets all of them. Adds a line of JSON to a file. Run it on an otherwise idle machine with
two cores or more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, Child, Lines, be_asked
from truedraft.machine import machine_facts
from turns import Answered, Turn, estimate, middle_by_median, one_round

ANSWER = 64  # tokens
PROMPTS = (
    "Explain how a compiler turns a program into machine code.",
    "Write a short story about a lighthouse keeper.",
    "List five uses of copper and explain each of them.",
    "What is the difference between a virus and a bacterium?",
    "def quicksort(items):",
)
_EACH_CORE = """import os
for core in range(1, os.cpu_count()):
    if not os.fork():
        break
else:
    core = 0
os.sched_setaffinity(0, {core})
while True: pass
"""
LOADS = {
    "idle": "",
    "a loop, pinned": "while True: pass",
    "a loop on each core": _EACH_CORE,
}
PLAIN, DEFAULT = "none", "auto"
FACTS = "facts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "busy_auto.jsonl")
    parser.add_argument("--model", default="embedded:target", help="a folder")
    parser.add_argument("--sizes", nargs="+", default=["own"], help="padding sizes, or own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--as-system", nargs=2, metavar=("SIZE", "DRAFTER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_system:
        be_asked(lambda: measured(options))
        return
    found = measure(options)
    Lines(options.out).add(found)
    print(json.dumps(found))


def measured(options: argparse.Namespace) -> Callable[[str], Any]:
    """What answers how many tokens the next prompt's answer has or, asked for `FACTS`, what runs the model."""
    import torch

    from truedraft import Engine, SamplingParams, load_model

    size, drafter = options.as_system
    torch.set_num_threads(options.threads)
    model = load_model(options.model, pad_to=None if size == "own" else size)
    params = SamplingParams(max_tokens=ANSWER, temperature=options.temperature, ignore_eos=True)
    engine, prompts = Engine(model, drafter), itertools.cycle(PROMPTS)
    engine.measure(params)
    facts = {"fast_paths": model.fast_paths, "dtype": str(model.dtype)}
    return lambda asked: facts if asked == FACTS else len(engine.generate(next(prompts), params).token_ids)


class System:
    def __init__(self, size: str, drafter: str, options: argparse.Namespace) -> None:
        self.name = f"{size}, threads {options.threads}, {drafter}"
        words = ["--threads", options.threads, "--temperature", options.temperature, "--model", options.model]
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)
        self._child = Child([__file__, *map(str, words), "--as-system", size, drafter], environment)
        self._child.read()
        self.told = self._child.ask(FACTS)

    def answer(self, turn: str) -> Answered:
        return Answered([[0] * self._child.ask(turn)])

    def close(self) -> None:
        self._child.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    systems = [System(size, drafter, options) for size in options.sizes for drafter in (PLAIN, DEFAULT)]
    turns: dict[str, list[Turn]] = {load: [] for load in options.loads}
    for number in range(options.rounds + 1):
        for load in options.loads:
            with running(LOADS[load], pinned="pinned" in load):
                found = one_round(systems, ["next"], number, time.perf_counter)
            turns[load] += found if number else []  # the first warms up
    for system in systems:
        system.close()
    pairs = [(default.name, plain.name) for plain, default in zip(systems[::2], systems[1::2], strict=True)]
    return {
        "of_plain": {
            f"{of}, {load}": estimate(own, of, over, middle=middle_by_median).as_dict()
            for load, own in turns.items()
            for of, over in pairs
        },
        "what": f"tokens a second of answers of {ANSWER} tokens by {Path(options.model).name}, temperature "
        f"{options.temperature}; medians over turns of an answer, and of the ratio to the same round's idle turn",
        "machine": machine_facts(),
        "rounds": options.rounds,
        "systems": {each.name: each.told | summary(each.name, turns) for each in systems},
    }


def summary(name: str, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Of one system by load: tokens a second, and their ratio to those on the idle machine."""
    speeds = {load: [1.0 / turn.per_token_s[name] for turn in own] for load, own in turns.items()}
    idle = speeds.get("idle")
    return {
        load: {
            "per_s": round(statistics.median(found), 2),
            "of_idle": round(statistics.median(a / b for a, b in zip(found, idle, strict=True)), 3) if idle else None,
            "turns": [round(each, 1) for each in found],
        }
        for load, found in speeds.items()
    }


@contextlib.contextmanager
def running(program: str, *, pinned: bool) -> Iterator[None]:
    if not program:
        yield
        return
    pin = f"import os\nos.sched_setaffinity(0, {{{(os.cpu_count() or 1) - 1}}})\n" if pinned else ""
    process = subprocess.Popen([sys.executable, "-c", pin + program], start_new_session=True)
    time.sleep(0.5)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
