"""The distribution of what a shipped `verify` answers, in every decision cell: the code is part of the package.

These tests hold it against `small_worlds`, whose reference is in exact fractions and shares nothing with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from small_worlds import World, every_proposal, gap

from truedraft.certify.cells import (
    BELOW_ONE,
    NEAR,
    Key,
    Script,
    ScriptedNoise,
    VerdictProbs,
    completed,
    decision_cells,
    decisions,
    probs_of,
    verdicts_of,
)
from truedraft.certify.cells import kernel_probs as kernel_dist
from truedraft.certify.cells import step_probs as step_dist
from truedraft.certify.worlds import Case
from truedraft.core.verdict import Verdict
from truedraft.verification import Rule
from truedraft.verification.exact import distance, emitted_dist, target_dist

__all__ = [
    "BELOW_ONE",
    "NEAR",
    "Key",
    "ScriptedNoise",
    "by_kernel",
    "by_verify",
    "cell_probs",
    "completed",
    "kernel_dist",
    "run",
    "step_dist",
]


def run(rule: Rule, cases: Sequence[Case], scripts: Sequence[Script]) -> list[tuple[Verdict, list[Key]]]:
    """One batched call under scripts: verdicts, and the keys of the decisions that led to them, in order.

    The rule may ask for more numbers than decide.
    """
    noise = [ScriptedNoise(script) for script in scripts]
    verdicts = verdicts_of(rule, cases, noise)
    return [
        (verdict, [key for key in decisions(rule, case, verdict) if key in own.asked])
        for case, verdict, own in zip(cases, verdicts, noise, strict=True)
    ]


def cell_probs(rule: Rule, cases: Sequence[Case]) -> list[VerdictProbs]:
    """For each case the distribution of the shipped verdict, all judged together."""
    return probs_of(decision_cells(rule, cases), len(cases))


def by_kernel(rule: Rule, world: World) -> float:
    """Total variation of answers' first tokens from the target, by recursion over the rule's kernel."""
    length = len(world.plans) + 1
    dist = emitted_dist(rule, world.target.dist, world.scheme, length)
    return distance(dist, target_dist(world.target.dist, length))


def by_verify(rule: Rule, world: World) -> float:
    """The same by one step of the shipped `verify`, in every decision cell; then the target itself goes on."""
    length = len(world.plans) + 1
    cases = every_proposal(world)
    step = step_dist(cases, cell_probs(rule, cases))
    return gap(completed(step, world.target.dist, length), target_dist(world.target.dist, length))
