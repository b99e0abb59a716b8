"""Sampled answers of the whole pipeline against the target's distribution: single tokens, and three tokens jointly.

The joint test uses a vocabulary of three tokens of the user's own model: all logits outside a few ids become -inf. Then
the joint distribution of the second to fourth token of an answer, which speculative steps decide, can be summed exactly
from forwards over every prefix, and answers are counted against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import (
    Check,
    Context,
    Deadline,
    Finding,
    Part,
    ReportProgress,
    Status,
    check_sound,
    numbered,
    open_ended,
)
from truedraft.certify.e_process import ALARM, ENOUGH, POWER, TestResult, TokenTests, log_dirichlet, smallest_detectable
from truedraft.certify.rounding import measure_rounding
from truedraft.certify.sampling import Decision, beginnings, plain_logits, plain_probs, scored_answers
from truedraft.core.intervals import Interval, ratio_of_totals
from truedraft.core.params import SamplingParams
from truedraft.core.theory import holm
from truedraft.core.verdict import Divergence
from truedraft.drafters.portfolio import with_members
from truedraft.models.base import LanguageModel
from truedraft.options import record_of
from truedraft.testing import altered, reduced

FALSE_ALARM = 1.0 / ALARM
"""Largest probability that the statistics of a correct stack keep a certificate from being issued."""
_MARGIN = 0.5  # margin on measured rounding, relative
_ROUNDING = 0.045
_ROUNDING_TEXTS = 4
_JOINT = 0.25
TOKENS_SHARE = 1.0 - _JOINT
_BEGINNING, _WHOLE = 16, 8
_SHOWN = 5

_KEPT = 3
_LOOKED_AT = 3
_LENGTH = 1 + _LOOKED_AT
_BATCH = 32
_LEAST_ANSWERS = 256
_PROMPT = 8
_CANDIDATES = 16
_FINALISTS = 3


class Statistics(Check):
    """Tests of sampled answers, with Holm's correction over the tests of tokens and that of the joint distribution."""

    part = Part.STATISTICAL
    share = 0.45

    def run(self, context: Context) -> list[Finding]:
        allowance = _allowance(context)
        tests = self._sampled(context, allowance)
        results = tests.results()
        joint = joint_result(context, context.deadline(_JOINT), lambda done: context.tell(1.0 - _JOINT + _JOINT * done))
        # At one prompt rounding is the same in every answer, so enough answers would always reveal it.
        counted = joint is not None and allowance == 0.0
        p_values = [test.p_value for test in results] + ([joint.p_value] if joint and counted else [])
        adjusted = holm(p_values)
        level = FALSE_ALARM / len(p_values)
        return [
            self._of_tokens(tests, adjusted[: len(results)], allowance, level),
            self._of_joint(joint, adjusted[-1] if counted else None, level),
        ]

    def _sampled(self, context: Context, allowance: float) -> TokenTests:
        """Test tokens until the time is over, or longer if little could have been found by then."""
        tests = TokenTests(context.stack.target.vocab_size, context.batch, allowance)
        deadline = context.deadline(TOKENS_SHARE)
        patience = context.patience(leaving=_JOINT)
        prompts = beginnings(context.prompts, _BEGINNING, _WHOLE)
        for answers in scored_answers(context.stack, prompts, context.params, context.batch):
            for scored in answers:
                tests.add(scored)
            context.tell((1.0 - _JOINT) * deadline.fraction)
            if deadline.over and (patience.over or tests.smallest_detectable(FALSE_ALARM) <= ENOUGH):
                break
        return tests

    def _of_tokens(self, tests: TokenTests, adjusted: Sequence[float], allowance: float, level: float) -> Finding:
        results = tests.results()
        impossible = tests.impossible > 0 and allowance == 0.0
        smallest = min(range(len(adjusted)), key=lambda i: (adjusted[i], i))
        fails = adjusted[smallest] < FALSE_ALARM or impossible
        detectable = tests.smallest_detectable(level * len(results))
        worst = results[smallest]
        summary = (
            f"{tests.tokens:,} tokens, {tests.judged:,} of them at nodes with a draft, {len(results)} tests: "
            f"smallest p-value after Holm {adjusted[smallest]:.2g}"
            f" ({worst.name}, {worst.excess:+.4f}); a total variation of {detectable:.3f} on any of these events "
            "would have been found"
        )
        if tests.impossible:
            summary += f"; {tests.impossible} tokens that the target's distribution forbids"
        facts: dict[str, Any] = {
            "tokens": tests.tokens,
            "tokens_with_a_draft": tests.judged,
            "tests": len(results),
            "false_alarm": FALSE_ALARM,
            "smallest_adjusted_p_value": adjusted[smallest],
            "smallest_detectable_tv": detectable,
            "impossible_tokens": tests.impossible,
            "rounding_allowed_tv": allowance,
            "least_likely": [
                _test_facts(results[i], adjusted[i], level)
                for i in sorted(range(len(adjusted)), key=lambda i: results[i].p_value)[:_SHOWN]
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
            outcome = "not judged, for rounding moves the distribution"
            status = Status.MEASURED
        else:
            outcome = f"p-value after Holm {adjusted:.2g}"
            status = Status.FAILS if adjusted < FALSE_ALARM else Status.HOLDS
        detectable = joint.smallest_detectable(level)
        summary = (
            f"{joint.answers:,} answers over a vocabulary of {len(joint.kept)} tokens, {joint.cells} cells: {outcome}; "
            f"a total variation of {detectable:.3f} in any direction among them would have been found; "
            f"{joint.accepted:.2f} drafted tokens accepted per call"
        )
        facts = record_of(joint, "answers", "cells", "p_value") | {
            "adjusted_p_value": adjusted,
            "smallest_detectable_tv": detectable,
            "accepted_per_call": joint.accepted,
            "kept_ids": list(joint.kept),
        }
        return Finding(Part.STATISTICAL, name, status, summary, facts)


def sampled_finding(earlier: Sequence[Finding]) -> Finding | None:
    """The finding of the tests of sampled tokens; None if there is none, or if the drafter gave up."""
    return next((each for each in earlier if each.part is Part.STATISTICAL and "tests" in each.facts), None)


def _allowance(context: Context) -> float:
    """Largest total variation of a token's distribution that rounding explains; 0 if rows are invariant."""
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
    facts = {"test": test.name} | record_of(test, "tokens", "expected", "observed", "excess", "p_value")
    return facts | {"adjusted_p_value": adjusted, "smallest_detectable": test.smallest_detectable(level)}


@dataclass(frozen=True, slots=True)
class JointResult:
    """Counted answers."""

    counts: Tensor  # [cells], float64: by the second to fourth token; last, those that the target forbids
    probs: Tensor  # [cells], float64: the target's joint distribution
    accepted: float  # drafted tokens per target call; shows that drafts were verified
    kept: tuple[int, ...]  # the ids that remain possible

    @property
    def answers(self) -> int:
        return int(self.counts.sum())

    @property
    def cells(self) -> int:
        return int((self.probs > 0.0).sum())

    @property
    def p_value(self) -> float:
        return math.exp(-max(log_dirichlet(self.counts, self.probs), 0.0))

    def smallest_detectable(self, false_alarm: float) -> float:
        return smallest_detectable(self.probs, self.answers, -math.log(false_alarm), POWER)


def joint_result(context: Context, deadline: Deadline, tell: ReportProgress) -> JointResult | None:
    """Count answers over a reduced vocabulary, a few hundred at least; None if no prompt leaves any choice."""
    stack, params = context.stack, context.params
    found = _best_prompt(stack.target, context.prompts, params)
    if found is None:
        return None
    prompt, kept, joint = found
    members = {
        name: member if member.model is None else altered(member, model=reduced(member.model, kept))
        for name, member in stack.drafter.members.items()
    }
    drafter = with_members(stack.drafter, members)
    engine = stack.but(target=reduced(stack.target, kept), drafter=drafter).engine(_BATCH)
    cell_of = {tokens: cell for cell, tokens in enumerate(itertools.product(kept, repeat=_LOOKED_AT))}
    counts = torch.zeros(len(cell_of) + 1, dtype=torch.float64)
    calls = accepted = 0
    options = open_ended(params, _LENGTH)
    for first in itertools.count(0, _BATCH):
        many = [numbered(options, first + place) for place in range(_BATCH)]
        for answer in engine.generate([list(prompt)] * _BATCH, many):
            check_sound(answer, stack.drafter.name)
            counts[cell_of.get(tuple(answer.token_ids[1:]), -1)] += 1
            calls, accepted = calls + answer.stats.target_calls, accepted + answer.stats.accepted_tokens
        tell(deadline.fraction)
        if deadline.over and (first >= _LEAST_ANSWERS or context.over):
            break
    probs = torch.cat([joint.flatten(), joint.new_zeros(1)])
    return JointResult(counts, probs, accepted / max(1, calls), kept)


def _best_prompt(
    target: LanguageModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[int], tuple[int, ...], Tensor] | None:
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


_SIGMAS = 4.5  # holds for all of some hundred tests, except in one run in a thousand
_UNKNOWN = Decision(0, None, ())


class LossyDivergence(Check):
    """Measures a lossy rule by its verdicts' divergence, and by the tests of sampled answers; at least two batches."""

    part = Part.DIVERGENCE
    share = 0.7

    def run(self, context: Context) -> list[Finding]:
        stack, params, batch = context.stack, context.params, context.batch
        found: list[Divergence] = []
        tests = TokenTests(stack.target.vocab_size)
        deadline = context.deadline()
        for answers in scored_answers(stack, context.prompts, params, batch):
            found += [scored.divergence for scored in answers if scored.divergence is not None]
            for scored in () if params.greedy else answers:
                tests.add(replace(scored, decisions=[_UNKNOWN] * len(scored.tokens)))
            context.tell(deadline.fraction)
            if deadline.over and (len(found) > batch or not found):
                break
        if not found:
            summary = "the rule is lossy and says nothing of its divergence"
            return [Finding(self.part, "divergence of a token's distribution", Status.FAILS, summary)]
        return [_measured(found), *([] if params.greedy else [_outside(tests)])]


def _measured(found: Sequence[Divergence]) -> Finding:
    tokens = [each.tokens for each in found]
    distance = ratio_of_totals([each.total_variation for each in found], tokens)
    kl = ratio_of_totals([each.kl for each in found], tokens)
    greedy = ratio_of_totals([each.total_variation_greedy for each in found], tokens)
    summary = (
        f"lossy: a token's distribution is off by a total variation of {_with_margin(distance)} (95 %), "
        f"KL {_with_margin(kl)} nats, over {sum(tokens):,} tokens of {len(found)} answers; greedy decoding there would "
        f"be off by {greedy.value:.4f}"
    )
    facts = {
        "tokens": sum(tokens),
        "answers": len(found),
        "total_variation": distance.value,
        "total_variation_ci95": [max(0.0, distance.low), distance.high],
        "kl_nats": kl.value,
        "kl_nats_ci95": [max(0.0, kl.low), kl.high],
        "total_variation_greedy": greedy.value,
    }
    return Finding(Part.DIVERGENCE, "divergence of a token's distribution", Status.MEASURED, summary, facts)


def _with_margin(found: Interval) -> str:
    return f"{found.value:.4f} ± {(found.high - found.low) / 2:.4f}"


def _outside(tests: TokenTests) -> Finding:
    widest = max(tests.results(), key=lambda test: test.least_excess(_SIGMAS))
    least = widest.least_excess(_SIGMAS)
    summary = (
        f"seen from outside: on average a token's distribution is off by at least {least:.4f} ({widest.name}: "
        f"{widest.excess:+.4f} over {widest.tokens:,} tokens)"
    )
    facts = {"least_total_variation": least, "test": widest.name, "excess": widest.excess, "tokens": widest.tokens}
    return Finding(Part.DIVERGENCE, "divergence seen from outside", Status.MEASURED, summary, facts)
