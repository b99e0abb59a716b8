"""The exact distribution of a rule's emitted tokens on tiny vocabularies, by recursion over its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.proposal import DrawKind
from truedraft.verification.rule import DrawnToken, JudgedRow, Outcome, Rule

Prefix = tuple[int, ...]
Target = Callable[[Prefix], Tensor]
"""The target's distribution `[vocab]`, float64, after a prefix."""


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """A planned draw at a node from `q` `[vocab]`; a deterministic draw has a one-hot distribution."""

    dist: int  # its number; draws of a node from one distribution without replacement exclude each other's tokens
    q: Tensor
    kind: DrawKind


Scheme = Callable[[Prefix, Prefix], Sequence[PlannedDraw]]
"""The draws at a node, in order, from all tokens above it and those of them drafted in this step; none at a leaf."""


def emitted_dist(rule: Rule, target: Target, scheme: Scheme, length: int) -> dict[Prefix, float]:
    """The exact probabilities of the first `length` tokens of an answer when every step uses `scheme` and `rule`.

    A step that ends early is followed by a step from its end.
    """
    # For every prefix of an answer, its mass by the part drafted in this step; an outcome makes it longer.
    reached: list[dict[Prefix, dict[Prefix, float]]] = [{} for _ in range(length + 1)]
    reached[0][()] = {(): 1.0}
    for beginnings in reached[:-1]:
        for prefix, masses in beginnings.items():
            for drafted, mass in masses.items():
                for probability, outcome in _outcomes(rule, target, scheme, prefix, drafted):
                    answer = (*prefix, *outcome.tokens)[:length]
                    below = (*drafted, *outcome.tokens) if outcome.continues else ()
                    weight = mass * probability
                    if weight > 0.0:
                        of_answer = reached[len(answer)].setdefault(answer, {})
                        of_answer[below] = of_answer.get(below, 0.0) + weight
    return {answer: sum(masses.values()) for answer, masses in reached[length].items()}


def _outcomes(
    rule: Rule, target: Target, scheme: Scheme, prefix: Prefix, drafted: Prefix
) -> Iterator[tuple[float, Outcome]]:
    for probability, group in _drawn_groups(rule, target, scheme, prefix, drafted):
        for outcome in rule.outcomes(group):
            yield probability * outcome.probability, outcome


def _drawn_groups(
    rule: Rule, target: Target, scheme: Scheme, prefix: Prefix, drafted: Prefix
) -> Iterator[tuple[float, list[JudgedRow]]]:
    planned = scheme(prefix, drafted)
    p = target(prefix)
    for probability, draws in _drawn(planned):
        row = JudgedRow(p, tuple(draws))
        if rule.joins(planned):
            token = draws[0].token
            if rule.joins(scheme((*prefix, token), (*drafted, token))):
                for mass, below in _drawn_groups(rule, target, scheme, (*prefix, token), (*drafted, token)):
                    yield probability * mass, [row, *below]
                continue
        yield probability, [row]


def target_dist(target: Target, length: int) -> dict[Prefix, float]:
    """The target's own distribution of answers of `length` tokens."""
    dist: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        dist = {
            (*prefix, token): mass * float(p)
            for prefix, mass in dist.items()
            for token, p in enumerate(target(prefix))
            if mass * float(p) > 0.0
        }
    return dist


def distance(left: Mapping[Any, float], right: Mapping[Any, float]) -> float:
    """Total variation between two distributions, of answers or verdicts."""
    return 0.5 * sum(abs(left.get(each, 0.0) - right.get(each, 0.0)) for each in left.keys() | right.keys())


def _drawn(planned: Sequence[PlannedDraw]) -> Iterator[tuple[float, list[DrawnToken]]]:
    def extend(index: int, mass: float, so_far: list[DrawnToken]) -> Iterator[tuple[float, list[DrawnToken]]]:
        if index == len(planned):
            yield mass, so_far
            return
        plan = planned[index]
        q = plan.q
        if plan.kind is DrawKind.WITHOUT_REPLACEMENT:
            for earlier in so_far:
                if earlier.dist == plan.dist and earlier.kind is plan.kind:
                    q = L.without_tokens(q, torch.tensor([earlier.token]))
        for token in torch.nonzero(q).flatten().tolist():
            drawn = DrawnToken(token, plan.dist, plan.q, plan.kind)
            yield from extend(index + 1, mass * float(q[token]), [*so_far, drawn])

    yield from extend(0, 1.0, [])
