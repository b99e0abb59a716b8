"""Token trees in a benchmark: the best number of nodes on this machine, and predicted and measured lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import TargetCost, expected_tokens_if_independent
from truedraft.engine.policy import StepCosts
from truedraft.measure import sized
from truedraft.measure.bench.suite import OurEngine, Suite
from truedraft.options import record_of


@dataclass(frozen=True, slots=True)
class ChosenTrees:
    """Trees that are chosen at each step, with the tokens per target call predicted by replay, if there was one."""

    nodes: int
    promised: float | None


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """A system's trees, with predicted and measured tokens per target call.

    Attributes:
        tree: with `survival` where it was counted; for `chosen` trees the counted one of the same heads.
        chosen: the trees drafted instead of `tree`, if they are chosen at each step.
        promised_on: the text of the prediction; `measured` is on the benchmark's own.
    """

    system: str
    tree: RankTree
    measured: float | None
    product: float | None = None
    chosen: ChosenTrees | None = None
    promised_on: str = ""

    @property
    def nodes(self) -> int:
        return len(self.tree) if self.chosen is None else self.chosen.nodes

    @property
    def counted(self) -> float | None:
        return None if math.isnan(self.tree.expected_tokens) else self.tree.expected_tokens

    @property
    def promised(self) -> float | None:
        return self.counted if self.chosen is None else self.chosen.promised

    @property
    def measured_over_promised(self) -> float | None:
        return None if self.measured is None or self.promised is None else self.measured / self.promised

    def describe(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        trees = f"a tree of {nodes}" if self.chosen is None else f"trees of {nodes}, chosen at each step"
        on = f" (on {self.promised_on})" if self.promised_on else ""
        numbers = (
            (self.promised, f"promised {{:.2f}} tokens per target call{on}"),
            (None if self.chosen is None else self.counted, "{:.2f} by the counted tree"),
            (self.product, "{:.2f} if heads erred independently"),
            (self.measured, "measured {:.2f}"),
            (self.measured_over_promised, "{:.2f} of what was promised"),
        )
        parts = [words.format(number) for number, words in numbers if number is not None]
        return ", ".join([f"{self.system}: {trees}", *parts])

    def as_dict(self) -> dict[str, Any]:
        numbers = ("nodes", "promised", "promised_on", "counted", "product", "measured", "measured_over_promised")
        kind = "fixed" if self.chosen is None else "likeliest"
        return {"trees": kind} | record_of(self, "system", *numbers, "tree")


def size_trees(suite: Suite, forwards: TargetCost, params: SamplingParams, *, refresh: bool = False) -> None:
    """Set the number of nodes of drafters without a fixed one to the fastest, and add a note on each, except for
    engines with a controller that weighs costs.

    Raises:
        TruedraftError: target or drafter failed.
    """
    for each in suite.ours:
        if each.engine.controller.weighs_costs:
            continue
        costs = StepCosts(suite.target, forwards=forwards, refresh=refresh)
        drafter, budgets = sized(each.engine.drafter, suite.target, params, requests=suite.batch, costs=costs)
        if budgets:
            suite.redraft(each, drafter)
            notes = [f"{member_title(each, name)}: {budget.describe()}" for name, budget in budgets.items()]
            suite.notes += [*costs.warnings, *notes]


def drafted_trees(suite: Suite, measured: Mapping[str, float | None], params: SamplingParams) -> list[DraftedTree]:
    """The trees of our drafters that draft by ranks; `measured` has the mean acceptance length of each engine."""
    found = []
    drafting = [(each, *member) for each in suite.ours for member in each.engine.drafter.members.items()]
    for system, name, member in drafting:
        title = member_title(system, name)
        facts = None if member.trees is None else member.trees.tree_facts(params)
        if facts is None:
            continue
        counted = facts.accuracy is not None and bool(facts.tree.survival)
        product = expected_tokens_if_independent(facts.tree.paths, facts.accuracy or ()) if counted else None
        tokens = None if facts.curve is None else facts.curve.tokens(facts.nodes)
        chosen = None if facts.fixed else ChosenTrees(facts.nodes, tokens)
        text = "" if facts.curve is None else facts.curve.measured_on
        found.append(DraftedTree(title, facts.tree, measured.get(title), product, chosen, text))
    return found


def member_title(system: OurEngine, member: str) -> str:
    """The name of a system's drafter in reports: the system's own where there is only one."""
    return system.name if len(system.engine.drafter.members) == 1 else f"{system.name}: {member}"
