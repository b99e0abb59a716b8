"""This checkout against another one, answer by answer in turns: what a change cost or brought, case by case.

    python benchmarks/checkouts.py OTHER_CHECKOUT --sizes own 500M --minutes 12 --out FILE

Both answer the same prompts by the same noise, so a turn of one case is the same work in both. The ratio of a round
is the other checkout's time over this one's: above 1 this checkout is faster. A case is done when half the width of the
95 % interval of its median ratio is at most 0.015, after nine rounds at least; the minutes are shared out among the
cases that are not. Adds a line of JSON to a file. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Child, Lines, be_asked, note
from fixed_record import PROMPTS, answers_by

if TYPE_CHECKING:
    from turns import Answered

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
_LEAST_ROUNDS, _HALF_WIDTH = 9, 0.015
Case = tuple[str, str, float, int]
"""Drafter, rule, temperature and requests at once."""


def answering(size: str) -> Callable[[Case], list[list[int]]]:
    from truedraft import Engine, SamplingParams, load_model
    from truedraft.engine.policy import FixedBudget

    target = load_model("embedded:target", pad_to=None if size == "own" else size)
    engines: dict[tuple[str, str], Engine] = {}

    def answer(case: Case) -> list[list[int]]:
        drafter, rule, temperature, batch = case
        if (drafter, rule) not in engines:
            engines[drafter, rule] = Engine(target, drafter, rule, controller=FixedBudget())
        tokens = max(1, _TOKENS[size] // (1 if batch == 1 else 2))
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        found = answers_by(range(7, 7 + batch), engines[drafter, rule], PROMPTS[:batch], params)
        return [answer.token_ids for answer in found]

    return answer


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, name: str, folder: Path, size: str) -> None:
        self.name = name
        self._child = Child([__file__, "--answer", size, "."], {**os.environ, "PYTHONPATH": str(folder / "src")})
        self._child.read()

    def answer(self, case: Case) -> Answered:
        from turns import Answered  # here, for the process of an older checkout has no such module

        tokens = self._child.ask(case)
        return Answered(tokens, alike=range(len(tokens)))

    def close(self) -> None:
        self._child.close()


def compare(other: Path, size: str, seconds: float) -> dict[str, Any]:
    from turns import Contest, Stop, middle_by_median, take_turns

    sides = [Checkout("here", Path(__file__).parent.parent, size), Checkout("there", other, size)]
    cases: list[Case] = [(*case, batch) for case in CASES for batch in (1, 8)]
    stop = Stop(half_width=_HALF_WIDTH, least_rounds=_LEAST_ROUNDS)
    contests = [Contest(sides, [case], [("here", "there")], stop, middle=middle_by_median) for case in cases]
    take_turns(contests, seconds)
    for side in sides:
        side.close()
    found = {}
    for case, contest in zip(cases, contests, strict=True):
        name = f"{case[0]} | {case[1]} | temperature {case[2]:g} | batch {case[3]}"
        turns = contest.measured.turns
        if not turns:
            note(f"{size:5s} {name:75s} not measured, the time was over")
            continue
        same = {"same_tokens": not any(turn.different for turn in turns)}
        found[name] = record = contest.estimates[0].as_dict() | contest.measured.as_dict() | same
        note(f"{size:5s} {name:75s} {record['ratio']} +- {record['half_width']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["own", "500M"], choices=list(_TOKENS))
    parser.add_argument("--minutes", type=float, default=12.0, help="for all sizes together")
    parser.add_argument("--out", type=Path, default=Path("out/checkouts.jsonl"))
    parser.add_argument("--answer", choices=list(_TOKENS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.answer:
        be_asked(lambda: answering(asked.answer))
        return
    share = asked.minutes * 60.0 / len(asked.sizes)
    record = {size: compare(asked.other, size, share) for size in asked.sizes}
    Lines(asked.out).add({"what": "seconds of the other checkout / of this one", "cases": record})


if __name__ == "__main__":
    main()
