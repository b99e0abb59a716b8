"""The exact law of what a rule emits, by recursion over its kernel, on tiny vocabularies.

The kernel is that of one node, and beside it, for a rule that judges blocks, that of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core import laws as L
from truedraft.core.proposals import DrawKind
from truedraft.verification.block import BlockVerification
from truedraft.verification.block_looks import is_joint
from truedraft.verification.rule import DrawnToken, Rule

Prefix = tuple[int, ...]
Target = Callable[[Prefix], Tensor]


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """A draw that a drafting scheme makes at a node: a law `[vocab]`, its row, and how it is drawn.

    A deterministic draw has a one-hot law. Draws of one node with one row and without replacement lose each
    other's tokens.
    """

    law: int
    q: Tensor
    kind: DrawKind


Scheme = Callable[[Prefix, Prefix], Sequence[PlannedDraw]]
"""The draws made at a node, in order, by all tokens above it and those of them drafted in this step; none at a leaf."""


def emitted_law(rule: Rule, target: Target, scheme: Scheme, length: int) -> dict[Prefix, float]:
    """The exact law of the first `length` tokens of an answer when every step uses `scheme` and `rule`.

    A step that ends early is followed by a step from its end, so answers of the full length are compared.
    Siblings' subtrees are independent, so only the subtree below the accepted child matters.

    Args:
        rule: its `outcomes` are summed over, and its `block_outcomes` where it judges blocks.
        target: the target's law `[vocab]` after a prefix, float64.
        scheme: what is drafted at a node; called with the answer so far and its part that this step drafted.
        length: tokens to look at.

    Returns:
        Probability of each answer of `length` tokens.
    """
    # Mass by what was drafted of it in this step, for every beginning of an answer; an outcome makes it longer.
    reached: list[dict[Prefix, dict[Prefix, float]]] = [{} for _ in range(length + 1)]
    reached[0][()] = {(): 1.0}
    for beginnings in reached[:-1]:
        for prefix, masses in beginnings.items():
            for drafted, mass in masses.items():
                for probability, tokens, goes_on in _outcomes(rule, target, scheme, prefix, drafted):
                    answer, below = (*prefix, *tokens)[:length], (*drafted, *tokens) if goes_on else ()
                    weight = mass * probability
                    if weight > 0.0:
                        of_answer = reached[len(answer)].setdefault(answer, {})
                        of_answer[below] = of_answer.get(below, 0.0) + weight
    return {answer: sum(masses.values()) for answer, masses in reached[length].items()}


def _outcomes(
    rule: Rule, target: Target, scheme: Scheme, prefix: Prefix, drafted: Prefix
) -> Iterator[tuple[float, Prefix, bool]]:
    """How a node, or the block that begins there, ends: probability, tokens, and whether the step goes on behind."""
    planned = scheme(prefix, drafted)
    if isinstance(rule, BlockVerification) and is_joint(planned):
        for probability, draws in _drawn_blocks(scheme, prefix, drafted):
            tokens = tuple(draw.token for draw in draws)
            laws = [target((*prefix, *tokens[:place])) for place in range(len(draws))]
            for end in rule.block_outcomes(laws, draws):
                final = () if end.token is None else (end.token,)
                yield probability * end.probability, (*tokens[: end.accepted], *final), end.token is None
        return
    for probability, draws in _drawn(planned):
        for outcome in rule.outcomes(target(prefix), draws):
            yield probability * outcome.probability, (outcome.token,), outcome.accepted


def _drawn_blocks(scheme: Scheme, prefix: Prefix, drafted: Prefix) -> Iterator[tuple[float, list[DrawnToken]]]:
    """Every block that may be drafted from a node on, with its probability."""
    planned = scheme(prefix, drafted)
    if not is_joint(planned):
        yield 1.0, []
        return
    for probability, draws in _drawn(planned):
        token = draws[0].token
        for mass, below in _drawn_blocks(scheme, (*prefix, token), (*drafted, token)):
            yield probability * mass, [*draws, *below]


def target_law(target: Target, length: int) -> dict[Prefix, float]:
    """The target's own law of answers of `length` tokens."""
    law: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        law = {
            (*prefix, token): mass * float(p)
            for prefix, mass in law.items()
            for token, p in enumerate(target(prefix))
            if mass * float(p) > 0.0
        }
    return law


def distance(left: dict[Prefix, float], right: dict[Prefix, float]) -> float:
    """Total variation between two laws of answers."""
    return 0.5 * sum(abs(left.get(answer, 0.0) - right.get(answer, 0.0)) for answer in left.keys() | right.keys())


def _drawn(planned: Sequence[PlannedDraw]) -> Iterator[tuple[float, list[DrawnToken]]]:
    """Every outcome of the draws at one node, with its probability."""

    def extend(index: int, mass: float, so_far: list[DrawnToken]) -> Iterator[tuple[float, list[DrawnToken]]]:
        if index == len(planned):
            yield mass, so_far
            return
        plan = planned[index]
        q = plan.q
        if plan.kind is DrawKind.WITHOUT_REPLACEMENT:
            for earlier in so_far:
                if earlier.law == plan.law and earlier.kind is plan.kind:
                    q = L.without(q, earlier.token)
        for token in torch.nonzero(q).flatten().tolist():
            drawn = DrawnToken(token, plan.law, plan.q, plan.kind)
            yield from extend(index + 1, mass * float(q[token]), [*so_far, drawn])

    yield from extend(0, 1.0, [])
