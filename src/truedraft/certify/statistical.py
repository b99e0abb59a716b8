"""The statistical part of a certificate: sampled answers of the whole pipeline against the target's law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.certify.betting import Bets, TestResult, holm
from truedraft.certify.clock import PATIENCE, Deadline
from truedraft.certify.directions import Directions, Scored
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.joint import JointResult, joint_result
from truedraft.certify.sampling_runs import scored_answers
from truedraft.certify.stack import Stack
from truedraft.core.sampling import SamplingParams

_JOINT = 0.25
"""Share of the time for the joint law."""
_SHOWN = 5
_ENOUGH = 0.06
"""Total variation that must be detectable: controls are to be three times as large, and few reach more than 0.2."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of the tests on a sample.

    Attributes:
        tests: each with its own p-value.
        tokens: how many were tested.
        impossible: tokens that the target gave no probability at all.
        judged: tokens at nodes with a draft.
    """

    tests: Sequence[TestResult]
    tokens: int
    impossible: int
    judged: int

    def adjusted(self) -> dict[str, float]:
        """Holm's p-values by test."""
        return dict(zip([t.name for t in self.tests], holm([t.p_value for t in self.tests]), strict=True))

    def smallest_detectable(self, false_alarm: float) -> float:
        """The largest of what the tests over all tokens would have found; those over parts of them see less."""
        whole = [test for test in self.tests if test.tokens == self.tokens]
        return max(test.smallest_detectable(false_alarm / len(self.tests)) for test in whole)


class Sampling:
    """Tests of a stream of answers.

    Args:
        vocab: size of the vocabulary.
        batch: requests in a batch.
        allowance: how far rounding may have put a law off, in total variation.
    """

    def __init__(self, vocab: int, batch: int, allowance: float) -> None:
        self._directions = Directions(vocab, batch)
        self._bets = Bets(self._directions.names, allowance)
        self._tokens = self._impossible = self._judged = 0

    def add(self, scored: Scored) -> None:
        """Test the tokens of one answer."""
        if not len(scored.tokens):
            return
        self._bets.add(*self._directions.measure(scored))
        own = [float(scored.laws[i, token]) for i, token in enumerate(scored.tokens)]
        self._impossible += own.count(0.0)
        self._tokens += len(own)
        self._judged += sum(one.q is not None or bool(one.candidates) for one in scored.decisions)

    def sample(self) -> Sample:
        """What came of it so far."""
        return Sample(self._bets.results(), self._tokens, self._impossible, self._judged)


def statistical_findings(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    seconds: float,
    tell: Callable[[float], None],
    *,
    allowance: float = 0.0,
    false_alarm: float = 1e-3,
    seed: int = 0,
) -> list[Finding]:
    """Test the answers of a stack at a temperature.

    Args:
        stack: what answers.
        prompts: token ids.
        params: the user's options, of a temperature above 0.
        batch: requests in a batch.
        seconds: how long to sample; longer where little could have been found by then.
        tell: is told the fraction done.
        allowance: how far rounding may put the law of a token off, in total variation; 0 where rows are invariant.
        false_alarm: probability, at most, that a correct stack fails any of these tests.
        seed: of the first request.
    """
    sampling = Sampling(stack.target.vocab_size, batch, allowance)
    deadline = Deadline(seconds * (1.0 - _JOINT))
    patience = Deadline(PATIENCE * seconds)
    for answers in scored_answers(stack, prompts, params, batch, first_seed=seed):
        for scored in answers:
            sampling.add(scored)
        tell((1.0 - _JOINT) * deadline.fraction)
        if deadline.over and (patience.over or sampling.sample().smallest_detectable(false_alarm) <= _ENOUGH):
            break
    sample = sampling.sample()
    joint = joint_result(
        stack,
        prompts,
        params,
        Deadline(seconds * _JOINT),
        lambda done: tell(1.0 - _JOINT + _JOINT * done),
        first_seed=seed,
    )
    return _judged(sample, joint, allowance, false_alarm)


def _judged(sample: Sample, joint: JointResult | None, allowance: float, false_alarm: float) -> list[Finding]:
    """Holm over all tests, those of tokens and that of joint laws together."""
    # At one prompt rounding is the same in every answer, so counts of answers would find it sooner or later.
    counted = joint is not None and joint.cells > 1 and allowance == 0.0
    p_values = [test.p_value for test in sample.tests] + ([joint.p_value] if joint and counted else [])
    adjusted = holm(p_values)
    level = false_alarm / len(p_values)
    return [
        _of_tokens(sample, adjusted[: len(sample.tests)], allowance, false_alarm, level),
        _of_joint(joint, adjusted[-1] if counted else None, false_alarm, level),
    ]


def _of_tokens(
    sample: Sample, adjusted: Sequence[float], allowance: float, false_alarm: float, level: float
) -> Finding:
    impossible = sample.impossible > 0 and allowance == 0.0
    smallest = min(range(len(adjusted)), key=lambda i: (adjusted[i], i))
    fails = adjusted[smallest] < false_alarm or impossible
    detectable = sample.smallest_detectable(level * len(sample.tests))
    worst = sample.tests[smallest]
    summary = (
        f"{sample.tokens:,} tokens, {sample.judged:,} of them at nodes with a draft, {len(sample.tests)} tests: "
        f"smallest p-value after Holm {adjusted[smallest]:.2g}"
        f" ({worst.name}, {worst.excess:+.4f}); a total variation of {detectable:.3f} in any of these directions would"
        " have been found"
    )
    if sample.impossible:
        summary += f"; {sample.impossible} tokens that the target's law forbids"
    facts: dict[str, Any] = {
        "tokens": sample.tokens,
        "tokens_with_a_draft": sample.judged,
        "tests": len(sample.tests),
        "false_alarm": false_alarm,
        "smallest_adjusted_p_value": adjusted[smallest],
        "smallest_detectable_tv": detectable,
        "impossible_tokens": sample.impossible,
        "rounding_allowed_tv": allowance,
        "least_likely": [
            _test_facts(sample.tests[i], adjusted[i], level)
            for i in sorted(range(len(adjusted)), key=lambda i: sample.tests[i].p_value)[:_SHOWN]
        ],
    }
    status = Status.FAILS if fails else Status.HOLDS
    return Finding(Part.STATISTICAL, "tokens at their own prefixes", status, summary, facts)


def _test_facts(test: TestResult, adjusted: float, level: float) -> dict[str, Any]:
    return {
        "test": test.name,
        "tokens": test.tokens,
        "expected": test.expected,
        "observed": test.observed,
        "excess": test.excess,
        "p_value": test.p_value,
        "adjusted_p_value": adjusted,
        "smallest_detectable": test.smallest_detectable(level),
    }


def _of_joint(joint: JointResult | None, adjusted: float | None, false_alarm: float, level: float) -> Finding:
    name = "joint law of three tokens"
    if joint is None:
        reason = "under these options no prompt leaves more than one answer over three tokens"
        return Finding(Part.STATISTICAL, name, Status.DOES_NOT_APPLY, reason)
    detectable = joint.smallest_detectable(level)
    summary = (
        f"{joint.answers:,} answers over a vocabulary of {len(joint.kept)} tokens, {joint.cells} cells: chi-square "
        f"{joint.statistic:.1f}, {_told(adjusted)}; a total variation of {detectable:.3f} in any "
        f"direction among them would have been found; {joint.accepted:.2f} drafted tokens accepted per call"
    )
    facts = {
        "answers": joint.answers,
        "cells": joint.cells,
        "chi_square": joint.statistic if math.isfinite(joint.statistic) else None,
        "p_value": joint.p_value,
        "adjusted_p_value": adjusted,
        "smallest_detectable_tv": detectable,
        "accepted_per_call": joint.accepted,
        "kept_ids": list(joint.kept),
    }
    if adjusted is None:
        return Finding(Part.STATISTICAL, name, Status.MEASURED, summary, facts)
    status = Status.FAILS if adjusted < false_alarm else Status.HOLDS
    return Finding(Part.STATISTICAL, name, status, summary, facts)


def _told(adjusted: float | None) -> str:
    if adjusted is None:
        return "not judged, for rounding moves the law or there are too few answers"
    return f"p-value after Holm {adjusted:.2g}"
