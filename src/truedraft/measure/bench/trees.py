"""Token trees in a benchmark: how many nodes pay here, and what became of what a tree promised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import TargetCost, expected_tokens_if_independent
from truedraft.drafters.base import Drafter
from truedraft.engine.policy import StepCosts
from truedraft.measure import sized
from truedraft.measure.bench.suite import OurEngine, Suite


@dataclass(frozen=True, slots=True)
class ChosenTrees:
    """Trees that are chosen at each step.

    Attributes:
        nodes: of each, at most.
        promised: tokens per target call by their replay; None where nobody replayed them.
    """

    nodes: int
    promised: float | None


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """A system's trees, with promised and measured tokens per target call.

    Attributes:
        system: who drafted them.
        tree: its nodes, with `survival` where they were counted; where trees are chosen at each step, the tree that was
            counted for the same heads.
        measured: mean acceptance length in the benchmark; None where it did not run.
        product: what the tree would promise if heads erred independently; None where that was not kept with them.
        chosen: those that are drafted instead of `tree`; None where it is drafted itself.
        promised_on: the text on which promises were measured, in words; the benchmark's own is `measured`.
    """

    system: str
    tree: RankTree
    measured: float | None
    product: float | None = None
    chosen: ChosenTrees | None = None
    promised_on: str = ""

    @property
    def nodes(self) -> int:
        """Most nodes that are drafted."""
        return len(self.tree) if self.chosen is None else self.chosen.nodes

    @property
    def counted(self) -> float | None:
        """Tokens per target call that the tree's counts promise; None where nobody counted."""
        return None if math.isnan(self.tree.expected_tokens) else self.tree.expected_tokens

    @property
    def promised(self) -> float | None:
        """Tokens per target call that were to be expected; None where nobody measured that."""
        return self.counted if self.chosen is None else self.chosen.promised

    @property
    def measured_over_promised(self) -> float | None:
        """How much of the promise came true."""
        return None if self.measured is None or self.promised is None else self.measured / self.promised

    @property
    def _on(self) -> str:
        return f" (on {self.promised_on})" if self.promised_on else ""

    def describe(self) -> str:
        """In one line."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        if self.chosen is None:
            told = [f"{self.system}: a tree of {nodes}"]
        else:
            told = [f"{self.system}: trees of {nodes}, chosen at each step"]
        if self.promised is not None:
            told.append(f"promised {self.promised:.2f} tokens per target call{self._on}")
        if self.chosen is not None and self.counted is not None:
            told.append(f"{self.counted:.2f} by the counted tree")
        if self.product is not None:
            told.append(f"{self.product:.2f} if heads erred independently")
        if self.measured is not None:
            told.append(f"measured {self.measured:.2f}")
        if self.measured_over_promised is not None:
            told.append(f"{self.measured_over_promised:.2f} of what was promised")
        return ", ".join(told)

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "system": self.system,
            "trees": "fixed" if self.chosen is None else "likeliest",
            "nodes": self.nodes,
            "promised": self.promised,
            "promised_on": self.promised_on,
            "counted": self.counted,
            "product": self.product,
            "measured": self.measured,
            "measured_over_promised": self.measured_over_promised,
            "tree": self.tree.as_dict(),
        }


def size_trees(suite: Suite, forwards: TargetCost, params: SamplingParams, *, refresh: bool = False) -> None:
    """Let drafters whose number of nodes was left open draft as many as pay, and note how many, a sentence each.

    Those of engines whose controller weighs costs stay as they are: it chooses at each step.

    Args:
        suite: its engines do not run meanwhile.
        forwards: V of its target.
        params: sampling options of the benchmark.
        refresh: measure what drafting costs although kept costs would do.

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
            told = [f"{member_title(each, name)}: {budget.describe()}" for name, budget in budgets.items()]
            suite.notes += [*costs.warnings, *told]


def drafted_trees(suite: Suite, measured: Mapping[str, float | None], params: SamplingParams) -> list[DraftedTree]:
    """The trees of those of our drafters that draft by ranks, each as far as its number of nodes goes.

    Args:
        suite: whose engines.
        measured: the mean acceptance length of each engine; that of several drafters is of none of them.
        params: of the benchmark.
    """
    found = []
    drafting = [(member_title(each, name), member) for each in suite.ours for name, member in _members(each)]
    for title, member in drafting:
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


def _members(system: OurEngine) -> Iterable[tuple[str, Drafter]]:
    return system.engine.drafter.members.items()


def member_title(system: OurEngine, member: str) -> str:
    """What a report calls one of a system's drafters: the system itself where that is its only one."""
    return system.name if len(system.engine.drafter.members) == 1 else f"{system.name}: {member}"
