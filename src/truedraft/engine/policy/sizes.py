"""How many nodes a drafter of trees should draft on this machine: expected tokens against measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truedraft.core.params import SamplingParams
from truedraft.core.theory import AcceptanceCurve, DraftCost, SizeOption, TargetCost, best_option, size_options
from truedraft.drafters.base import Drafter
from truedraft.drafters.heads.base import SizePlan
from truedraft.drafters.portfolio import with_members
from truedraft.engine import Engine
from truedraft.engine.policy import STEPS, CurveCheck, StepCosts, parts
from truedraft.engine.prompts import Prompt
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.models.multimodal import MultimodalPrompt

_CONTEXT = 512
_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """The sizes of a drafter on this machine."""

    plan: SizePlan
    choice: SizeOption
    costs: StepCosts

    @property
    def nodes(self) -> int:
        return self.choice.nodes

    @property
    def sizes(self) -> str:
        """The chosen sizes, as "8 beams of 4, 16 nodes"."""
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{self.plan.name}, {nodes}" if self.plan.name and self.nodes else nodes

    def describe(self) -> str:
        best = self.choice
        if not best.nodes:
            return (
                "0 nodes by the cost curve: no tree is predicted to pay here, so nothing is drafted; if the machine was"
                " busy then, `truedraft bench --refresh-costs` with this model and drafter measures again"
            )
        return (
            f"{self.sizes} by the cost curve: {best.expected_tokens:.2f} tokens per target call promised, "
            f"{best.speedup:.2f} times plain decoding predicted; the promise is of {self.plan.curve.measured_on}"
        )


def node_options(
    curve: AcceptanceCurve, forwards: TargetCost, drafting: DraftCost, *, context: int = _CONTEXT, requests: int = 1
) -> list[SizeOption]:
    """Predicted gains of 0, 1, ... nodes per request with `context` cached tokens; see `size_options`."""
    contexts = [context] * requests
    return size_options(curve, lambda rows: forwards(rows * requests, contexts), drafting)


def nodes_for(
    target: LanguageModel,
    drafter: Drafter,
    params: SamplingParams | None = None,
    *,
    requests: int = 1,
    costs: StepCosts | None = None,
    least: int = 0,
) -> NodeBudget:
    """Choose the sizes of a drafter for a target on this machine: the best predicted one of all its plans.

    Args:
        least: nodes to draft even if they do not pay.
    """
    params, costs = params or SamplingParams(), costs or StepCosts(target)
    plans = () if drafter.trees is None else drafter.trees.size_plans(params)
    if not plans:
        raise OptionError(
            "nobody measured what the nodes of these trees bring, so no number of them can be chosen; give the number "
            "of nodes"
        )
    context = max(1, min(_CONTEXT, target.context_length // 2))
    found = []
    for plan in plans:
        drafting = costs.drafting(plan.timed, params)
        options = node_options(plan.curve, costs.forwards(), drafting, context=context, requests=requests)
        found.append((plan, best_option([each for each in options if each.nodes >= least] or options)))
    return NodeBudget(*max(found, key=lambda each: each[1].speedup), costs)  # the first of equal ones


def sized(
    drafter: Drafter,
    target: LanguageModel,
    params: SamplingParams | None = None,
    *,
    requests: int = 1,
    costs: StepCosts | None = None,
    least: int = 0,
) -> tuple[Drafter, Mapping[str, NodeBudget]]:
    """A drafter with the number of nodes that pays on this machine, and why; arguments as in `nodes_for`.

    Each member of a portfolio gets its own number. Drafters without an acceptance measurement, and those with chosen
    sizes, stay unchanged.
    """
    params, members = params or SamplingParams(), dict(drafter.members)
    budgets: dict[str, NodeBudget] = {}
    for name, member in drafter.members.items():
        if member.trees is not None and member.trees.size_plans(params):
            costs = costs or StepCosts(target)
            budget = budgets[name] = nodes_for(target, member, params, requests=requests, costs=costs, least=least)
            members[name] = budget.plan.with_nodes(budget.nodes)
    return with_members(drafter, members) if budgets else drafter, budgets


def outdated(engine: Engine, forwards: TargetCost) -> str | None:
    """Why kept curves must be measured again, in a sentence; None where steps agree with them, and on a device."""
    ratio = ratio_of_steps(engine, forwards) if engine.target.device.type == "cpu" else None
    if ratio is None or not parts(ratio):
        return None
    return (
        f"the kept cost curves are measured again, for plain steps take {ratio:.2f} times what they say; the machine "
        "was busier then, or is now"
    )


def ratio_of_steps(engine: Engine, forwards: TargetCost) -> float | None:
    """The median of measured / V over 50 steps that an idle engine runs for this; None where no answer is that long."""
    ratios: list[float] = []
    check = CurveCheck(forwards, ratios.append)
    engine.listeners.append(check)
    try:
        engine.generate(
            made_up_prompt(engine.target, _PROMPT_TOKENS), SamplingParams(max_tokens=STEPS + 1, ignore_eos=True)
        )
    finally:
        engine.listeners.remove(check)
    return ratios[0] if ratios else None


def made_up_prompt(target: LanguageModel, tokens: int) -> Prompt:
    """A synthetic prompt of at most `tokens` tokens and half of the context, for answers that are discarded."""
    opening, inputs = target.opening, target.opening_inputs
    room = target.most_tokens(opening) - len(opening)
    text = [place * 7919 % target.vocab_size for place in range(max(1, min(tokens, room // 2)))]
    if inputs is not None:
        return MultimodalPrompt((*opening[target.source_tokens(opening) :], *text), inputs)
    return [*opening, *text]
