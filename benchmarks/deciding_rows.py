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
from truedraft.bench.turns import Answered, Contest, Stop, estimate, one_round, ratios
from truedraft.control import FixedBudget
from truedraft.engine import StepRecord
from truedraft.errors import ModelError
from truedraft.models.base import LanguageModel

NONE, PLAIN, DEFAULT, HEURISTIC, PORTFOLIO = "none", "plain", "default", "heuristic", "portfolio"
LONG_DRAFT = "draft,num_speculative_tokens=12"
MEMBERS = ("draft", "prompt-lookup")
_WARM_UP_TOKENS = 8
_MOST_SLOTS = 32
_WAITING = 4  # times as many requests as run together, of row s
_SWEPT_GROUPS = {1: 4, 4: 2}  # by batch, one for larger ones
_MIXED_GROUPS = 5  # of a pass at batch 1: one of each domain
# A cell whose interval lies this far above its bar need not be known to 0.02.
_SURE_ABOVE = {("c", MIX): 1.15, ("d", MIX): 1.15}

GRID: Mapping[str, Sequence[int]] = {
    "draft,num_speculative_tokens=": (1, 2, 3, 4, 6, 8),
    "prompt-lookup,num_speculative_tokens=": (2, 4, 8),
    "medusa,nodes=": (4, 8, 16),
    "redrafter,beams=4,length=4,nodes=": (4, 8, 16),
}
"""Words of each family, with the numbers behind them."""
_COARSE: Mapping[str, Sequence[int]] = dict(zip(GRID, ((2, 6), (4,), (8,), (8,)), strict=True))


class EngineSystem:
    """One of our engines as a system that takes turns.

    Args:
        name: in the turns.
        engine: that answers.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def answer(self, group: Sequence[SetRequest]) -> Answered:
        """Answer a group together.

        Raises:
            ModelError: a request failed.
        """
        prefill_s: list[float] = []

        def listen(record: StepRecord) -> None:
            if record.prefill:
                prefill_s.append(record.total_s)

        self.engine.listeners.append(listen)
        try:
            answers = self.engine.generate([list(asked.prompt) for asked in group], [asked.params for asked in group])
        finally:
            self.engine.listeners.remove(listen)
        broken = next((answer.error for answer in answers if answer.error is not None), None)
        if broken is not None:
            raise ModelError(broken)
        greedy = [number for number, asked in enumerate(group) if asked.params.greedy]
        return Answered([answer.token_ids for answer in answers], sum(prefill_s), greedy)


class Lab:
    """The target at one size at a time, engines around it, and the prompt sets."""

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
        """The requests of a cell's set."""
        if not self._sets:
            target = self.target(cell.size)
            assert target.tokenizer is not None
            prose = PROSE.read_text(encoding="utf-8")
            self._sets = prompt_sets(heldout_texts(), prose, target.tokenizer.encode, target.vocab_size)
        return self._sets[cell.set]

    def groups(self, cell: Cell) -> list[list[SetRequest]]:
        """What is answered together."""
        return groups_of(cell.set, self.asked(cell), cell.batch, few=cell.size == "500M")

    def plain(self, size: str) -> EngineSystem:
        """Plain decoding, which learns nothing: one engine for all cells of a size."""
        return self.fixed(size, NONE, PLAIN)

    def fixed(self, size: str, words: str, name: str | None = None) -> EngineSystem:
        """A drafter that always drafts the same; likewise."""
        target = self.target(size)
        if words not in self._fixed:
            self._fixed[words] = EngineSystem(words, Engine(target, words, controller=FixedBudget()))
        return EngineSystem(name or words, self._fixed[words].engine)

    def learning(
        self, size: str, words: str, name: str, controller: Any = None, slots: int = _MOST_SLOTS
    ) -> EngineSystem:
        """An engine that nobody used before, whose controller learns from this cell alone.

        Args:
            size: of the target.
            words: for its drafter.
            name: of the system.
            controller: None is the default.
            slots: requests that run together; others wait.

        Raises:
            TruedraftError: there is no such drafter or controller yet.
        """
        return EngineSystem(name, Engine(self.target(size), words, None, controller, max_batch=slots))


Found = dict[str, Any]


# ------------------------------------------------------------------ fixed configurations: few of each family, then more


def coarse(*, heads: bool) -> list[str]:
    """What is tried first; heads where a call of the target costs enough that they may pay."""
    families = list(GRID) if heads else list(GRID)[:2]
    return [f"{family}{number}" for family in families for number in _COARSE[family]]


def finer(speedups: Mapping[str, float], families: int) -> list[str]:
    """What is tried next: around the best number of each of the best families, up to those that were tried.

    Worked example: of draft chains 2 and 6 were tried; if 2 was the better, 1, 3 and 4 follow, else 3, 4 and 8.

    Args:
        speedups: of what was tried, by its words.
        families: how many of them.
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


def contest(lab: Lab, cell: Cell, of: EngineSystem, over: Sequence[EngineSystem]) -> Contest[list[SetRequest]]:
    """Let a system take turns with others."""
    stop = Stop(_SURE_ABOVE.get((cell.row, cell.set), 1.10))
    return Contest([of, *over], lab.groups(cell), [(of.name, other.name) for other in over], stop, lab.clock)


def of_contest(contest: Contest) -> Found:
    """What a cell's line says of turns: the ratio to the fastest of the others, and to each if there are several."""
    turns = contest.measured.turns
    found = {other: estimate(turns, name, other) for name, other in contest.pairs}
    hardest = min(found, key=lambda other: found[other].ratio)
    name = contest.pairs[0][0]
    decoding = estimate(turns, name, hardest, decoding=True)
    record = found[hardest].as_dict() | {"of": name, "over": hardest, "decoding": decoding.as_dict()}
    if len(found) > 1:
        record["each"] = {other: each.as_dict() for other, each in found.items()}
    return record | contest.measured.as_dict() | {"ratios": ratios(turns, name, hardest)}


def default_against_plain(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest[list[SetRequest]]:
    """Row a."""
    return contest(lab, cell, lab.learning(cell.size, "auto", DEFAULT), [lab.plain(cell.size)])


def default_against_best(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest[list[SetRequest]]:
    """Row b; the best of the sweep is measured again, or it would be the luckiest."""
    assert before is not None
    return contest(
        lab, cell, lab.learning(cell.size, "auto", DEFAULT), [lab.fixed(cell.size, before["best"], before["best"])]
    )


def default_against_heuristic(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest[list[SetRequest]]:
    """Row c; the heuristic starts at 5 tokens and knows no end, so the draft may be long."""
    heuristic = lab.learning(cell.size, LONG_DRAFT, HEURISTIC, "heuristic")
    return contest(lab, cell, lab.learning(cell.size, LONG_DRAFT, DEFAULT), [heuristic])


def portfolio_against_members(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest[list[SetRequest]]:
    """Row d."""
    portfolio = lab.learning(cell.size, f"portfolio({';'.join(MEMBERS)})", PORTFOLIO)
    return contest(lab, cell, portfolio, [lab.learning(cell.size, each, each) for each in MEMBERS])


def through_slots(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest[list[SetRequest]]:
    """Row s: what a server does, where requests wait for those that run."""
    asked = lab.asked(cell)
    group = [asked[number % len(asked)] for number in range(_WAITING * cell.batch)]
    default = lab.learning(cell.size, "auto", DEFAULT, slots=cell.batch)
    plain = lab.learning(cell.size, NONE, PLAIN, FixedBudget(), slots=cell.batch)
    return Contest([default, plain], [group], [(DEFAULT, PLAIN)], Stop(1.10), lab.clock)


CONTESTS: Mapping[str, Callable[[Lab, Cell, Mapping[str, Any] | None], Contest[list[SetRequest]]]] = {
    "a": default_against_plain,
    "b": default_against_best,
    "c": default_against_heuristic,
    "d": portfolio_against_members,
    "s": through_slots,
}
"""Rows that are ratios, from the models, the cell, and the record of the cell that it needs."""


class Sweep:
    """A cell that is measured at one go."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self._lab, self._cell, self._found = lab, cell, None

    def visit(self, most_s: float) -> bool:
        """Measure it."""
        self._found = sweep(self._lab, self._cell)
        return True

    def record(self) -> Found | None:
        """What came of it."""
        return self._found


class Rounds:
    """A cell that is measured a round at a time."""

    def __init__(self, contest: Contest[list[SetRequest]]) -> None:
        self._contest = contest

    def visit(self, most_s: float) -> bool:
        """One more round."""
        return self._contest.visit(most_s)

    def record(self) -> Found | None:
        """What came of all rounds that count."""
        return of_contest(self._contest) if self._contest.measured.turns else None


def begin(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Sweep | Rounds:
    """Make what a cell needs.

    Raises:
        TruedraftError: there is no such drafter or controller.
    """
    lab.target(cell.size)
    return Rounds(CONTESTS[cell.row](lab, cell, before)) if cell.row in CONTESTS else Sweep(lab, cell)
