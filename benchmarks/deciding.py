"""What the default decides and what it brings: `make bench-deciding`, two sittings of 80 minutes on two cores.

    python benchmarks/deciding.py [--minutes 80] [--only "own | code"] [--key NAME]
    python benchmarks/deciding.py --report

A cell is a size of the embedded target, a set of prompts (`deciding_sets.py`) and a number of requests at once. In each
the default, plain decoding and some fixed drafts take turns and, one request at a time, the default controller and the
heuristic that adds 2 and takes 1, both with the draft. Cells of one size and batch are visited in turns, too. A cell is
a line of JSON; a rerun goes on behind what is there for the same version. Exit status 0 if nothing failed, 1 if cells
could not be measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines, commit, heldout_texts, note
from contest import estimate, one_round
from deciding_report import BATCHES, DEFAULT, DRAFTED, HEURISTIC, RATIOS, SIZES, cell_name, markdown
from deciding_sets import PROSE, SETS, groups_of, prompt_sets
from truedraft import Engine, load_model
from truedraft.engine.policy import FixedBudget
from truedraft.errors import TruedraftError
from truedraft.machine import machine_facts
from truedraft.measure.bench import PLAIN, OurEngine, Row, differing_answers

FIXED = ("draft,num_speculative_tokens=2", "draft,num_speculative_tokens=6", "prompt-lookup,num_speculative_tokens=4")
HEADS = ("medusa,nodes=8", "redrafter,beams=4,length=4,nodes=8")
"""Where a call of the target costs enough that they may pay."""
# The heuristic starts at 5 tokens and knows no end, so the draft may be long.
LONG_DRAFT = "draft,num_speculative_tokens=12"
HALF_WIDTH, LEAST_ROUNDS = 0.02, 5  # of the intervals, that is wanted; behind the warm-up
SHARES_S = {"own": 40.0, "110M": 100.0, "500M": 400.0}
"""Seconds of a cell by size; what a cell leaves goes to others of its size and batch."""
FORM = 2  # of the lines


class Lab:
    """The embedded target at one size, the sets of prompts, and the engines that learn nothing."""

    def __init__(self, size: str) -> None:
        self.size = size
        gc.collect()  # what is left of another size
        self.target = load_model("embedded:target", dtype="bfloat16", pad_to=None if size == "own" else size)
        gc.freeze()  # a full collection would look through all that is loaded, in the turn of whoever it meets
        assert self.target.tokenizer is not None
        encode, vocab_size = self.target.tokenizer.encode, self.target.vocab_size
        self.sets = prompt_sets(heldout_texts(), PROSE.read_text(encoding="utf-8"), encode, vocab_size)
        fixed = {PLAIN: "none"} | {words: words for words in (*FIXED, *(HEADS if size != "own" else ()))}
        self.fixed = [
            OurEngine(name, Engine(self.target, words, controller=FixedBudget())) for name, words in fixed.items()
        ]

    def systems(self, batch: int) -> list[OurEngine]:
        """With engines that nobody used before, whose controllers learn from one cell alone."""
        learning = {DEFAULT: ("auto", None, None)}
        if batch == 1:
            learning |= {DRAFTED: (LONG_DRAFT, None, None), HEURISTIC: (LONG_DRAFT, None, "heuristic")}
        made = {name: Engine(self.target, *words) for name, words in learning.items()}
        return [*self.fixed, *(OurEngine(name, engine) for name, engine in made.items())]

    def rounds(self, batch: int, names: Sequence[str], seconds: float) -> dict[str, list[Row]]:
        """Rounds of some sets in turns, each until its ratios are known or the time is; a first round warms up."""
        systems = {name: self.systems(batch) for name in names}
        groups = {name: groups_of(name, self.sets[name], batch, few=self.size == "500M") for name in names}
        for name in names:
            one_round(systems[name], groups[name][:1], 0)
        rows: dict[str, list[Row]] = {name: [] for name in names}
        left, number, end = list(names), 0, time.monotonic() + seconds
        while left and (number == 0 or time.monotonic() < end):
            number += 1
            for name in left:
                rows[name] += one_round(systems[name], groups[name], number)
            left = [name for name in left if number < LEAST_ROUNDS or not is_known(result(name, rows[name]))]
        return rows


def result(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What the rounds of a set say: the ratios of `RATIOS`, and how many greedy answers differed from plain ones."""
    systems = list(dict.fromkeys(row.system for row in rows))
    fixed = [system for system in systems if system not in (PLAIN, DEFAULT, DRAFTED, HEURISTIC)]
    speedups = {system: estimate(rows, system, PLAIN)["ratio"] for system in fixed}
    best = max((PLAIN, *fixed), key=lambda system: speedups.get(system, 1.0))
    found = {"default": estimate(rows, DEFAULT, PLAIN), "best": estimate(rows, DEFAULT, best)}
    if HEURISTIC in systems:
        found["heuristic"] = estimate(rows, DRAFTED, HEURISTIC)
    greedy = rows if name != "hot" else []
    return found | {
        "decoding": estimate(rows, DEFAULT, PLAIN, decoding=True),
        "speedups": speedups,
        "best_fixed": best,
        "compared": sum(len(row.prompts) for row in greedy if row.system != PLAIN),
        "different": len(differing_answers(greedy, systems)),
    }


def is_known(found: dict[str, Any]) -> bool:
    return all(found[ratio]["half_width"] <= HALF_WIDTH for ratio in RATIOS if ratio in found)


def sit(kept: Lines, only: Sequence[str], minutes: float) -> int:
    """Measure what is left until it is done or the time is over; gives how many cells could not be measured."""
    end, failed = time.monotonic() + 60.0 * minutes, 0
    for size, group in itertools.groupby(left(kept, only), key=lambda cell: cell[0]):
        cells, lab = list(group), None
        for batch in BATCHES:
            names = [name for _, several, name in cells if several == batch]
            seconds = len(names) * SHARES_S[size]
            if not names:
                continue
            if time.monotonic() + seconds > end:
                note(f"the time is over; {len(left(kept, only)) - failed} cells are left for the next sitting")
                return failed
            began = time.monotonic()
            try:
                lab = lab or Lab(size)
                rows = lab.rounds(batch, names, seconds)
            except TruedraftError as error:
                note(f"{size}, batch {batch}: skipped, {error}")
                failed += len(names)
                continue
            took_s = round(time.monotonic() - began, 1)
            for name in names:
                place = {"cell": cell_name(size, batch, name), "size": size, "batch": batch, "set": name}
                kept.add(place | result(name, rows[name]) | {"parcel_took_s": took_s})
                note(f"{kept.records[-1]['cell']}: {kept.records[-1]['default']}")
    return failed


def left(kept: Lines, only: Sequence[str]) -> list[tuple[str, int, str]]:
    """Size, batch and set of cells that are not done."""
    every = {cell_name(*cell): cell for cell in itertools.product(SIZES, BATCHES, SETS)}
    wanted = {name: cell for name, cell in every.items() if not only or any(word in name for word in only)}
    return [cell for name, cell in wanted.items() if name not in kept.cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80.0, help="of this sitting")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cells whose name holds one of these")
    parser.add_argument("--key", help="name of the version, in place of its commit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "deciding.jsonl")
    parser.add_argument("--report", action="store_true", help="measure nothing; print the tables of what is there")
    asked = parser.parse_args()
    # Lines without `form` are of another script, at commit e210c5fd.
    last = [line["key"] for line in Lines(asked.out, form=FORM).records[-1:]] if asked.report else []
    kept, failed = Lines(asked.out, form=FORM, key=asked.key or (last or [commit()])[0]), 0
    if not asked.report and left(kept, asked.only):
        torch.set_num_threads(asked.threads)
        kept.add({"what": "sitting", "machine": machine_facts(), "threads": asked.threads, "dtype": "bfloat16"})
        failed = sit(kept, asked.only, asked.minutes)
    print(markdown(kept.records))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
