"""The time of decoding by part, compared with cost curves that were measured before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from truedraft.core.sums import summed
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.engine import StepRecord

_ROUNDING = 0.005  # of a share that is shown with two digits


class CurveCosts:
    """Costs of one engine's steps: V(rows, contexts) of its target, and each drafter's by name."""

    def __init__(self, target: TargetCost, drafting: Mapping[str, DraftCost] | None = None) -> None:
        self._target = target
        self._drafting = dict(drafting or {})
        self._of_nodes: dict[tuple[str, int], float] = {}

    def forward_s(self, rows: int, contexts: Sequence[int]) -> float:
        return self._target(rows, contexts)

    def drafting_s(self, step: StepRecord) -> float:
        """Seconds of drafting: as for one request's share, because a batch is drafted in common forwards."""
        return sum(self._of(name, step) for name in self._drafting)

    def _of(self, name: str, step: StepRecord) -> float:
        levels = next((each.levels for each in step.drafting if each.drafter == name), None)
        if levels is not None:
            return self._drafting[name](levels)
        nodes = [share.nodes for request in step.requests for share in request.shares if share.drafter == name]
        each = -(-sum(nodes) // max(1, len(nodes)))
        if (name, each) not in self._of_nodes:
            self._of_nodes[name, each] = self._drafting[name].of_nodes(each)
        return self._of_nodes[name, each]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Sums over the settled decoding steps (without a part of a prompt), in seconds.

    Attributes:
        requests: requests summed over steps: their target calls.
        decode_s: wall time of decoding, including the time between steps, without steps that were not settled.
        forward_curve_s: V(rows, contexts) of each step, by the curve; None without one.
        plain_curve_s: V(one row a request, contexts).
        drafting_curve_s: the cost of each step's drafting.
        unsettled: decoding steps that were not settled, see `StepRecord.settled`; not in the sums.
    """

    steps: int = 0
    requests: int = 0
    rows: int = 0
    nodes: int = 0
    decode_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    forward_curve_s: float | None = None
    plain_curve_s: float | None = None
    drafting_curve_s: float | None = None
    unsettled: int = 0
    unsettled_s: float = 0.0

    __add__ = summed


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of the time of decoding.

    `target` (V) and `draft` are by the curves, `host` is the rest, with verification; these are None where the run was
    faster than the curves, which were measured at another speed of the machine. The last three are as timed.
    """

    target: float | None
    draft: float | None
    host: float | None
    verification: float
    timed_target: float
    timed_draft: float


def known_share(share: float | None) -> float | None:
    """A share of time or of memory bandwidth; None above 1, which no run can reach.

    The reference was then of another speed of the machine, or the weights were in the processor's caches.
    """
    return None if share is None or share > 1.0 + _ROUNDING else share


def break_down(steps: Sequence[StepRecord], total_s: float, costs: CurveCosts | None) -> Breakdown:
    """Sum the decoding steps of one run; without curves the fields by the curve are None."""
    decoding = [step for step in steps if step.settled and not step.prefill]
    unsettled = [step for step in steps if not step.settled and not step.prefill]
    unsettled_s = sum(step.total_s for step in unsettled)
    curves = (
        {}
        if costs is None
        else {
            "forward_curve_s": sum(costs.forward_s(step.rows, step.contexts) for step in decoding),
            "plain_curve_s": sum(costs.forward_s(len(step.requests), step.contexts) for step in decoding),
            "drafting_curve_s": sum(costs.drafting_s(step) for step in decoding if step.nodes),
        }
    )
    return Breakdown(
        steps=len(decoding),
        requests=sum(len(step.requests) for step in decoding),
        rows=sum(step.rows for step in decoding),
        nodes=sum(step.nodes for step in decoding),
        decode_s=total_s - sum(step.total_s for step in steps if step.prefill) - unsettled_s,
        draft_s=sum(step.draft_s for step in decoding),
        target_s=sum(step.target_s for step in decoding),
        verify_s=sum(step.verify_s for step in decoding),
        unsettled=len(unsettled),
        unsettled_s=unsettled_s,
        **curves,
    )


def shares(breakdown: Breakdown) -> Shares | None:
    """Fractions of decoding time; None where nothing was decoded."""
    whole = breakdown.decode_s
    if whole <= 0 or not breakdown.steps:
        return None
    target = draft = host = None
    if breakdown.forward_curve_s is not None and breakdown.drafting_curve_s is not None:
        target, draft = breakdown.forward_curve_s / whole, breakdown.drafting_curve_s / whole
        if known_share(target + draft) is None:
            target = draft = None
        else:
            host = max(1.0 - target - draft, 0.0)
    timed = (seconds / whole for seconds in (breakdown.verify_s, breakdown.target_s, breakdown.draft_s))
    return Shares(target, draft, host, *timed)
