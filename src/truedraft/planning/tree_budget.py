"""How many nodes of its tree a drafter should fill in on this machine: expected tokens against measured costs."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.core.rank_tree import RankTree
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.drafters.medusa import Medusa
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.planning.costs import Measured, drafter_cost, kept_target_cost, target_cost
from truedraft.planning.rounds import Effort, Progress
from truedraft.planning.store import CostStore
from truedraft.theory import DraftCost, NodeChoice, TargetCost, best_node_budget

_CONTEXT = 512
_SHORT_TARGET, _SHORT_DRAFTER = Effort(1.0, 3, 25), Effort(0.5, 3, 40)
_SHORT = "short"


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """The number of nodes for a drafter on this machine.

    Attributes:
        choice: the budget and all that were considered.
        measuring_s: seconds that measuring took now; 0 where costs were kept.
        warnings: about kept costs, one sentence each.
    """

    choice: NodeChoice
    measuring_s: float = 0.0
    warnings: tuple[str, ...] = ()

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
        return (
            f"{best.nodes} node{'s' if best.nodes > 1 else ''} by the cost curve: {best.expected_tokens:.2f} tokens "
            f"per target call promised, {best.speedup:.2f} times plain decoding predicted"
        )


def choose_nodes(
    tree: RankTree, forwards: TargetCost, drafting: DraftCost, *, context: int = _CONTEXT, requests: int = 1
) -> NodeChoice:
    """The node budget with the largest predicted speed-up; 0 nodes where none pays.

    tau(n) V(1) / (V(n + 1) + draft cost), for each request of a batch of `requests`; drafting is taken by the depth of
    the first n nodes, for heads cost what they cost however many guesses of theirs are used.

    Args:
        tree: with the probability that each node is accepted.
        forwards: V(rows, contexts) of the target, in seconds.
        drafting: seconds of a proposal by its depth.
        context: cached tokens of each request.
        requests: answered together.

    Raises:
        OptionError: nobody counted the tree, or there is no request.
    """
    if len(tree) and not tree.reach:
        raise OptionError(
            "nobody counted how often the nodes of this tree are accepted, so no budget can be chosen; give the number "
            "of nodes"
        )
    depths = [0]
    for path in tree.paths:
        depths.append(max(depths[-1], len(path)))
    contexts = [context] * requests
    by_depth = {depth: drafting(depth) for depth in set(depths)}
    return best_node_budget(
        tree.reach, lambda rows: forwards(rows * requests, contexts), lambda nodes: by_depth[depths[nodes]]
    )


def nodes_for(
    target: LanguageModel,
    drafter: Medusa,
    params: SamplingParams | None = None,
    *,
    forwards: TargetCost | None = None,
    requests: int = 1,
    refresh: bool = False,
    store: CostStore | None = None,
    progress: Progress | None = None,
) -> NodeBudget:
    """Choose the node budget of a drafter for a target on this machine.

    V is the curve that an earlier benchmark kept, or a short one: about a second for a small model, and kept too, but
    apart, so that it never stands in for a longer measurement.

    Args:
        target: the model that decides.
        drafter: fits it; how many nodes it has now does not matter.
        params: sampling options; None is greedy.
        forwards: V, where the caller has measured it.
        requests: answered together.
        refresh: measure although kept costs would do.
        store: where costs are kept; None is the user's cache folder.
        progress: told after each measurement.

    Raises:
        OptionError: nobody counted the drafter's tree.
        TruedraftError: target or drafter failed.
    """
    params = params or SamplingParams()
    store = store or CostStore()
    short = CostStore(store.folder / _SHORT)
    found: list[Measured[TargetCost] | Measured[DraftCost]] = []
    if forwards is None and not refresh:
        forwards = kept_target_cost(target, store)
    if forwards is None:
        measured = target_cost(target, effort=_SHORT_TARGET, store=short, progress=progress, refresh=refresh)
        found.append(measured)
        forwards = measured.value
    tree = drafter.tree_for(params)
    whole = drafter.with_nodes(len(tree))
    drafting = drafter_cost(
        whole, target, params=params, effort=_SHORT_DRAFTER, store=short, progress=progress, refresh=refresh
    )
    found.append(drafting)
    context = max(1, min(_CONTEXT, target.context_length // 2))
    choice = choose_nodes(tree, forwards, drafting.value, context=context, requests=requests)
    warnings = tuple(warning for each in found for warning in each.warnings)
    return NodeBudget(choice, sum(each.measuring_s for each in found), warnings)


def sized(
    drafter: Drafter,
    target: LanguageModel,
    params: SamplingParams | None = None,
    *,
    forwards: TargetCost | None = None,
    requests: int = 1,
    refresh: bool = False,
    store: CostStore | None = None,
    progress: Progress | None = None,
) -> tuple[Drafter, NodeBudget | None]:
    """A drafter with as many nodes as pay on this machine, and why; arguments as in `nodes_for`.

    Drafters without a counted tree, and those whose number of nodes somebody chose, come back as they are, with None.

    Raises:
        TruedraftError: target or drafter failed.
    """
    params = params or SamplingParams()
    if not isinstance(drafter, Medusa) or drafter.nodes_chosen or not drafter.tree_for(params).reach:
        return drafter, None
    budget = nodes_for(
        target,
        drafter,
        params,
        forwards=forwards,
        requests=requests,
        refresh=refresh,
        store=store,
        progress=progress,
    )
    return drafter.with_nodes(budget.nodes), budget
