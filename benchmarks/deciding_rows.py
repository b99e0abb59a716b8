"""How each row of `make bench-deciding` is measured: which systems take turns on which requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common import heldout_texts
from deciding_cells import MIX, PROSE, Cell, SetRequest, groups_of, prompt_sets
from truedraft import Engine, load_model
from truedraft.engine.policy import FixedBudget
from truedraft.errors import ModelError
from truedraft.measure.bench import OurEngine
from truedraft.models.base import LanguageModel
from turns import Answered, Answering, Clock, Estimate, Group, Turn, estimate, one_round

NONE, PLAIN, DEFAULT, HEURISTIC = "none", "plain", "default", "heuristic"
LONG_DRAFT = "draft,num_speculative_tokens=12"
HALF_WIDTH, LEAST_ROUNDS = 0.02, 5  # of the interval, that is wanted; behind the warm-up
_WARM_UP_TOKENS = 8
_MOST_SLOTS = 32
_SWEPT_GROUPS = {1: 4, 4: 2}  # by batch, one for larger ones
_MIXED_GROUPS = 5  # of a pass at batch 1: one of each domain

GRID: Mapping[str, Sequence[int]] = {
    "draft,num_speculative_tokens=": (1, 2, 3, 4, 6, 8),
    "prompt-lookup,num_speculative_tokens=": (2, 4, 8),
    "medusa,nodes=": (4, 8, 16),
    "redrafter,beams=4,length=4,nodes=": (4, 8, 16),
}
"""Words of each family, with the numbers behind them."""
_COARSE: Mapping[str, Sequence[int]] = dict(zip(GRID, ((2, 6), (4,), (8,), (8,)), strict=True))

Found = dict[str, Any]
Visits = Iterator[Found | None]
"""What is known of a cell after each visit; the first one makes ready."""


class EngineSystem:
    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self._ours = name, engine, OurEngine(name, engine)

    def answer(self, group: Sequence[SetRequest]) -> Answered:
        """Answer a group together.

        Raises:
            ModelError: a request failed, or went on undrafted.
        """
        output = self._ours.answer([asked.prompt for asked in group], [asked.params for asked in group])
        if output.warnings:
            raise ModelError(output.warnings[0])
        greedy = [number for number, asked in enumerate(group) if asked.params.greedy]
        return Answered([list(ids) for ids in output.token_ids], output.prefill_s, greedy)


class Lab:
    def __init__(self) -> None:
        self._size = ""
        self._target: LanguageModel | None = None
        self._sets: dict[str, list[SetRequest]] = {}
        self._fixed: dict[str, Engine] = {}

    def target(self, size: str) -> LanguageModel:
        """The embedded target at a size; that of another one is dropped."""
        if self._target is None or size != self._size:
            self._target, self._fixed = None, {}
            gc.collect()
            self._target = load_model("embedded:target", dtype="bfloat16", pad_to=None if size == "own" else size)
            gc.freeze()  # a full collection would look through all that is loaded, in the turn of whoever it meets
            self._size = size
        return self._target

    def groups(self, cell: Cell) -> list[list[SetRequest]]:
        target = self.target(cell.size)
        if not self._sets:
            assert target.tokenizer is not None
            prose = PROSE.read_text(encoding="utf-8")
            self._sets = prompt_sets(heldout_texts(), prose, target.tokenizer.encode, target.vocab_size)
        return groups_of(cell.set, self._sets[cell.set], cell.batch, few=cell.size == "500M")

    def fixed(self, size: str, words: str, name: str | None = None) -> EngineSystem:
        """An engine that learns nothing: one for all cells of a size."""
        target = self.target(size)
        if words not in self._fixed:
            self._fixed[words] = Engine(target, words, controller=FixedBudget())
        return EngineSystem(name or words, self._fixed[words])

    def learning(self, size: str, words: str, name: str, controller: Any = None) -> EngineSystem:
        """An engine that nobody used before, whose controller learns from this cell alone."""
        return EngineSystem(name, Engine(self.target(size), words, None, controller, max_batch=_MOST_SLOTS))


# ------------------------------------------------------------------ fixed configurations: few of each family, then more


def coarse(*, heads: bool) -> list[str]:
    """What is tried first; heads where a call of the target costs enough that they may pay."""
    families = list(GRID) if heads else list(GRID)[:2]
    return [f"{family}{number}" for family in families for number in _COARSE[family]]


def finer(speedups: Mapping[str, float], families: int) -> list[str]:
    """What is tried next: around the best number of each of the best families, up to those that were tried.

    Worked example: of draft chains 2 and 6 were tried; if 2 was the better, 1, 3 and 4 follow, else 3, 4 and 8.
    """
    tried = [[words for words in speedups if words.startswith(family)] for family in GRID]
    best = sorted((max(each, key=speedups.__getitem__) for each in tried if each), key=lambda words: -speedups[words])
    return [words for middle in best[:families] for words in _around(middle, speedups)]


def _around(words: str, tried: Mapping[str, float]) -> list[str]:
    family = next(family for family in GRID if words.startswith(family))
    grid = [f"{family}{number}" for number in GRID[family]]
    places = [place for place, each in enumerate(grid) if each in tried and each != words]
    own = grid.index(words)
    first = max((place + 1 for place in places if place < own), default=0)
    last = min((place for place in places if place > own), default=len(grid))
    return [each for each in grid[first:last] if each != words]


def best(speedups: Mapping[str, float]) -> str:
    """The fastest; `none`, plain decoding, where nothing exceeds 1."""
    words = max(speedups, key=lambda words: speedups[words], default=NONE)
    return words if words != NONE and speedups[words] > 1.0 else NONE


def sweep(lab: Lab, cell: Cell, clock: Clock = time.perf_counter) -> Visits:
    """Speed-ups of fixed configurations over plain decoding, one pass over some groups; no interval."""
    most = _MIXED_GROUPS if cell.set == MIX and cell.batch == 1 else _SWEPT_GROUPS.get(cell.batch, 1)
    groups = lab.groups(cell)[:most]
    yield None
    short = [replace(asked, params=replace(asked.params, max_tokens=_WARM_UP_TOKENS)) for asked in groups[0]]
    speedups: dict[str, float] = {}
    turns: list[Turn] = []
    for first in (True, False):
        tried = coarse(heads=cell.size != "own") if first else finer(speedups, 2 if cell.batch == 1 else 1)
        if tried:
            systems = [lab.fixed(cell.size, NONE, PLAIN), *(lab.fixed(cell.size, each) for each in tried)]
            for system in systems:
                system.answer(short)
            found = one_round(systems, groups, 0, clock)
            speedups |= {each: estimate(found, each, PLAIN).ratio for each in tried}
            turns += found
    shown = {words: round(value, 4) for words, value in speedups.items()}
    yield {"speedups": shown, "best": best(shown), "groups": len(groups), "status": "reached", **compared(turns)}


# ----------------------------------------------------------------------------------------------- two systems, by rounds


def rounds(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Visits:
    """Round after round of two systems.

    A cell whose interval lies far above its bar need not be known to 0.02.
    """
    systems = systems_of(lab, cell, before)
    sure_above = 1.15 if (cell.row, cell.set) == ("c", MIX) else 1.10
    yield from contest(systems, lab.groups(cell), sure_above)


def systems_of(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> list[EngineSystem]:
    """The default, and what it is held against, of the record of the cell that it needs.

    The heuristic of row c starts at 5 tokens and knows no end, so the draft may be long. In row b the best of the sweep
    is measured again, or it would be the luckiest.
    """
    if cell.row == "c":
        heuristic = lab.learning(cell.size, LONG_DRAFT, HEURISTIC, "heuristic")
        return [lab.learning(cell.size, LONG_DRAFT, DEFAULT), heuristic]
    words, name = (NONE, PLAIN) if before is None else (before["best"], before["best"])
    return [lab.learning(cell.size, "auto", DEFAULT), lab.fixed(cell.size, words, name)]


def contest(
    systems: Sequence[Answering[Group]],
    groups: Sequence[Group],
    sure_above: float,
    clock: Clock = time.perf_counter,
) -> Visits:
    """A record after each round but the first, which warms up; over once the ratio is known."""
    of, over = (system.name for system in systems)
    turns: list[Turn] = []
    seconds, number, status = 0.0, 0, "missed"
    yield None
    while status == "missed":
        began = clock()
        made = one_round(systems, groups, number, clock)
        seconds += clock() - began
        if number:
            turns += made
            found = estimate(turns, of, over)
            status = status_of(found, number, sure_above)
            record = found.as_dict() | {"of": of, "over": over, "status": status, "rounds": number}
            record |= {"seconds": round(seconds, 1), **compared(turns)}
            record["decoding"] = estimate(turns, of, over, decoding=True).as_dict()
            ratios = [estimate([turn], of, over).ratio for turn in turns]
            yield record | {"ratios": [round(ratio, 4) for ratio in ratios]}
        else:
            yield None
        number += 1


def status_of(found: Estimate, rounds: int, sure_above: float) -> str:
    """ "reached", "far above" its bar, so that more turns would change no verdict, or so far "missed"."""
    if rounds >= LEAST_ROUNDS and found.half_width <= HALF_WIDTH:
        return "reached"
    far = found.low > sure_above and found.half_width <= HALF_WIDTH * found.ratio
    return "far above" if rounds >= LEAST_ROUNDS and far else "missed"


def compared(turns: Sequence[Turn]) -> Found:
    return {
        "greedy_compared": sum(turn.compared for turn in turns),
        "greedy_different": sum(turn.different for turn in turns),
    }


def begin(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Visits:
    """Visits of a cell, of the record of the cell that it needs; they raise TruedraftError where it cannot be made."""
    return sweep(lab, cell) if cell.row == "sweep" else rounds(lab, cell, before)
