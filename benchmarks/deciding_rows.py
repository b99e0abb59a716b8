"""How each row of `make bench-deciding` is measured: which systems take turns on which requests."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common import heldout_texts
from deciding_cells import Cell, SkippedError
from deciding_load import Neighbour, Stream, watch
from deciding_sets import MIX, NEW_TOKENS, PROSE, Asked, groups_of, prompt_sets
from deciding_sweep import NONE, best, coarse, finer
from truedraft import Engine, load_model
from truedraft.bench.turns import Answered, Contest, Stop, estimate, one_round, ratios
from truedraft.control import Controller, FixedBudget
from truedraft.costs.bandwidth import read_bandwidth
from truedraft.engine import StepRecord
from truedraft.errors import ModelError
from truedraft.models.base import LanguageModel
from truedraft.planning.predictions import ratio_over_prompts

PLAIN, DEFAULT, HEURISTIC, PORTFOLIO = "plain", "default", "heuristic", "portfolio"
LONG_DRAFT = "draft,num_speculative_tokens=12"
MEMBERS = ("draft", "prompt-lookup")
_WARM_UP_TOKENS = 8
_MOST_SLOTS = 32
_WAITING = 4  # times as many requests as run together, of row s
_SWEPT_GROUPS = {1: 4, 4: 2}  # by batch, one for larger ones
_MIXED_GROUPS = 5  # of a pass at batch 1: one of each domain
_PLAN_S = 600.0
# A cell whose interval lies this far above its bar need not be known to 0.02.
_SURE_ABOVE = {("c", MIX): 1.15, ("d", MIX): 1.15, ("h", 8): 1.5, ("h", 16): 1.25}


class EngineSystem:
    """One of our engines as a system that takes turns.

    Args:
        name: in the turns.
        engine: that answers.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def answer(self, group: Sequence[Asked]) -> Answered:
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
        self._sets: dict[str, list[Asked]] = {}
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

    def asked(self, cell: Cell) -> list[Asked]:
        """The requests of a cell's set."""
        if not self._sets:
            target = self.target(cell.size)
            assert target.tokenizer is not None
            prose = PROSE.read_text(encoding="utf-8")
            self._sets = prompt_sets(heldout_texts(), prose, target.tokenizer.encode, target.vocab_size)
        asked = self._sets[cell.set]
        if cell.temperature is None:
            return asked
        return [_at(each, cell.temperature) for each in asked]

    def groups(self, cell: Cell) -> list[list[Asked]]:
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


def _at(asked: Asked, temperature: float) -> Asked:
    return dataclasses.replace(asked, params=dataclasses.replace(asked.params, temperature=temperature))


Found = dict[str, Any]


def sweep(lab: Lab, cell: Cell, most_s: float) -> Found:
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


def _warm_up(systems: Sequence[EngineSystem], group: Sequence[Asked]) -> None:
    short = [
        dataclasses.replace(asked, params=dataclasses.replace(asked.params, max_tokens=_WARM_UP_TOKENS))
        for asked in group
    ]
    for system in systems:
        system.answer(short)


def contest(lab: Lab, cell: Cell, of: EngineSystem, over: Sequence[EngineSystem]) -> Contest:
    """Let a system take turns with others."""
    stop = Stop(_SURE_ABOVE.get((cell.row, cell.set), _SURE_ABOVE.get((cell.row, cell.batch), 1.10)))
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


def default_against_plain(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row a."""
    return contest(lab, cell, lab.learning(cell.size, "auto", DEFAULT), [lab.plain(cell.size)])


def default_against_best(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row b; the best of the sweep is measured again, or it would be the luckiest."""
    assert before is not None
    return contest(
        lab, cell, lab.learning(cell.size, "auto", DEFAULT), [lab.fixed(cell.size, before["best"], before["best"])]
    )


def default_against_heuristic(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row c; the heuristic starts at 5 tokens and knows no end, so the draft may be long."""
    heuristic = lab.learning(cell.size, LONG_DRAFT, HEURISTIC, "heuristic")
    return contest(lab, cell, lab.learning(cell.size, LONG_DRAFT, DEFAULT), [heuristic])


def portfolio_against_members(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row d."""
    portfolio = lab.learning(cell.size, f"portfolio({';'.join(MEMBERS)})", PORTFOLIO)
    return contest(lab, cell, portfolio, [lab.learning(cell.size, each, each) for each in MEMBERS])


def through_slots(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row s: what a server does, where requests wait for those that run."""
    asked = lab.asked(cell)
    group = [asked[number % len(asked)] for number in range(_WAITING * cell.batch)]
    default = lab.learning(cell.size, "auto", DEFAULT, slots=cell.batch)
    plain = lab.learning(cell.size, NONE, PLAIN, FixedBudget(), slots=cell.batch)
    return Contest([default, plain], [group], [(DEFAULT, PLAIN)], Stop(1.10), lab.clock)


def large_batches(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> Contest:
    """Row h."""
    return contest(lab, cell, lab.learning(cell.size, "draft", DEFAULT), [lab.plain(cell.size)])


def plan_kept(lab: Lab, cell: Cell, most_s: float) -> Found:
    """Row e: asks the command itself, which predicts from three prompts in four and measures on the fourth.

    It answers all prompts in one way, so `mix` has the prompts of all domains, answered greedily.

    Raises:
        SkippedError: there is no such command yet, or it failed, or does not say what it predicted and measured.
    """
    command = [sys.executable, "-m", "truedraft", "plan"]
    if subprocess.run([*command, "--help"], capture_output=True, check=False).returncode != 0:
        raise SkippedError("this version has no `truedraft plan`")
    asked = lab.asked(cell)
    sampling = asked[0].params
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"id": str(number), "prompt": list(each.prompt)}) for number, each in enumerate(asked)]
        file.write_text("\n".join(lines) + "\n")
        words = ["--prompts", str(file), "--json", "--max-tokens", str(NEW_TOKENS), "--ignore-eos"]
        words += ["--temperature", str(sampling.temperature), "--threads", str(torch.get_num_threads())]
        words += ["--dtype", "bfloat16"]
        words += [] if cell.size == "own" else ["--pad-to", cell.size]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=_PLAN_S, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise SkippedError(f"`truedraft plan` ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return plan_record(json.loads(done.stdout.splitlines()[-1]))


def plan_record(told: Mapping[str, Any]) -> Found:
    """What a cell's line says of what `truedraft plan --json` printed: its `check`, on prompts that it had not seen.

    Raises:
        SkippedError: it does not hold what it predicted and measured.
    """
    check = told.get("check") or {}
    predicted, measured = check.get("predicted_speedup"), check.get("speedup")
    if not predicted or not measured:
        raise SkippedError("`truedraft plan --json` printed no predicted_speedup and speedup in its check")
    ratio, low, high = (round(measured[name] / predicted["value"], 4) for name in ("value", "low", "high"))
    return {
        "predicted": round(predicted["value"], 4),
        "measured": round(measured["value"], 4),
        "recommended": told.get("recommended"),
        "ratio": ratio,
        "low": low,
        "high": high,
        "half_width": round((high - low) / 2, 4),
        "status": "reached",
    }


def beside_a_neighbour(lab: Lab, cell: Cell, most_s: float) -> Found:
    """Row f."""
    asked = lab.asked(cell)
    default, plain = lab.learning(cell.size, "auto", DEFAULT), lab.plain(cell.size)
    bandwidth = read_bandwidth()
    streams = [Stream(each.engine, asked, lab.clock) for each in (default, plain)]
    with Neighbour(bandwidth / 2) as neighbour:

        def begin(phase: str) -> None:
            if phase == "loaded":
                neighbour.come()
            else:
                neighbour.leave()
            for stream in streams:
                stream.restart()

        try:
            windows = watch([stream.run for stream in streams], begin, most_s, lab.clock)
            taken = neighbour.bytes_per_s()
        finally:
            for stream in streams:
                stream.close()
    return windows.as_dict() | {
        "status": "reached",
        "bandwidth_bytes_per_s": round(bandwidth),
        "neighbour_bytes_per_s": round(taken),
    }


def deciding(lab: Lab, cell: Cell, most_s: float) -> Found:
    """Row g: what the controller takes of the steps that decode."""
    default = lab.learning(cell.size, "auto", DEFAULT)
    groups = lab.groups(cell)
    costs = _listen(default.engine)
    began, number, first = lab.clock(), 0, 0
    while number < 2 or lab.clock() - began < most_s:
        for group in groups:
            default.answer(group)
        first = len(costs) if number == 0 else first
        number += 1
    return cost_summary(costs[first:], cell.batch)


def _listen(engine: Engine) -> list[tuple[float, float, int]]:
    """Of each decoding step to come: seconds of deciding and observing, of the whole step, and its requests."""
    controller = _controller_of(engine)
    observe = controller.observe
    costs: list[tuple[float, float, int]] = []
    observing_s = [0.0]  # since the last step; in some steps nobody is told anything

    def timed(record: StepRecord) -> None:
        began = time.perf_counter()
        observe(record)
        observing_s[0] += time.perf_counter() - began

    def listen(record: StepRecord) -> None:
        observe_s, observing_s[0] = observing_s[0], 0.0
        if not record.prefill:
            costs.append((record.decide_s + observe_s, record.total_s + observe_s, len(record.requests)))

    controller.observe = timed  # type: ignore[method-assign]
    engine.listeners.append(listen)
    return costs


def _controller_of(engine: Engine) -> Controller:
    """The controller that an engine made itself; it has no public name for it."""
    found = getattr(engine, "controller", None) or getattr(getattr(engine, "_drafting", None), "_controller", None)
    if not isinstance(found, Controller):
        raise SkippedError("the engine's controller is not where this script looks for it, engine/drafting.py")
    return found


def cost_summary(costs: Sequence[tuple[float, float, int]], batch: int) -> Found:
    """The share of time that deciding takes, its seconds a step, and the interval of the mean over parts of the run.

    Args:
        costs: of each step the seconds of deciding, of the step, and its requests.
        batch: requests at once.
    """
    # Neighbouring steps are not independent of each other, so stretches of them are drawn again.
    size = max(1, len(costs) // 20)
    parts = [costs[first : first + size] for first in range(0, len(costs), size)]
    deciding_s, steps_s = ([math.fsum(each[kind] for each in part) for part in parts] for kind in (0, 1))
    share = ratio_over_prompts(deciding_s, steps_s)
    return {
        "share": round(share.value, 5),
        "low": round(share.low, 5),
        "high": round(share.high, 5),
        "per_step_s": statistics.fmean(each[0] for each in costs),
        "per_step_median_s": statistics.median(each[0] for each in costs),
        "step_s": statistics.fmean(each[1] for each in costs),
        "requests": round(statistics.fmean(each[2] for each in costs), 2),
        "steps": len(costs),
        "status": "reached",
    }


CONTESTS: Mapping[str, Callable[[Lab, Cell, Mapping[str, Any] | None], Contest]] = {
    "a": default_against_plain,
    "b": default_against_best,
    "c": default_against_heuristic,
    "d": portfolio_against_members,
    "s": through_slots,
    "h": large_batches,
}
"""Rows that are ratios, from the models, the cell, and the record of the cell that it needs."""

MEASURES: Mapping[str, Callable[[Lab, Cell, float], Found]] = {
    "sweep": sweep,
    "e": plan_kept,
    "f": beside_a_neighbour,
    "g": deciding,
}
"""Rows that are measured at one go, in so many seconds."""


class OneVisit:
    """A cell that is measured at one go."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self._lab, self._cell = lab, cell

    @property
    def next_s(self) -> float:
        """Seconds that the next visit will take."""
        return self._cell.share_s

    def visit(self, most_s: float, left_s: float) -> Found | None:
        """Measure it."""
        return MEASURES[self._cell.row](self._lab, self._cell, min(most_s, left_s))


class Rounds:
    """A cell that is measured a round at a time."""

    def __init__(self, contest: Contest) -> None:
        self._contest, self.next_s = contest, 0.0

    def visit(self, most_s: float, left_s: float) -> Found | None:
        """One more round; what came of all, where it was the last."""
        before = self._contest.measured.seconds
        over = self._contest.visit(most_s)
        self.next_s = self._contest.measured.seconds - before
        return of_contest(self._contest) if over else None


def begin(lab: Lab, cell: Cell, before: Mapping[str, Any] | None) -> OneVisit | Rounds:
    """Make what a cell needs.

    Raises:
        SkippedError: this version has not got it.
    """
    lab.target(cell.size)
    return Rounds(CONTESTS[cell.row](lab, cell, before)) if cell.row in CONTESTS else OneVisit(lab, cell)
