"""How many nodes a drafter of trees should draft on this machine: expected tokens against measured costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.drafters.size_plans import Promise, SizePlan
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.planning.costs import Measured, drafter_cost, judge_target_cost, kept_target_cost, target_cost
from truedraft.planning.curve_check import CurveCheck
from truedraft.planning.rounds import Effort, Progress
from truedraft.planning.store import CostStore
from truedraft.theory import DraftCost, NodeChoice, TargetCost, best_node_budget

_CONTEXT = 512
_SHORT_TARGET, _SHORT_DRAFTER = Effort(1.0, 3, 25), Effort(0.5, 3, 40)
_SHORT = "short"


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """The sizes of a drafter on this machine.

    Attributes:
        plan: the best of the drafter's plans.
        choice: the node budget, and all that were considered for this plan.
        measuring_s: seconds that measuring took now; 0 where costs were kept.
        warnings: about kept costs, one sentence each.
        forwards: V that it was chosen by.
    """

    plan: SizePlan
    choice: NodeChoice
    measuring_s: float = 0.0
    warnings: tuple[str, ...] = ()
    forwards: TargetCost | None = None

    def check(self, target: LanguageModel, store: CostStore | None = None) -> CurveCheck | None:
        """A listener for `Engine.listeners`: where steps part from V, it is measured again at its next use.

        None on a device, where forwards are only queued and the host does not see what they take.
        """
        if self.forwards is None or target.device.type != "cpu":
            return None
        store = store or CostStore()
        stores = (store, CostStore(store.folder / _SHORT, store.clock))

        def tell(ratio: float) -> None:
            for each in stores:
                judge_target_cost(target, ratio, each)

        return CurveCheck(self.forwards, tell)

    @property
    def nodes(self) -> int:
        """How many nodes; 0 where drafting does not pay."""
        return self.choice.best.nodes

    def describe(self) -> str:
        """In one line."""
        best = self.choice.best
        if not best.nodes:
            return (
                "0 nodes by the cost curve: no tree is predicted to pay here, so nothing is drafted; if the machine was"
                " busy then, `truedraft bench --refresh-costs` with this model and drafter measures again"
            )
        nodes = f"{best.nodes} node{'s' if best.nodes > 1 else ''}"
        sizes = f"{self.plan.name}, {nodes}" if self.plan.name else nodes
        return (
            f"{sizes} by the cost curve: {best.expected_tokens:.2f} tokens per target call promised, "
            f"{best.speedup:.2f} times plain decoding predicted; the promise is of {self.plan.promise.measured_on}"
        )


def choose_nodes(
    promise: Promise, forwards: TargetCost, drafting: DraftCost, *, context: int = _CONTEXT, requests: int = 1
) -> NodeChoice:
    """The node budget with the largest predicted speed-up; 0 nodes where none pays.

    tau(n) V(1) / (V(n + 1) + draft cost), for each request of a batch of `requests`; drafting is taken by the depth of
    trees of n nodes, for heads cost what they cost however many guesses of theirs are used.

    Args:
        promise: what each node is expected to bring.
        forwards: V(rows, contexts) of the target, in seconds.
        drafting: seconds of a proposal by its depth.
        context: cached tokens of each request.
        requests: answered together.

    Raises:
        OptionError: there is no request.
    """
    contexts = [context] * requests
    by_depth = {depth: drafting(depth) for depth in set(promise.depths)}
    return best_node_budget(
        promise.gains, lambda rows: forwards(rows * requests, contexts), lambda nodes: by_depth[promise.depths[nodes]]
    )


class Sizing(TypedDict, total=False):
    """How a node budget is chosen; all of it may be left out.

    V is then the curve that an earlier benchmark kept, or a short one: about a second for a small model, and kept too,
    but apart, so that it never stands in for a longer measurement.

    Attributes:
        forwards: V, where the caller has measured it.
        requests: answered together; 1 if left out.
        refresh: measure although kept costs would do.
        store: where costs are kept; the user's cache folder if left out.
        progress: told after each measurement.
    """

    forwards: TargetCost | None
    requests: int
    refresh: bool
    store: CostStore | None
    progress: Progress | None


def nodes_for(
    target: LanguageModel, drafter: Drafter, params: SamplingParams | None = None, **how: Unpack[Sizing]
) -> NodeBudget:
    """Choose the sizes of a drafter for a target on this machine: of all its plans the one that is predicted best.

    Args:
        target: the model that decides.
        drafter: fits it; it has plans for sizes.
        params: sampling options; None is greedy.
        how: see `Sizing`.

    Raises:
        OptionError: the drafter's sizes were chosen, or nobody measured what they bring.
        TruedraftError: target or drafter failed.
    """
    params = params or SamplingParams()
    plans = drafter.size_plans(params)
    if not plans:
        raise OptionError(
            "nobody measured what the nodes of these trees bring, so no number of them can be chosen; give the number "
            "of nodes"
        )
    found: list[Measured[TargetCost] | Measured[DraftCost]] = []
    store = how.get("store") or CostStore()
    forwards = _forwards(target, store, found, how)
    if any(not each.kept for each in found):  # V and what drafting costs are of one moment
        how["refresh"] = True
    context = max(1, min(_CONTEXT, target.context_length // 2))
    requests = how.get("requests", 1)
    costs: dict[int, DraftCost] = {}
    best: tuple[SizePlan, NodeChoice] | None = None
    for plan in plans:
        if id(plan.timed) not in costs:  # plans may share a drafter, at other depths
            measured = _drafting(plan.timed, target, params, store, how)
            found.append(measured)
            costs[id(plan.timed)] = measured.value
        choice = choose_nodes(plan.promise, forwards, costs[id(plan.timed)], context=context, requests=requests)
        if best is None or choice.best.speedup > best[1].best.speedup:
            best = plan, choice
    assert best is not None, "there is a plan"
    warnings = tuple(warning for each in found for warning in each.warnings)
    return NodeBudget(*best, sum(each.measuring_s for each in found), warnings, forwards)


def _forwards(
    target: LanguageModel, store: CostStore, found: list[Measured[TargetCost] | Measured[DraftCost]], how: Sizing
) -> TargetCost:
    """V: as given, as kept, or measured now, which is then added to `found`."""
    forwards, refresh = how.get("forwards"), how.get("refresh", False)
    if forwards is None and not refresh:
        forwards = kept_target_cost(target, store)
    if forwards is not None:
        return forwards
    short = CostStore(store.folder / _SHORT, store.clock)
    measured = target_cost(target, effort=_SHORT_TARGET, store=short, progress=how.get("progress"), refresh=refresh)
    found.append(measured)
    return measured.value


def _drafting(
    drafter: Drafter, target: LanguageModel, params: SamplingParams, store: CostStore, how: Sizing
) -> Measured[DraftCost]:
    return drafter_cost(
        drafter,
        target,
        params=params,
        effort=_SHORT_DRAFTER,
        store=CostStore(store.folder / _SHORT, store.clock),
        progress=how.get("progress"),
        refresh=how.get("refresh", False),
    )


def sized(
    drafter: Drafter, target: LanguageModel, params: SamplingParams | None = None, **how: Unpack[Sizing]
) -> tuple[Drafter, NodeBudget | None]:
    """A drafter with as many nodes as pay on this machine, and why; arguments as in `nodes_for`.

    Drafters without trees of which somebody measured what they bring, and those whose sizes somebody chose, come back
    as they are, with None.

    Raises:
        TruedraftError: target or drafter failed.
    """
    params = params or SamplingParams()
    if not drafter.size_plans(params):
        return drafter, None
    budget = nodes_for(target, drafter, params, **how)
    return budget.plan.with_nodes(budget.nodes), budget
