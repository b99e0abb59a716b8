"""How each row of `make bench-deciding` is measured: which systems take turns on which requests."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from common import heldout_texts
from deciding_cells import Cell
from deciding_sets import MIX, PROSE, SetRequest, groups_of, prompt_sets
from truedraft import Engine, load_model
from truedraft.engine.policy import FixedBudget
from truedraft.errors import ModelError
from truedraft.measure.bench import OurEngine
from truedraft.models.base import LanguageModel
from turns import Answered, Contest, Stop, estimate, one_round, ratios

NONE, PLAIN, DEFAULT, HEURISTIC = "none", "plain", "default", "heuristic"
LONG_DRAFT = "draft,num_speculative_tokens=12"
_WARM_UP_TOKENS = 8
_MOST_SLOTS = 32
_SWEPT_GROUPS = {1: 4, 4: 2}  # by batch, one for larger ones
_MIXED_GROUPS = 5  # of a pass at batch 1: one of each domain
# A cell whose interval lies this far above its bar need not be known to 0.02.
_SURE_ABOVE = {("c", MIX): 1.15}

GRID: Mapping[str, Sequence[int]] = {
    "draft,num_speculative_tokens=": (1, 2, 3, 4, 6, 8),
    "prompt-lookup,num_speculative_tokens=": (2, 4, 8),
    "medusa,nodes=": (4, 8, 16),
    "redrafter,beams=4,length=4,nodes=": (4, 8, 16),
}
"""Words of each family, with the numbers behind them."""
_COARSE: Mapping[str, Sequence[int]] = dict(zip(GRID, ((2, 6), (4,), (8,), (8,)), strict=True))


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
        self.clock: Callable[[], float] = time.perf_counter
        self._size = ""
        self._target: LanguageModel | None = None
        self._sets: dict[str, list[SetRequest]] = {}
        self._fixed: dict[str, EngineSystem] = {}

    def target(self, size: str) -> LanguageModel:
        """The embedded target at a size; that of another one is dropped."""
        if self._target is None or size != self._size:
            self._target, self._fixed = None, {}
            gc.collect()
            self._target = load_model("embedded:target", dtype="bfloat16", pad_to=None if size == "own" else size)
            gc.freeze()  # a full collection would look through all that is loaded, in the turn of whoever it meets
            self._size = size
        return self._target

    def asked(self, cell: Cell) -> list[SetRequest]:
        if not self._sets:
            target = self.target(cell.size)
            assert target.tokenizer is not None
            prose = PROSE.read_text(encoding="utf-8")
            self._sets = prompt_sets(heldout_texts(), prose, target.tokenizer.encode, target.vocab_size)
        return self._sets[cell.set]

    def groups(self, cell: Cell) -> list[list[SetRequest]]:
        return groups_of(cell.set, self.asked(cell), cell.batch, few=cell.size == "500M")

    def plain(self, size: str) -> EngineSystem:
        """Plain decoding, which learns nothing: one engine for all cells of a size."""
        return self.fixed(size, NONE, PLAIN)

    def fixed(self, size: str, words: str, name: str | None = None) -> EngineSystem:
        target = self.target(size)
        if words not in self._fixed:
            self._fixed[words] = EngineSystem(words, Engine(target, words, controller=FixedBudget()))
        return EngineSystem(name or words, self._fixed[words].engine)

    def learning(self, size: str, words: str, name: str, controller: Any = None) -> EngineSystem:
        """An engine that nobody used before, whose controller learns from this cell alone.

        Raises:
            TruedraftError: there is no such drafter or controller yet.
        """
        return EngineSystem(name, Engine(self.target(size), words, None, controller, max_batch=_MOST_SLOTS))


Found = dict[str, Any]


# ------------------------------------------------------------------ fixed configurations: few of each family, then more


def coarse(*, heads: bool) -> list[str]:
    """What is tried first; heads where a call of the target costs enough that they may pay."""
    families = list(GRID) if heads else list(GRID)[:2]
    return [f"{family}{number}" for family in families for number in _COARSE[family]]


def finer(speedups: Mapping[str, float], families: int) -> list[str]:
    """What is tried next: around the best number of each of the best families, up to those that were tried.

    Worked example: of draft chains 2 and 6 were tried; if 2 was the better, 1, 3 and 4 follow, else 3, 4 and 8.
    """
    best = sorted(_best_of_families(speedups), key=lambda words: -speedups[words])[:families]
    return [words for middle in best for words in _around(middle, speedups)]


def _best_of_families(speedups: Mapping[str, float]) -> Iterable[str]:
    for family in GRID:
        tried = [words for words in speedups if words.startswith(family)]
        if tried:
            yield max(tried, key=lambda words: speedups[words])


def _around(words: str, tried: Mapping[str, float]) -> list[str]:
    family = next(family for family in GRID if words.startswith(family))
    grid = [f"{family}{number}" for number in GRID[family]]
    place = grid.index(words)
    below, above = grid[:place][::-1], grid[place + 1 :]
    found = []
    for side in (below, above):
        for other in side:
            if other in tried:
                break
            found.append(other)
    return sorted(found, key=grid.index)


def best(speedups: Mapping[str, float]) -> str:
    """The fastest; `none`, plain decoding, where nothing exceeds 1."""
    words = max(speedups, key=lambda words: speedups[words], default=NONE)
    return words if words != NONE and speedups[words] > 1.0 else NONE


def sweep(lab: Lab, cell: Cell) -> Found:
    """Speed-ups of fixed configurations over plain decoding, one pass over some groups; no interval."""
    most = _MIXED_GROUPS if cell.set == MIX and cell.batch == 1 else _SWEPT_GROUPS.get(cell.batch, 1)
    groups = lab.groups(cell)[:most]
    speedups: dict[str, float] = {}
    compared = different = 0
    for words in (coarse(heads=cell.size != "own"), None):
        tried = words or finer(speedups, 2 if cell.batch == 1 else 1)
        if not tried:
            continue
        systems = [lab.plain(cell.size), *(lab.fixed(cell.size, each) for each in tried)]
        _warm_up(systems, groups[0])
        turns = one_round(systems, groups, 0, lab.clock)
        speedups |= {each: estimate(turns, each, PLAIN).ratio for each in tried}
        compared += sum(turn.compared for turn in turns)
        different += sum(turn.different for turn in turns)
    shown = {words: round(value, 4) for words, value in speedups.items()}
    return {
        "speedups": shown,
        "best": best(shown),
        "groups": len(groups),
        "status": "reached",
        "greedy_compared": compared,
        "greedy_different": different,
    }


def _warm_up(systems: Sequence[EngineSystem], group: Sequence[SetRequest]) -> None:
    short = [
        dataclasses.replace(asked, params=dataclasses.replace(asked.params, max_tokens=_WARM_UP_TOKENS))
        for asked in group
    ]
    for system in systems:
        system.answer(short)


def systems_of(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> list[EngineSystem]:
    """The default, and what it is held against, of the record of the cell that it needs.

    The heuristic of row c starts at 5 tokens and knows no end, so the draft may be long. In row b the best of the sweep
    is measured again, or it would be the luckiest.
    """
    if cell.row == "c":
        heuristic = lab.learning(cell.size, LONG_DRAFT, HEURISTIC, "heuristic")
        return [lab.learning(cell.size, LONG_DRAFT, DEFAULT), heuristic]
    other = lab.plain(cell.size) if before is None else lab.fixed(cell.size, before["best"], before["best"])
    return [lab.learning(cell.size, "auto", DEFAULT), other]


class Sweep:
    def __init__(self, lab: Lab, cell: Cell) -> None:
        self._lab, self._cell, self._found = lab, cell, None

    def visit(self, most_s: float) -> bool:
        self._found = sweep(self._lab, self._cell)
        return True

    def record(self) -> Found | None:
        return self._found


class Rounds:
    def __init__(self, lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> None:
        systems = systems_of(lab, cell, before)
        self._of, self._over = (each.name for each in systems)
        stop = Stop(_SURE_ABOVE.get((cell.row, cell.set), 1.10))
        self._contest = Contest(systems, lab.groups(cell), [(self._of, self._over)], stop, lab.clock)

    def visit(self, most_s: float) -> bool:
        return self._contest.visit(most_s)

    def record(self) -> Found | None:
        measured, pair = self._contest.measured, (self._of, self._over)
        if not measured.turns:
            return None
        decoding = estimate(measured.turns, *pair, decoding=True)
        record = estimate(measured.turns, *pair).as_dict() | {"of": self._of, "over": self._over}
        return record | measured.as_dict() | {"decoding": decoding.as_dict(), "ratios": ratios(measured.turns, *pair)}


def begin(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Sweep | Rounds:
    """Make what a cell needs.

    Raises:
        TruedraftError: there is no such drafter or controller.
    """
    lab.target(cell.size)
    return Sweep(lab, cell) if cell.row == "sweep" else Rounds(lab, cell, before)
