"""Greedy and seeded answers with speculation, compared bitwise with plain decoding.

If two answers that must be equal diverge, that is a near tie, which rounding may decide either way, or a fault. Both
follow the same text up to that *divergence point*. The *margin* there is how far the logits would have to move for the
other token to be chosen: for greedy requests the difference of the two logits; for seeded ones the difference of log p
+ G, times the temperature. If rounding moves each logit by at most r, it moves a margin by at most 2 r.

Worked example: the logits of the two best tokens are 9.71 and 9.70, so the margin is 0.01. Shapes of plain decoding
give logits there that differ by up to 0.006. A margin below 0.012 is a near tie, so this is one. With 0.004 in place of
0.006 it is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import (
    Check,
    Context,
    Deadline,
    Finding,
    Part,
    Stack,
    Status,
    numbered,
    recovered,
    share_of,
)
from truedraft.certify.rounding import Rounding, compare_shapes, measure_rounding
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import most_likely, probs_from_logits
from truedraft.core.stats import Counters
from truedraft.engine import Answer, Engine
from truedraft.machine import dtype_name
from truedraft.models.base import LanguageModel

_MOST_FAULTS = 4  # maximum number of traced faults; one is enough to fail, and a broken stack diverges everywhere
_ROUNDING_TEXTS = 8
_ROUNDING_PLACES = 8
"""Positions per text: few, because each text is computed in a dozen shapes, and a short certificate has one text."""
_ROUNDING_SHARE = 0.15  # of the time
_MOST_LOADING = 1.0 / 3.0  # of the time for a certificate
_NEAR = 16  # positions up to the divergence over which rounding is measured; one position shows too few roundings
_HALVINGS = 60


class Equality(Check):
    """Compares tokens and finish reasons of answers with those of plain decoding, in batches of 1 and of `batch`.

    Greedy answers are always compared, seeded ones if the options have a seed. Stop texts are left out, because they
    act on tokens that are already decided. If there are fewer prompts than `batch`, they are repeated from later starts
    on. The time may be exceeded several times until the first batch of prompts is compared; NOT_ENOUGH if it was not.
    """

    part = Part.EQUALITY
    share = 0.12

    def run(self, context: Context) -> list[Finding]:
        stack, params = context.stack, context.params
        label = dtype_name(stack.target.dtype)
        kinds = {"greedy": as_greedy(params)}
        if params.seeded:
            kinds["seeded"] = replace(params, stop=())
        share = (1.0 - _ROUNDING_SHARE) / len(kinds)
        findings: list[Finding] = []
        texts: list[list[int]] = []
        for number, (kind, options) in enumerate(kinds.items()):
            tell = share_of(lambda done: context.tell(done * (1.0 - _ROUNDING_SHARE)), number, len(kinds))
            comparisons, some = _compared(replace(context, params=options, tell=tell), share)
            texts += some
            findings += [
                comparison.finding(
                    self.part,
                    f"{kind}, batch {size}, {label}",
                    stack,
                    "plain decoding's",
                    least=size,  # fewer answers are no evidence
                    dtype=label,
                )
                for size, comparison in comparisons.items()
            ]
        if texts:
            findings.insert(0, self._rounding(context, texts, label))
        context.tell(1.0)
        return findings

    def _rounding(self, context: Context, texts: Sequence[list[int]], label: str) -> Finding:
        rounding = measure_rounding(
            context.stack.target,
            sorted(texts, key=len, reverse=True)[:_ROUNDING_TEXTS],
            context.batch,
            context.params,
            context.stack.drafter.limits,
            positions=_ROUNDING_PLACES,
            seconds=context.seconds * _ROUNDING_SHARE,
        )
        status = Status.HOLDS if rounding.bitwise else Status.MEASURED if rounding.is_rounding else Status.FAILS
        words = rounding.describe()
        return Finding(self.part, f"rounding, {label}", status, f"{words[0].upper()}{words[1:]}.", rounding.as_dict())


class EqualityInFloat32(Check):
    """The same comparison for the stack in float32, where rounding is smallest; omitted for a float32 stack.

    `load` makes that stack in about `takes_s`; the check does not apply if that is more than `_MOST_LOADING` of
    `whole_s`.
    """

    part = Part.EQUALITY
    share = 0.05

    def __init__(self, load: Callable[[], Stack], takes_s: float = 0.0, whole_s: float = math.inf) -> None:
        self._load = load
        self._takes_s = takes_s
        self.extra_s = takes_s if takes_s <= _MOST_LOADING * whole_s else 0.0

    def run(self, context: Context) -> list[Finding]:
        if context.end_s < self._takes_s:
            reason = (
                f"loading the model again takes about {self._takes_s:.0f} s, more than a third of the time; give about "
                f"--minutes {self._takes_s / _MOST_LOADING / 60.0:.1f}"
            )
            return [Finding(self.part, "greedy, float32", Status.DOES_NOT_APPLY, reason)]
        return Equality().run(replace(context, stack=self._load()))


def as_greedy(params: SamplingParams) -> SamplingParams:
    """The same request at temperature 0, without stop texts."""
    return SamplingParams(params.max_tokens, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos)


def enough_prompts(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """At least `count` prompts, repeated from later starts: equal neighbours would hide a mix-up of their rows."""
    found = [list(prompt) for prompt in prompts]
    for number in range(count - len(prompts)):
        prompt, later = prompts[number % len(prompts)], 1 + number // len(prompts)
        found.append(list(prompt[min(later, len(prompt) - 1) :]))
    return found


def _compared(context: Context, share: float) -> tuple[dict[int, Comparison], list[list[int]]]:
    prompts = enough_prompts(context.prompts, context.batch)
    each = [numbered(context.params, number) for number in range(len(prompts))]
    plain = context.stack.plain(1)
    engines = {size: context.stack.engine(size) for size in sorted({1, context.batch})}
    comparisons = {size: Comparison() for size in engines}
    texts: list[list[int]] = []

    def compare_group(group: Sequence[int], deadline: Deadline) -> None:
        def answers(engine: Engine, numbers: Sequence[int]) -> list[Answer]:
            answered = deadline.answers(engine, [prompts[i] for i in numbers], [each[i] for i in numbers])
            return [answer for _, answer in answered]

        def compare(size: int, numbers: Sequence[int], expected: Sequence[Answer]) -> None:
            found = answers(engines[size], numbers)
            for number, one, other in zip(numbers, expected, found, strict=True):
                own = replace(context, prompts=[prompts[number]], params=each[number], batch=size)
                comparisons[size].add(one, other, own, number)

        expected: list[Answer] = []
        for number in group:
            expected += answers(plain, [number])
            texts.append([*prompts[number], *expected[-1].token_ids])
            compare(1, [number], expected[-1:])
        if context.batch > 1:
            compare(context.batch, group, expected)

    numbers = range(len(prompts))
    groups = [numbers[i : i + context.batch] for i in numbers[:: context.batch]]
    context.one_by_one(groups, compare_group, share)
    return comparisons, texts


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass
class Comparison:
    """Answers compared with the references that they must equal."""

    compared: int = 0  # tokens of the references
    answers: int = 0
    points: list[DivergencePoint] = field(default_factory=list)
    untraced: int = 0  # divergences after several faults, or without margins
    stats: Counters = field(default_factory=Counters)
    warnings: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[DivergencePoint]:
        return [point for point in self.points if point.fault]

    def add(self, expected: Answer, found: Answer, request: Context, number: int, *, has_margins: bool = True) -> None:
        """Compare an answer to prompt `number` with its reference; without margins a divergence is only counted."""
        self.answers += 1
        self.compared += len(expected.token_ids)
        self.stats += found.stats
        self.warnings += found.warnings
        if expected.token_ids == found.token_ids and expected.finish_reason == found.finish_reason:
            return
        if has_margins and len(self.faults) < _MOST_FAULTS:
            self.points.append(divergence_point(expected, found, request, number))
        else:
            self.untraced += 1

    def finding(
        self, part: Part, name: str, stack: Stack, others: str, *, least: int = 1, explained: float = 0.0, **facts: Any
    ) -> Finding:
        """The finding for all comparisons; rounding explains up to `explained` divergences without margins."""
        faults, near = self.faults, len(self.points) - len(self.faults)
        failures = [*self.warnings, *recovered(self.stats, stack.drafter.name)]
        too_few = self.answers < least or not self.compared
        # A drafter that gave up leaves plain decoding, which equals itself.
        status = Status.FAILS if faults or failures else Status.NOT_ENOUGH if too_few else Status.HOLDS
        compared = f"{self.compared} tokens of {self.answers} answers compared with {others}"
        if faults:
            count = len(faults) + self.untraced
            summary = f"{compared}: {_count(count, 'fault')}, the first at {faults[0].describe()}"
        elif self.untraced:
            status = Status.FAILS if failures or self.untraced > explained else Status.MEASURED
            summary = f"{compared}: {self.untraced} answers differ; rounding explains at most {explained:.4g} of them"
            facts["explained_by_rounding"] = explained
        elif too_few:
            summary = f"{compared}, which says too little; give more minutes"
        elif near:
            summary = f"{compared}: {_count(near, 'near tie')} and no fault; the first at {self.points[0].describe()}"
        else:
            summary = f"{compared}: bit for bit equal"
        if failures:
            summary += f"; {_count(len(failures), 'warning')}, the first: {failures[0]}"
        return Finding(part, name, status, f"{summary}.", {**self.as_dict(), **facts})

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "tokens_compared": self.compared,
            "draft_tokens": self.stats.draft_tokens,
            "accepted_tokens": self.stats.accepted_tokens,
            "identical": not self.points and not self.untraced,
            "near_ties": [point.as_dict() for point in self.points if not point.fault],
            "faults": [point.as_dict() for point in self.faults],
            "untraced": self.untraced,
            "recoveries": self.stats.recoveries,
            "warnings": self.warnings,
        }


@dataclass(frozen=True, slots=True)
class DivergencePoint:
    """The first position where two answers to one request differ."""

    prompt: int  # its number
    position: int  # number of equal tokens before it
    expected: int | None  # the reference's token; None if it had ended
    found: int | None  # the other answer's token; None if it had ended
    texts: tuple[str, str]
    best: tuple[tuple[int, float], ...]  # the two tokens with the largest logits there, and these logits
    margin: float  # how far logits must move for the other token to be chosen; infinite if no move suffices
    rounding: Rounding | None
    fault: bool  # rounding does not explain it
    reason: str

    def describe(self) -> str:
        best = " and ".join(f"{token} ({logit:.5g})" for token, logit in self.best)
        return (
            f"prompt {self.prompt}, token {self.position}: {self.texts[1]} in place of {self.texts[0]}"
            f"{f'; the two best there are {best}' if best else ''}; "
            f"{'fault' if self.fault else 'near tie'}: {self.reason}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record; an infinite margin is None."""
        rounding = self.rounding
        return {
            "prompt": self.prompt,
            "position": self.position,
            "expected": {"id": self.expected, "text": self.texts[0]},
            "found": {"id": self.found, "text": self.texts[1]},
            "best": [{"id": token, "logit": logit} for token, logit in self.best],
            "margin": self.margin if math.isfinite(self.margin) else None,
            "rounding": None if rounding is None else rounding.largest_difference,
            "rounding_plain": None if rounding is None else rounding.plain_difference,
            "rounding_drafted": None if rounding is None else rounding.drafted_difference,
            "fault": self.fault,
            "reason": self.reason,
        }


def divergence_point(expected: Answer, found: Answer, request: Context, number: int) -> DivergencePoint:
    """Find and judge the first difference; the target must decode plainly as it did for the reference."""
    target, params, prompt = request.stack.target, request.params, request.prompts[0]
    answers = expected, found
    shortest = min(len(answer.token_ids) for answer in answers)
    place = next((i for i in range(shortest) if expected.token_ids[i] != found.token_ids[i]), shortest)
    first, second = (each.token_ids[place] if place < len(each.token_ids) else None for each in answers)
    texts = _shown(target, expected, first), _shown(target, found, second)
    fault = partial(DivergencePoint, number, place, first, second, texts, (), math.inf, None, True)

    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None:
        return fault(f"the request failed ({failed.error})")
    if any(
        token is None and answer.finish_reason != "stop" for token, answer in zip((first, second), answers, strict=True)
    ):
        return fault("no token was chosen there, so no logits decided where the answer ends")
    before = [*prompt, *expected.token_ids[:place]]
    near = max(len(prompt), len(before) - _NEAR + 1)
    limits = request.stack.drafter.limits
    logits, rounding = compare_shapes(target, [*before, 0], len(prompt), near, request.batch, params, limits)
    row = logits[-1]
    order = row.double().topk(min(2, len(row)))
    best = tuple(zip(order.indices.tolist(), order.values.tolist(), strict=True))
    choose = chooser(params, len(before), row)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)}
    choices = [stops if token is None else {token} for token in (first, second)]
    margin = max(lead_needed(row, choose, tokens) for tokens in choices)
    return DivergencePoint(number, place, first, second, texts, best, margin, rounding, *_judged(margin, rounding))


def lead_needed(row: Tensor, choose: Callable[[Tensor], int], tokens: Collection[int]) -> float:
    """The smallest amount that must be added to the logits `[vocab]` of some tokens until one of them is chosen.

    Found by bisection of `choose`, from logits to a token, so that it is right also if top-k, top-p or min-p removes a
    token: 0 if one of them is chosen already, infinite if no amount suffices.
    """
    logits = row.double()
    places = torch.tensor(sorted(tokens), dtype=torch.int64, device=row.device)
    if not len(places) or not logits[places].isfinite().any():
        return math.inf

    def enough(lead: float) -> bool:
        raised = logits.clone()
        raised[places] += lead
        return choose(raised) in tokens

    finite = logits[logits.isfinite()]
    low, high = 0.0, 2.0 * float(finite.max() - finite.min()) + 1.0
    if enough(low):
        return 0.0
    while not enough(high):  # Gumbel noise is multiplied by the temperature, which has no bound
        high *= 4.0
        if high > 1e9:
            return math.inf
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def chooser(params: SamplingParams, position: int, row: Tensor) -> Callable[[Tensor], int]:
    """The function from logits at a position to the token that a greedy or seeded request chooses."""
    if params.greedy:
        return lambda logits: int(most_likely(logits[None]))
    assert params.seed is not None
    noise = KeyedNoise(params.seed, position, 0)
    gumbel = noise.gumbel(0, len(row), row.device)
    return lambda logits: int(most_likely(probs_from_logits(logits[None], params).double().log_().add_(gumbel)))


def _judged(margin: float, rounding: Rounding) -> tuple[bool, str]:
    if rounding.bitwise or not rounding.is_rounding:
        return True, f"the margin is {margin:.4g}, and {rounding.describe()}"
    allowed = rounding.largest_difference
    if margin > 2.0 * allowed:
        return True, (
            f"the margin {margin:.4g} is above {2.0 * allowed:.4g}, twice the largest difference of logits that was "
            "measured there"
        )
    return False, (
        f"the margin {margin:.4g} is not above {2.0 * allowed:.4g}: rounding moves a logit there by up to "
        f"{allowed:.4g}, and a margin by twice that"
    )


def _shown(target: LanguageModel, answer: Answer, token: int | None) -> str:
    if token is None:
        return f"the end ({answer.finish_reason})"
    return str(token) if target.tokenizer is None else f"{token} {target.tokenizer.decode([token])!r}"
