"""What this machine costs, as a benchmark uses it: what each step should take, and how many bytes it has to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from truedraft.core.params import SamplingParams
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.engine.policy import drafter_cost, read_bandwidth, target_cost
from truedraft.errors import OptionError
from truedraft.measure import Footprint, footprint_of, outdated
from truedraft.measure.bench.breakdown import CurveCosts
from truedraft.measure.bench.suite import Suite
from truedraft.measure.bench.trees import size_trees
from truedraft.models.base import LanguageModel
from truedraft.progress import Progress

PARTS = 100
"""What the progress of one curve is counted in."""

_MIXTURES = ("num_local_experts", "num_experts", "n_routed_experts")
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_CONTEXTS = (128, 512, 1024)


def reads_alike(model: LanguageModel) -> bool:
    """Whether it is known what a forward reads, and does not depend on its tokens, as that of a mixture of experts.

    Windows of attention are not looked at: with one, the cached tokens that it leaves out are counted too.
    """
    config = getattr(getattr(model, "module", None), "config", None)
    return (
        bool(model.weight_bytes)
        and config is not None
        and not any(getattr(config.get_text_config(), name, None) for name in _MIXTURES)
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What memory bandwidth used is computed from.

    Attributes:
        bandwidth: read bandwidth of this machine in bytes per second.
        target: what a forward of the target reads.
        draft: what a forward of the draft model reads; None without one.
    """

    bandwidth: float
    target: Footprint
    draft: Footprint | None = None


@dataclass(slots=True)
class MachineCosts:
    """What was measured of this machine before a benchmark.

    Attributes:
        bandwidth: of reading memory, in bytes per second; None where it was not measured.
        points: of the curve V of the target, for plots and records: rows, context and seconds.
        by_name: for each of our engines what its steps should cost.
        kept: whether a curve is of an earlier run.
        warnings: about curves that were kept and could not be used, a sentence each.
    """

    bandwidth: float | None = None
    points: list[dict[str, float]] = field(default_factory=list)
    by_name: dict[str, CurveCosts] = field(default_factory=dict)
    kept: bool = False
    warnings: list[str] = field(default_factory=list)

    def memory(self, suite: Suite) -> dict[str, Memory]:
        """What use of memory bandwidth is computed from, for each system."""
        if self.bandwidth is None or not reads_alike(suite.target):
            return {}
        target = footprint_of(suite.target)
        drafts = {each.name: each.draft_model for each in suite.ours}
        drafts |= {each.name: suite.assistant for each in suite.peers}  # their draft forwards are counted as well
        return {
            name: Memory(
                self.bandwidth, target, Footprint(model.weight_bytes) if model and reads_alike(model) else None
            )
            for name, model in drafts.items()
        }


def measure_costs(suite: Suite, params: SamplingParams, progress: Progress, *, refresh: bool = False) -> MachineCosts:
    """Read bandwidth, the curve V of the target and the cost of each drafter: kept ones, else measured now.

    Drafters whose number of nodes was left open get as many as V favours, and the suite's notes say how many, unless a
    controller weighs costs itself: that measures now what it would measure at the first request.

    Args:
        suite: whose engines are to be predicted; they do not run meanwhile.
        params: sampling options of the benchmark; drawing is a part of what drafting costs.
        progress: is called with parts done, `PARTS` for each of our engines, and what is being measured.
        refresh: measure although kept curves would do; those may be of a moment when the machine was busy.

    Raises:
        TruedraftError: a model or drafter failed.
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
    """The progress of one curve as a share of those of one engine, behind those that come first."""

    return lambda done, label: progress(number * PARTS + int(PARTS * (first + share * done)), label)


def shown_points(target: TargetCost, context_length: int) -> list[dict[str, float]]:
    """Points of the curve V for plots and records: rows, context and seconds, as far as the target's context goes."""
    contexts = [context for context in _SHOWN_CONTEXTS if context + _SHOWN_ROWS[-1] <= context_length]
    return [
        {"rows": rows, "context": context, "seconds": target(rows, (context,))}
        for context in contexts or [max(1, context_length // 2)]
        for rows in _SHOWN_ROWS
        if rows < context_length // 2
    ]
