"""Laws of verdicts: what a rule's kernels say of one proposal, and what follows for a step and for an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from truedraft.certify.worlds import Case, Prefix
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification import Rule
from truedraft.verification.rule import DrawnToken, JudgedSlot, Outcome

VerdictLaw = dict[Verdict, float]


def group_kernel(rule: Rule, case: Case, group: Sequence[int]) -> list[Outcome]:
    """What the kernel says of slots that are judged together."""
    return rule.outcomes([_judged(case, slot) for slot in group])


def _judged(case: Case, slot: int) -> JudgedSlot:
    proposal, p = case.proposal, case.laws[slot]
    drawn = []
    for draw in proposal.draws[slot]:
        token = proposal.tree.token_list[draw.child]
        if draw.law < 0:
            q = torch.zeros_like(p)
            q[token] = 1.0
        else:
            assert proposal.laws is not None
            q = proposal.laws[draw.law]
        drawn.append(DrawnToken(token, draw.law, q, draw.kind))
    return JudgedSlot(p, tuple(drawn))


def node_kernel(rule: Rule, case: Case, slot: int) -> tuple[list[float], list[float]]:
    """What the kernel says of a slot that is judged by itself.

    Returns:
        Each draw's probability to stay once it is its turn (draws that are never reached may be missing), and the law
        of the final token.
    """
    accepts, final, reach = [], [0.0] * case.laws.shape[-1], 1.0
    for outcome in group_kernel(rule, case, [slot]):
        if outcome.accepted:
            accepts.append(outcome.probability / reach if reach > 0 else 0.0)
            reach -= outcome.probability
        else:
            final[outcome.tokens[0]] += outcome.probability
    left = sum(final)
    return accepts, [mass / left for mass in final] if left else final


def is_joint(rule: Rule, case: Case, slot: int) -> bool:
    """Whether a slot is judged by its tokens together with those of the slots below."""
    return rule.joins(case.proposal.draws[slot])


def kernel_law(rule: Rule, case: Case) -> VerdictLaw:
    """The law of the verdict on one proposal, composed from the rule's kernels by a walk of our own."""
    law: VerdictLaw = {}
    ids = case.proposal.tree.token_list

    def end(path: Prefix, token: int, origin: Origin, mass: float) -> None:
        if mass > 0.0:
            verdict = Verdict(path, (*(ids[node] for node in path), token), origin)
            law[verdict] = law.get(verdict, 0.0) + mass

    def visit_block(group: Sequence[int], path: Prefix, mass: float) -> None:
        nodes = [case.proposal.draws[each][0].child for each in group]
        for outcome in group_kernel(rule, case, group):
            below = (*path, *nodes[: outcome.accepted])
            if not outcome.goes_on:
                end(below, outcome.tokens[-1], Origin.RECOVERED, mass * outcome.probability)
            elif outcome.probability > 0.0:
                visit(nodes[-1] + 1, below, mass * outcome.probability)

    def visit(slot: int, path: Prefix, mass: float) -> None:
        if is_joint(rule, case, slot):
            visit_block(rule.group(case.proposal, slot), path, mass)
            return
        draws = case.proposal.draws[slot]
        accepts, final = node_kernel(rule, case, slot)
        for draw, accept in zip(draws, accepts, strict=False):
            if accept > 0.0:
                visit(draw.child + 1, (*path, draw.child), mass * accept)
            mass *= 1.0 - accept
        for token, share in enumerate(final):
            end(path, token, Origin.RECOVERED if draws else Origin.BONUS, mass * share)

    visit(0, (), 1.0)
    return law


def step_law(cases: Sequence[Case], laws: Sequence[VerdictLaw]) -> dict[tuple[Prefix, int], float]:
    """Over all proposals of a world: the law of (emitted tokens, accepted count) of one step."""
    law: dict[tuple[Prefix, int], float] = {}
    for case, verdicts in zip(cases, laws, strict=True):
        for verdict, mass in verdicts.items():
            key = verdict.tokens, len(verdict.path)
            law[key] = law.get(key, 0.0) + case.probability * mass
    return law


def completed(
    step: dict[tuple[Prefix, int], float], target: Callable[[Prefix], Tensor], length: int
) -> dict[Prefix, float]:
    """The law of `length` tokens when the target itself goes on after the step: the target's, if the step is exact."""
    law: dict[Prefix, float] = {}

    def go_on(answer: Prefix, mass: float) -> None:
        if len(answer) >= length:
            law[answer[:length]] = law.get(answer[:length], 0.0) + mass
            return
        for token, p in enumerate(target(answer).tolist()):
            if p > 0.0:
                go_on((*answer, token), mass * p)

    for (answer, _), mass in step.items():
        go_on(answer, mass)
    return law


def verdict_distance(left: VerdictLaw, right: VerdictLaw) -> float:
    """Total variation between two laws of verdicts."""
    return 0.5 * sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())
