"""Costs of this machine for a benchmark: predicted seconds of each step, and the bytes that it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from truedraft.core.params import SamplingParams
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.engine.policy import StepCosts, drafter_cost, read_bandwidth, target_cost
from truedraft.engine.policy.sizes import outdated, sized
from truedraft.errors import OptionError
from truedraft.measure import Footprint, footprint_of
from truedraft.measure.bench.runs import CurveCosts
from truedraft.measure.bench.suite import Suite
from truedraft.models.base import LanguageModel
from truedraft.progress import Progress

PARTS = 100  # progress units of one curve

_MIXTURES = ("num_local_experts", "num_experts", "n_routed_experts")
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_CONTEXTS = (128, 512, 1024)


def reads_alike(model: LanguageModel) -> bool:
    """Whether the bytes of a forward are known and independent of its tokens; windows of attention are ignored."""
    config = getattr(getattr(model, "module", None), "config", None)
    return (
        bool(model.weight_bytes)
        and config is not None
        and not any(getattr(config.get_text_config(), name, None) for name in _MIXTURES)
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """The inputs of memory bandwidth utilisation; `bandwidth` is this machine's, in bytes per second read."""

    bandwidth: float
    target: Footprint
    draft: Footprint | None = None


@dataclass(slots=True)
class MachineCosts:
    """Measurements of this machine before a benchmark; `points` are of the curve V: rows, context and seconds."""

    bandwidth: float | None = None
    points: list[dict[str, float]] = field(default_factory=list)
    by_name: dict[str, CurveCosts] = field(default_factory=dict)
    kept: bool = False
    warnings: list[str] = field(default_factory=list)

    def memory(self, suite: Suite) -> dict[str, Memory]:
        if self.bandwidth is None or not reads_alike(suite.target):
            return {}
        target = footprint_of(suite.target)
        drafts = {each.name: each.draft_model for each in suite.ours}
        drafts |= {each.name: suite.assistant for each in suite.peers}  # their draft forwards are counted as well
        reads = {name: Footprint(each.weight_bytes) for name, each in drafts.items() if each and reads_alike(each)}
        return {name: Memory(self.bandwidth, target, reads.get(name)) for name in drafts}


def measure_costs(suite: Suite, params: SamplingParams, progress: Progress, *, refresh: bool = False) -> MachineCosts:
    """Read bandwidth, the curve V of the target and the cost of each drafter: stored ones, or measured now.

    Drafters without a fixed number of nodes get the fastest number for V, with a note in the suite, unless a controller
    weighs costs itself. `progress` is called with parts done, `PARTS` for each of our engines, and the name of the
    measurement. Raises TruedraftError if a model or drafter failed.
    """
    measured = MachineCosts()
    progress(0, "reading memory")
    try:
        measured.bandwidth = read_bandwidth(suite.target.device)
    except OptionError as error:
        measured.warnings.append(f"{error}; without it there is no use of memory bandwidth")
    forwards = target_cost(suite.target, progress=_part(progress, 0), refresh=refresh)
    measured.warnings += forwards.warnings
    if forwards.kept and (why := outdated(suite.ours[0].engine, forwards.value)):
        measured.warnings.append(why)
        refresh = True
        forwards = target_cost(suite.target, progress=_part(progress, 0), refresh=True)
    measured.kept = forwards.kept
    measured.points = shown_points(forwards.value, suite.target.context_length)
    size_trees(suite, forwards.value, params, refresh=refresh)
    for number, each in enumerate(suite.ours):
        drafting: dict[str, DraftCost] = {}
        members = each.engine.drafter.members if number else {}  # the first is plain decoding
        for place, (name, member) in enumerate(members.items()):
            part = _part(progress, number, place / len(members), 1 / len(members))
            found = drafter_cost(member, suite.target, params=params, progress=part, refresh=refresh)
            measured.warnings += found.warnings
            measured.kept |= found.kept
            drafting[name] = found.value
        measured.by_name[each.name] = CurveCosts(forwards.value, drafting)
        each.engine.measure(params)
    progress(len(suite.ours) * PARTS, "")
    return measured


def _part(progress: Progress, number: int, first: float = 0.0, share: float = 1.0) -> Progress:
    return lambda done, label: progress(number * PARTS + int(PARTS * (first + share * done)), label)


def shown_points(target: TargetCost, context_length: int) -> list[dict[str, float]]:
    """Points of the curve V for plots and records: rows, context and seconds, up to the target's context length."""
    contexts = [context for context in _SHOWN_CONTEXTS if context + _SHOWN_ROWS[-1] <= context_length]
    return [
        {"rows": rows, "context": context, "seconds": target(rows, (context,))}
        for context in contexts or [max(1, context_length // 2)]
        for rows in _SHOWN_ROWS
        if rows < context_length // 2
    ]


def size_trees(suite: Suite, forwards: TargetCost, params: SamplingParams, *, refresh: bool = False) -> None:
    """Set the number of nodes of drafters without a fixed one to the fastest, and add a note on each, except for
    engines with a controller that weighs costs. Raises TruedraftError if target or drafter failed.
    """
    for each in suite.ours:
        if each.engine.controller.weighs_costs:
            continue
        costs = StepCosts(suite.target, forwards=forwards, refresh=refresh)
        drafter, budgets = sized(each.engine.drafter, suite.target, params, requests=suite.batch, costs=costs)
        if budgets:
            suite.redraft(each, drafter)
            notes = [f"{each.title_of(name)}: {budget.describe()}" for name, budget in budgets.items()]
            suite.notes += [*costs.warnings, *notes]
