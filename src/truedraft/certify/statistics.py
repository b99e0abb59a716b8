"""Sampled answers of the whole pipeline against the target's distribution: token by token, and three tokens jointly.

Jointly, over a vocabulary of three tokens of the user's own model: target and draft model are left as they are, but for
all logits outside a few ids, which become -inf. Then the joint distribution of the second to fourth token of an answer,
which speculative steps decide, can be summed exactly from forwards over every prefix, and answers are counted against
it. The chi-square statistic sees a deviation in any direction: the smallest total variation named here is that of the
direction which it sees least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import (
    PATIENCE,
    Check,
    Context,
    Deadline,
    Finding,
    Part,
    Stack,
    Status,
    Tell,
    check_sound,
    numbered,
    open_ended,
)
from truedraft.certify.e_process import POWER_SIGMAS, Events, EventTests, TestResult, holm
from truedraft.certify.rounding import measure_rounding
from truedraft.certify.sampling import Scored, beginnings, plain_logits, plain_probs, scored_answers
from truedraft.core.params import SamplingParams
from truedraft.drafters.portfolio import with_members
from truedraft.models.base import LanguageModel
from truedraft.testing import altered, reduced

FALSE_ALARM = 1e-3
"""Probability, at most, that the statistics of a correct stack keep a certificate from being issued."""
_MARGIN = 0.5
"""Where rounding moves distributions, so much more than was measured is allowed."""
_ROUNDING = 0.045
"""Of the time, for measuring rounding."""
_ROUNDING_TEXTS = 4
_JOINT = 0.25
"""Share of the time for joint distributions."""
TOKENS_SHARE = 1.0 - _JOINT
"""Share of the time for tokens at their own prefixes."""
_BEGINNING, _WHOLE = 16, 8
_SHOWN = 5
ENOUGH = 0.06
"""Total variation that must be detectable: controls are to be three times as large, and few reach more than 0.2."""

_KEPT = 3
_LOOKED_AT = 3
_LENGTH = 1 + _LOOKED_AT
_BATCH = 32
_LEAST_EXPECTED = 20.0
_LEAST_ANSWERS = 256
_PROMPT = 8
_CANDIDATES = 16
_FINALISTS = 3


class Statistics(Check):
    """Tests of sampled answers: Holm over all tests, those of tokens and that of the joint distribution together.

    Args:
        false_alarm: probability, at most, that a correct stack fails any of the tests.
    """

    part = Part.STATISTICAL
    share = 0.45

    def __init__(self, false_alarm: float = FALSE_ALARM) -> None:
        self._false_alarm = false_alarm

    def run(self, context: Context) -> list[Finding]:
        allowance = _allowance(context)
        sample = self._sampled(context, allowance)
        joint = joint_result(context, context.deadline(_JOINT), lambda done: context.tell(1.0 - _JOINT + _JOINT * done))
        # At one prompt rounding is the same in every answer, so counts of answers would find it sooner or later.
        counted = joint is not None and joint.cells > 1 and allowance == 0.0
        p_values = [test.p_value for test in sample.tests] + ([joint.p_value] if joint and counted else [])
        adjusted = holm(p_values)
        level = self._false_alarm / len(p_values)
        return [
            self._of_tokens(sample, adjusted[: len(sample.tests)], allowance, level),
            self._of_joint(joint, adjusted[-1] if counted else None, level),
        ]

    def _sampled(self, context: Context, allowance: float) -> Sample:
        """Tokens until the time is over, or longer where little could have been found by then."""
        tests = TokenTests(context.stack.target.vocab_size, context.batch, allowance)
        deadline = context.deadline(TOKENS_SHARE)
        patience = context.deadline(PATIENCE, leaving=_JOINT)
        prompts = beginnings(context.prompts, _BEGINNING, _WHOLE)
        for answers in scored_answers(context.stack, prompts, context.params, context.batch):
            for scored in answers:
                tests.add(scored)
            context.tell((1.0 - _JOINT) * deadline.fraction)
            if deadline.over and (patience.over or tests.sample().smallest_detectable(self._false_alarm) <= ENOUGH):
                break
        return tests.sample()

    def _of_tokens(self, sample: Sample, adjusted: Sequence[float], allowance: float, level: float) -> Finding:
        impossible = sample.impossible > 0 and allowance == 0.0
        smallest = min(range(len(adjusted)), key=lambda i: (adjusted[i], i))
        fails = adjusted[smallest] < self._false_alarm or impossible
        detectable = sample.smallest_detectable(level * len(sample.tests))
        worst = sample.tests[smallest]
        summary = (
            f"{sample.tokens:,} tokens, {sample.judged:,} of them at nodes with a draft, {len(sample.tests)} tests: "
            f"smallest p-value after Holm {adjusted[smallest]:.2g}"
            f" ({worst.name}, {worst.excess:+.4f}); a total variation of {detectable:.3f} on any of these events "
            "would have been found"
        )
        if sample.impossible:
            summary += f"; {sample.impossible} tokens that the target's distribution forbids"
        facts: dict[str, Any] = {
            "tokens": sample.tokens,
            "tokens_with_a_draft": sample.judged,
            "tests": len(sample.tests),
            "false_alarm": self._false_alarm,
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

    def _of_joint(self, joint: JointResult | None, adjusted: float | None, level: float) -> Finding:
        name = "joint distribution of three tokens"
        if joint is None:
            reason = "under these options no prompt leaves more than one answer over three tokens"
            return Finding(Part.STATISTICAL, name, Status.DOES_NOT_APPLY, reason)
        if adjusted is None:
            told = "not judged, for rounding moves the distribution or there are too few answers"
            status = Status.MEASURED
        else:
            told = f"p-value after Holm {adjusted:.2g}"
            status = Status.FAILS if adjusted < self._false_alarm else Status.HOLDS
        detectable = joint.smallest_detectable(level)
        summary = (
            f"{joint.answers:,} answers over a vocabulary of {len(joint.kept)} tokens, {joint.cells} cells: chi-square "
            f"{joint.statistic:.1f}, {told}; a total variation of {detectable:.3f} in any "
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
        return Finding(Part.STATISTICAL, name, status, summary, facts)


def sampled_finding(earlier: Sequence[Finding]) -> Finding | None:
    """What the tests of sampled tokens came to; None where there were none, or the drafter gave up."""
    return next((each for each in earlier if each.part is Part.STATISTICAL and "tests" in each.facts), None)


def _allowance(context: Context) -> float:
    """How far rounding may put the distribution of a token off, in total variation; 0 where rows are invariant."""
    prompts = context.prompts
    texts = [list(prompt) for prompt in prompts if len(prompt) > 1][:_ROUNDING_TEXTS]
    texts = texts or [[*prompts[0], *prompts[0]]]
    rounding = measure_rounding(
        context.stack.target,
        texts,
        context.batch,
        context.params,
        context.stack.drafter.limits,
        seconds=_ROUNDING * context.seconds,
    )
    return 0.0 if rounding.bitwise else (1.0 + _MARGIN) * rounding.mean_total_variation


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


# ---------------------------------------------------------------------------------------- tokens at their own prefixes


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


class TokenTests:
    """Tests of a stream of answers.

    Args:
        vocab: size of the vocabulary.
        batch: requests in a batch.
        allowance: how far rounding may have put a distribution off, in total variation.
    """

    def __init__(self, vocab: int, batch: int, allowance: float) -> None:
        self._events = Events(vocab, batch)
        self._processes = EventTests(self._events.names, allowance)
        self._tokens = self._impossible = self._judged = 0

    def add(self, scored: Scored) -> None:
        """Test the tokens of one answer."""
        if not len(scored.tokens):
            return
        self._processes.add(*self._events.measure(scored))
        own = [float(scored.probs[i, token]) for i, token in enumerate(scored.tokens)]
        self._impossible += own.count(0.0)
        self._tokens += len(own)
        self._judged += sum(one.q is not None or bool(one.candidates) for one in scored.decisions)

    def sample(self) -> Sample:
        """What came of it so far."""
        return Sample(self._processes.results(), self._tokens, self._impossible, self._judged)


# ---------------------------------------------------------------------------------------- three tokens jointly


@dataclass(frozen=True, slots=True)
class JointResult:
    """What came of counting answers.

    Attributes:
        answers: how many.
        cells: of the chi-square test, rare answers counted together.
        statistic: chi-square.
        p_value: of "answers follow the target's joint distribution".
        accepted: drafted tokens accepted per target call, so that one sees that there was something to judge.
        kept: the ids that stayed possible.
    """

    answers: int
    cells: int
    statistic: float
    p_value: float
    accepted: float
    kept: tuple[int, ...]

    def smallest_detectable(self, false_alarm: float) -> float:
        """The total variation found with probability 0.99 in the direction that is seen least, at this level."""
        freedom = self.cells - 1
        if freedom < 1 or not self.answers:
            return 1.0
        critical = _quantile(freedom, false_alarm)
        # Off by 2 TV p in every cell it has the noncentrality 4 TV^2 N; the statistic is nearly normal.
        least, most = 0.0, 10.0 * critical + 1000.0
        for _ in range(60):
            middle = (least + most) / 2
            reached = freedom + middle - POWER_SIGMAS * math.sqrt(2 * (freedom + 2 * middle))
            least, most = (least, middle) if reached >= critical else (middle, most)
        return min(1.0, math.sqrt(most / (4 * self.answers)))


def joint_result(context: Context, deadline: Deadline, tell: Tell) -> JointResult | None:
    """Count answers over a reduced vocabulary until the time is over; None where no prompt leaves any choice.

    Args:
        context: stack, prompts, of which beginnings are used, and options.
        deadline: when to stop, if there are a few hundred answers or the context's end is reached.
        tell: is told the fraction done.
    """
    stack, params = context.stack, context.params
    found = _best_prompt(stack.target, context.prompts, params)
    if found is None:
        return None
    prompt, kept, joint = found
    engine = _reduced_stack(stack, kept).engine(_BATCH)
    number = {token: place for place, token in enumerate(kept)}
    counts = torch.zeros(joint.shape, dtype=torch.int64)
    calls = accepted = impossible = 0
    asked = open_ended(params, _LENGTH)
    for first in itertools.count(0, _BATCH):
        many = [numbered(asked, first + place) for place in range(_BATCH)]
        for answer in engine.generate([list(prompt)] * _BATCH, many):
            check_sound(answer, stack.drafter.name)
            places = tuple(number.get(token, -1) for token in answer.token_ids[1:])
            if min(places) < 0:
                impossible += 1  # the target forbids all but the kept ids
            else:
                counts[places] += 1
            calls, accepted = calls + answer.stats.target_calls, accepted + answer.stats.accepted_tokens
        tell(deadline.fraction)
        if deadline.over and (first >= _LEAST_ANSWERS or context.over):
            break
    statistic, cells, p_value = chi_square(counts, joint) if not impossible else (math.inf, counts.numel(), 0.0)
    answers = int(counts.sum()) + impossible
    return JointResult(answers, cells, statistic, p_value, accepted / max(1, calls), kept)


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int, float]:
    """Statistic, cells and p-value of counts under probabilities of the same shape; rare cells are counted together.

    A cell is rare below 20 expected answers; where all of these together are, they join the smallest of the others.

    Worked example: of 100 answers under (0.5, 0.5), 60 and 40 give (10^2 + 10^2) / 50 = 4, 2 cells, p-value 0.0455.
    """
    expected = probs.double().flatten() * int(counts.sum())
    observed = counts.double().flatten()
    rare = expected < _LEAST_EXPECTED
    if float(observed[expected == 0.0].sum()) > 0:
        return math.inf, len(expected), 0.0  # something impossible was emitted
    pooled = float(expected[rare].sum()), float(observed[rare].sum())
    expected, observed = expected[~rare], observed[~rare]
    if pooled[0] >= _LEAST_EXPECTED or not len(expected):
        expected = torch.cat([expected, torch.tensor([pooled[0]], dtype=torch.float64)])
        observed = torch.cat([observed, torch.tensor([pooled[1]], dtype=torch.float64)])
    else:  # together they are still too rare for the statistic to be distributed as chi-square
        least = int(expected.argmin())
        expected[least] += pooled[0]
        observed[least] += pooled[1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic, len(expected), _survival(len(expected) - 1, statistic)


def _survival(freedom: int, statistic: float) -> float:
    """P(chi-square > statistic)."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _quantile(freedom: int, level: float) -> float:
    """Where P(chi-square > x) = level."""
    low, high = 0.0, 100.0 * freedom + 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _survival(freedom, middle) > level else (low, middle)
    return high


def _reduced_stack(stack: Stack, kept: Sequence[int]) -> Stack:
    """The target over a few ids, and draft models too; other drafters guess as ever, and are accepted less often."""
    members = {
        name: member if member.model is None else altered(member, model=reduced(member.model, kept))
        for name, member in stack.drafter.members.items()
    }
    return stack.but(target=reduced(stack.target, kept), drafter=with_members(stack.drafter, members))


def _best_prompt(
    target: LanguageModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[int], tuple[int, ...], Tensor] | None:
    """The prompt, and the ids, under which tokens 2 to 4 have the most entropy, and their joint distribution."""
    beginnings = [list(prompt)[:_PROMPT] for prompt in list(prompts)[:_CANDIDATES]]
    logits = [rows[0].float() for rows in plain_logits(target, [(beginning, [0]) for beginning in beginnings])]
    kept = [tuple(sorted(row.topk(min(_KEPT, len(row))).indices.tolist())) for row in logits]
    evenness = [float(torch.softmax(row[list(ids)], -1).amax()) for row, ids in zip(logits, kept, strict=True)]
    finalists = sorted(range(len(beginnings)), key=lambda i: evenness[i])[:_FINALISTS]
    found = []
    for i in finalists:
        joint = joint_probs(reduced(target, kept[i]), beginnings[i], kept[i], params)
        found.append((float(-(torch.special.xlogy(joint, joint)).sum()), beginnings[i], kept[i], joint))
    _, prompt, ids, joint = max(found, key=lambda each: each[0])
    return None if float(joint.max()) > 1.0 - 1e-3 else (prompt, ids, joint)


def joint_probs(target: LanguageModel, prompt: Sequence[int], kept: Sequence[int], params: SamplingParams) -> Tensor:
    """The joint distribution `[kept, kept, kept]` of the second to fourth token, summed over the first."""
    size = len(kept)
    prefixes = list(itertools.product(range(size), repeat=_LOOKED_AT))
    texts = [(prompt, [*(kept[place] for place in prefix), kept[0]]) for prefix in prefixes]
    probs = torch.stack([own[:, list(kept)].double().cpu() for own in plain_probs(target, texts, params)])
    probs = (probs / probs.sum(dim=-1, keepdim=True)).view(size, size, size, _LENGTH, size)
    joint = torch.zeros(size, size, size, dtype=torch.float64)
    for first in range(size):
        start = probs[first, 0, 0, 0, first]
        second = probs[first, 0, 0, 1]  # [2nd]
        third = probs[first, :, 0, 2]  # [2nd, 3rd]
        fourth = probs[first, :, :, 3]  # [2nd, 3rd, 4th]
        joint += start * second[:, None, None] * third[:, :, None] * fourth
    return joint
