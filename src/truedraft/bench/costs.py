"""Cost curves of this machine as a benchmark uses them: what each step should have cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truedraft.bench.drafted_trees import size_trees
from truedraft.bench.lineup import Lineup, draft_model
from truedraft.bench.reading import read_size
from truedraft.bench.summary import Memory
from truedraft.core.sampling import SamplingParams
from truedraft.costs import drafter_cost, parts, read_bandwidth, target_cost
from truedraft.errors import OptionError
from truedraft.planning import ratio_of_steps
from truedraft.theory import DraftCost, TargetCost

Progress = Callable[[int, str], None]
PARTS = 100
"""What the progress of one curve is counted in."""

_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_CONTEXTS = (128, 512, 1024)


class CurveCosts:
    """What the steps of one engine should cost.

    Args:
        target: V(rows, contexts) of its target.
        draft: the cost of its drafter's proposals; None without a drafter.
    """

    def __init__(self, target: TargetCost, draft: DraftCost | None = None) -> None:
        self._target = target
        self._draft = draft
        self._of_nodes: dict[int, float] = {0: 0.0}

    def forward_s(self, rows: int, contexts: Sequence[int]) -> float:
        """Seconds of one target forward: V(rows, contexts)."""
        return self._target(rows, contexts)

    def drafting_s(self, nodes: int, contexts: Sequence[int]) -> float:
        """Seconds of drafting: as long as one request's share takes alone, as a batch is drafted in common forwards."""
        if self._draft is None:
            return 0.0
        each = -(-nodes // max(1, len(contexts)))
        if each not in self._of_nodes:
            self._of_nodes[each] = self._draft.of_nodes(each)
        return self._of_nodes[each]


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

    def memory(self, lineup: Lineup) -> dict[str, Memory]:
        """What use of memory bandwidth is computed from, for each contestant."""
        target = read_size(lineup.target)
        if self.bandwidth is None or target is None:
            return {}
        drafts = {each.name: draft_model(each.engine) for each in lineup.ours}
        shared = next((model for model in drafts.values() if model is not None), None)
        drafts |= {each.name: shared for each in lineup.peers}  # their draft forwards are counted as well
        return {
            name: Memory(self.bandwidth, target, None if model is None else read_size(model))
            for name, model in drafts.items()
        }


def measure_costs(lineup: Lineup, params: SamplingParams, progress: Progress, *, refresh: bool = False) -> MachineCosts:
    """Read bandwidth, the curve V of the target and the cost of each drafter: kept ones, else measured now.

    Drafters whose number of nodes was left open get as many as V favours; the lineup's notes then say how many.

    Args:
        lineup: whose engines are to be predicted; they do not run meanwhile.
        params: sampling options of the benchmark; drawing is a part of what drafting costs.
        progress: is called with parts done, `PARTS` for each of our engines, and what is being measured.
        refresh: measure although kept curves would do; those may be of a moment when the machine was busy.

    Raises:
        TruedraftError: a model or drafter failed.
    """
    measured = MachineCosts()
    progress(0, "reading memory")
    try:
        measured.bandwidth = read_bandwidth(lineup.target.device).bytes_per_s
    except OptionError as error:
        measured.warnings.append(f"{error}; without it there is no use of memory bandwidth")
    forwards = target_cost(lineup.target, progress=_part(progress, 0), refresh=refresh)
    measured.warnings += forwards.warnings
    ratio = ratio_of_steps(lineup.ours[0].engine, forwards.value) if forwards.kept and _is_seen(lineup) else None
    if ratio is not None and parts(ratio):
        measured.warnings.append(
            f"the kept cost curves are measured again, for plain steps take {ratio:.2f} times what they say; the "
            "machine was busier then, or is now"
        )
        refresh = True
        forwards = target_cost(lineup.target, progress=_part(progress, 0), refresh=True)
    measured.kept = forwards.kept
    measured.points = shown_points(forwards.value, lineup.target.context_length)
    size_trees(lineup, forwards.value, params, refresh=refresh)
    for number, each in enumerate(lineup.ours):
        drafting = None
        if number:  # the first is plain decoding
            drafting = drafter_cost(
                each.engine.drafter, lineup.target, params=params, progress=_part(progress, number), refresh=refresh
            )
            measured.warnings += drafting.warnings
            measured.kept |= drafting.kept
        measured.by_name[each.name] = CurveCosts(forwards.value, None if drafting is None else drafting.value)
    progress(len(lineup.ours) * PARTS, "")
    return measured


def _is_seen(lineup: Lineup) -> bool:
    """Whether the host sees what a forward takes; on a device it is only queued."""
    return lineup.target.device.type == "cpu"


def _part(progress: Progress, number: int) -> Callable[[int, int, str], None]:
    """The progress of one curve as a part of the whole."""

    def tell(done: int, total: int, label: str) -> None:
        progress(number * PARTS + PARTS * done // max(1, total), label)

    return tell


def shown_points(target: TargetCost, context_length: int) -> list[dict[str, float]]:
    """Points of the curve V for plots and records: rows, context and seconds, as far as the target's context goes."""
    contexts = [context for context in _SHOWN_CONTEXTS if context + _SHOWN_ROWS[-1] <= context_length]
    return [
        {"rows": rows, "context": context, "seconds": target(rows, (context,))}
        for context in contexts or [max(1, context_length // 2)]
        for rows in _SHOWN_ROWS
        if rows < context_length // 2
    ]
