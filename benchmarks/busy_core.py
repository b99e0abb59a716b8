"""Forwards on all threads while another process takes one core: `make bench-busy`.

Systems take turns of about a second: idle, then beside each kind of load, round after round, so that a slow moment of
the machine meets all of them. Another checkout of this repository may take its turns too (`--against`). With `--auto`
plain decoding and the default drafters with the default controller take turns, an answer to the same prompt each, and
their tokens a second are compared: `make bench-busy-auto`. Adds a line of JSON to a file. Run it on an otherwise idle
machine with two cores or more.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Child, Lines

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel

CONTEXT = 256
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
    "a loop": "while True: pass",
    "a loop, pinned": "while True: pass",
    "a loop on each core": _EACH_CORE,
    "reads of memory, pinned": "import numpy\nblock = numpy.ones(1 << 27)\nwhile True: block.sum()",
    "matrix products on two threads, pinned": (
        "import torch\ntorch.set_num_threads(2)\na = torch.rand(1024, 1024)\nwhile True: a @ a"
    ),
}
FOR_AUTO = ("a loop, pinned", "a loop on each core")
FORWARDS = "forwards"  # in place of a drafter
LEAST_S = 0.001  # so that a turn is one answer
BACKENDS: dict[str, dict[str, str]] = {"native": {}, "fused": {"CC": "/nowhere"}, "stock": {}}


def main() -> None:
    """Measure and write, or be one of the systems that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/busy_core.jsonl"))
    parser.add_argument("--against", type=Path, help="another checkout, whose src/ is measured in turns with this one")
    parser.add_argument("--model", default="embedded:target", help="a folder")
    parser.add_argument("--auto", action="store_true", help="tokens a second of auto beside plain decoding")
    parser.add_argument("--backend", choices=BACKENDS, default="native")
    parser.add_argument("--sizes", nargs="+", default=["500M"], help="padding sizes, or own")
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0, help="of an engine's requests")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn-s", type=float, default=1.0)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[each for each in LOADS if each not in FOR_AUTO])
    parser.add_argument("--as-system", nargs=4, metavar=("SIZE", "THREADS", "BACKEND", "WHO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_system:
        be_measured(options)
        return
    found = measure(options)
    Lines(options.out).add(found)
    print(json.dumps(found))


def be_measured(options: argparse.Namespace) -> None:
    """Load a model; then for each line of standard input compute for so many seconds, print how much a second."""
    import torch

    from truedraft import load_model

    size, threads, backend, who = options.as_system
    torch.set_num_threads(int(threads))
    model = load_model(options.model, pad_to=None if size == "own" else size, fast_paths=backend != "stock")
    if who != FORWARDS:
        compute = answers_of(model, who, options.temperature)
    else:
        compute = forwards_of(model, options.rows)
    began = time.perf_counter()
    first = compute() / (time.perf_counter() - began)
    told = {"fast_paths": model.fast_paths, "dtype": str(model.dtype), "first_per_s": round(first, 2)}
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        began, count, times = time.perf_counter(), 0, []
        while (now := time.perf_counter()) - began < float(line):
            done = compute()
            times.append((time.perf_counter() - now) / done)
            count += done
        print(json.dumps([count / (time.perf_counter() - began), statistics.median(times)]), flush=True)


def forwards_of(model: LanguageModel, rows: int) -> Callable[[], int]:
    """One forward behind a text; returns how many that were."""
    import torch

    from truedraft.core.tree import chain_shape
    from truedraft.models.base import Segment

    ids = torch.arange(CONTEXT + rows) * 7919 % model.vocab_size
    cache = model.new_cache()
    model.forward([Segment(cache, ids[:CONTEXT], chain_shape(CONTEXT), ())])
    cache.commit(range(CONTEXT))

    def compute() -> int:
        model.forward([Segment(cache, ids[CONTEXT:], chain_shape(rows), range(rows))])
        cache.rollback(CONTEXT)
        return 1

    return compute


def answers_of(model: LanguageModel, drafter: str, temperature: float) -> Callable[[], int]:
    """An answer to the next prompt; returns its tokens."""
    from truedraft import Engine, SamplingParams

    params = SamplingParams(max_tokens=ANSWER, temperature=temperature, ignore_eos=True)
    engine, prompts = Engine(model, drafter), itertools.cycle(PROMPTS)
    engine.measure(params)
    return lambda: len(engine.generate(next(prompts), params).token_ids)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Speeds by system and load."""
    from truedraft.bench.turns import rotated
    from truedraft.machine import this_machine

    here = Path(__file__).parents[1]
    checkouts = {"": here} | ({"other checkout, ": options.against} if options.against else {})
    systems: dict[str, Child] = {}
    told: dict[str, Any] = {}
    for size in options.sizes:
        for threads in options.threads:
            for (word, folder), who in itertools.product(
                checkouts.items(), ("none", "auto") if options.auto else [FORWARDS]
            ):
                name = f"{word}{size}, threads {threads}" + (f", {who}" if options.auto else "")
                systems[name] = start(folder, size, threads, who, options)
                told[name] = systems[name].read()
    speeds: dict[str, dict[str, list[float]]] = {name: {load: [] for load in options.loads} for name in systems}
    middle: dict[str, dict[str, list[float]]] = {name: {load: [] for load in options.loads} for name in systems}
    for number in range(-1, options.rounds):  # the first warms up
        for load in options.loads:
            with running(LOADS[load], pinned="pinned" in load):
                for name in rotated(list(systems), number):
                    speed, seconds = systems[name].ask(LEAST_S if options.auto else options.turn_s)
                    if number >= 0:
                        speeds[name][load].append(speed)
                        middle[name][load].append(seconds)
    for system in systems.values():
        system.close()
    over = {"of_plain": of_plain(speeds)} if options.auto else {}
    turns = "an answer" if options.auto else f"{options.turn_s} s"
    return over | {
        "what": f"{unit(options)}; medians over turns of {turns}, and of the ratio to the same round's idle "
        "turn; step_s is the median one",
        "machine": this_machine(),
        "rounds": options.rounds,
        "body": options.backend,
        "systems": {name: told[name] | summary(speeds[name], middle[name]) for name in systems},
    }


def of_plain(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Speeds of `auto` over plain decoding's by its name and load: medians over pairs of turns, with 95 % intervals."""
    from truedraft.bench.turns import median_interval

    found = {}
    for name in (each for each in speeds if each.endswith(", auto")):
        plain = speeds[name.removesuffix("auto") + "none"]
        for load, own in speeds[name].items():
            ratios = [a / b for a, b in zip(own, plain[load], strict=True)]
            interval = [round(end, 3) for end in median_interval(ratios)]
            found[f"{name}, {load}"] = {"median": round(statistics.median(ratios), 3), "interval": interval}
    return found


def summary(speeds: dict[str, list[float]], middle: dict[str, list[float]]) -> dict[str, Any]:
    """Of one system by load: forwards a second, and their ratio to those of the idle machine."""
    idle = speeds.get("idle")
    return {
        load: {
            "per_s": round(statistics.median(found), 2),
            "of_idle": round(statistics.median(a / b for a, b in zip(found, idle, strict=True)), 3) if idle else None,
            "step_s": statistics.median(middle[load]),
            "turns": [round(each, 1) for each in found],
        }
        for load, found in speeds.items()
    }


def unit(options: argparse.Namespace) -> str:
    """What is counted a second."""
    if options.auto:
        name = Path(options.model).name
        return f"tokens a second of answers of {ANSWER} tokens by {name}, temperature {options.temperature}"
    return f"forwards of {options.rows} rows a second, behind {CONTEXT} tokens"


def start(folder: Path, size: str, threads: int, who: str, options: argparse.Namespace) -> Child:
    """A system of a checkout, loaded: forwards, or the answers of a drafter."""
    words = ["--rows", options.rows, "--temperature", options.temperature, "--model", options.model]
    environment = os.environ | BACKENDS[options.backend] | {"PYTHONPATH": str(folder / "src")}
    environment.pop("OMP_NUM_THREADS", None)
    system = [size, str(threads), options.backend, who]
    return Child([__file__, *map(str, words), "--as-system", *system], environment)


@contextlib.contextmanager
def running(program: str, *, pinned: bool) -> Iterator[None]:
    """Another process that computes meanwhile, on the last core alone where it is pinned."""
    if not program:
        yield
        return
    pin = f"import os\nos.sched_setaffinity(0, {{{(os.cpu_count() or 1) - 1}}})\n" if pinned else ""
    process = subprocess.Popen([sys.executable, "-c", pin + program], start_new_session=True)
    time.sleep(2.0 if "torch" in program else 0.5)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
