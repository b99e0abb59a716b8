"""This checkout against another one, answer by answer in turns: what a change cost or brought, case by case.

    python benchmarks/checkouts.py OTHER_CHECKOUT --sizes own 500M --minutes 12 --out FILE

Both answer the same prompts by the same noise, so a turn of one case is the same work in both. The ratio of a round
is the other checkout's time over this one's: above 1 this checkout is faster. A case is done when half the width of the
95 % interval of its median ratio is at most 0.015, after nine rounds at least; the minutes are shared out among the
cases that are not. Adds a line of JSON to a file. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fixed_record import PROMPTS, answers_by

_DRAFT, _MEDUSA, _BEAMS = "draft,num_speculative_tokens=4", "medusa,nodes=8", "redrafter,beams=4,length=4,nodes=8"
CASES = (
    *((drafter, "speculative", 0.0) for drafter in ("none", "prompt-lookup", _DRAFT, _MEDUSA, _BEAMS)),
    *((drafter, "speculative", 0.8) for drafter in ("none", "prompt-lookup", _DRAFT, _MEDUSA, _BEAMS)),
    ("draft,branching=2-2-1", "speculative", 0.8),
    (_DRAFT, "block", 0.8),
    (_DRAFT, "speculative,lenience=0.5", 0.8),
    (_DRAFT, "typical", 0.8),
    (_MEDUSA, "typical", 0.8),
)
_TOKENS = {"own": 192, "500M": 24}
_LEAST_ROUNDS, _MOST_ROUNDS, _HALF_WIDTH = 9, 120, 0.015


def answer_in_turns(size: str) -> None:
    """Answer what is asked on standard input, a line each, with the seconds that it took; for a process of its own."""
    from truedraft import Engine, SamplingParams, load_model
    from truedraft.control import FixedBudget

    target = load_model("embedded:target", pad_to=None if size == "own" else size)
    engines: dict[tuple[str, str], Engine] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        drafter, rule, temperature, batch = json.loads(line)
        engine = engines.get((drafter, rule)) or engines.setdefault(
            (drafter, rule), Engine(target, drafter, rule, controller=FixedBudget())
        )
        tokens = max(1, _TOKENS[size] // (1 if batch == 1 else 2))
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        started = time.perf_counter()
        answers = answers_by(range(7, 7 + batch), engine, PROMPTS[:batch], params)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, [answer.token_ids for answer in answers]]), flush=True)


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, folder: Path, size: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        command = [sys.executable, __file__, "--answer", size, "."]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout ended early; its message is above")
        return json.loads(line)

    def ask(self, case: tuple[str, str, float, int]) -> tuple[float, Any]:
        """Seconds and tokens of one case."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        seconds, tokens = self._read()
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def half_width(ratios: list[float]) -> float:
    """Half of the 95 % interval of the median, by drawing rounds again."""
    if len(ratios) < _LEAST_ROUNDS:
        return math.inf
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(500))
    return (medians[487] - medians[12]) / 2


def compare(other: Path, size: str, seconds: float) -> dict[str, Any]:
    """The median ratio of each case at one size."""
    here = Checkout(Path(__file__).parent.parent, size)
    there = Checkout(other, size)
    cases = [(*case, batch) for case in CASES for batch in (1, 8)]
    ratios: dict[tuple[str, str, float, int], list[float]] = {case: [] for case in cases}
    same = {}
    for case in cases:  # also warms up
        same[case] = here.ask(case)[1] == there.ask(case)[1]
    end = time.monotonic() + seconds
    while open_cases := [case for case in cases if half_width(ratios[case]) > _HALF_WIDTH]:
        for case in open_cases:
            order = (here, there) if len(ratios[case]) % 2 else (there, here)
            took = {side: side.ask(case)[0] for side in order}
            ratios[case].append(took[there] / took[here])
        if time.monotonic() > end or max(map(len, ratios.values())) >= _MOST_ROUNDS:
            break
    here.close()
    there.close()
    found = {}
    for case in cases:
        name = f"{case[0]} | {case[1]} | temperature {case[2]:g} | batch {case[3]}"
        median, half = statistics.median(ratios[case]), half_width(ratios[case])
        rounds, equal = len(ratios[case]), same[case]
        known = None if math.isinf(half) else round(half, 4)
        found[name] = {"ratio": round(median, 4), "half_width": known, "rounds": rounds, "same_tokens": equal}
        print(f"{size:5s} {name:75s} {median:.3f} +- {half:.3f} ({len(ratios[case])} rounds)", file=sys.stderr)
    return found


def main() -> None:
    """Compare, and add a line to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["own", "500M"], choices=list(_TOKENS))
    parser.add_argument("--minutes", type=float, default=12.0, help="for all sizes together")
    parser.add_argument("--out", type=Path, default=Path("out/checkouts.jsonl"))
    parser.add_argument("--answer", choices=list(_TOKENS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.answer:
        answer_in_turns(asked.answer)
        return
    share = asked.minutes * 60.0 / len(asked.sizes)
    record = {size: compare(asked.other, size, share) for size in asked.sizes}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with asked.out.open("a") as file:
        file.write(json.dumps({"what": "seconds of the other checkout / of this one", "cases": record}) + "\n")


if __name__ == "__main__":
    main()
