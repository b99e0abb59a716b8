"""A certificate of a stack: its checks, run one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from truedraft.certify import checks as common
from truedraft.certify.checks import Check, Context, Finding, Part, Stack, Status, check_run, open_ended, share_of
from truedraft.certify.controls import ComparedControls, SampledControls
from truedraft.certify.draft_state import DraftState
from truedraft.certify.e_process import ENOUGH, Events, TestResult
from truedraft.certify.equality import Equality, EqualityInFloat32, as_greedy
from truedraft.certify.exact import Exact
from truedraft.certify.faults import SHARED_BY_TOKENS
from truedraft.certify.invariance import Invariance
from truedraft.certify.report import Report, option_words
from truedraft.certify.sampling import beginnings, scored_answers
from truedraft.certify.statistics import FALSE_ALARM, TOKENS_SHARE, LossyDivergence, Statistics
from truedraft.core.params import SamplingParams
from truedraft.errors import DrafterError, OptionError


def certify(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    batch: int = 1,
    seconds: float = 300.0,
    most_seconds: float = math.inf,
    tell: Callable[[Part, float], None] = lambda part, done: None,
    announce: Callable[[str], None] | None = None,
    in_float32: EqualityInFloat32 | None = None,
) -> Report:
    """Check that a stack answers as its target does without speculation.

    Args:
        stack: its entropy fixes the noise of requests without a seed.
        prompts: token ids, each shorter than the target's context; more prompts give more power.
        params: sampling options, and the seed of seeded requests. At most `max_tokens` of an answer are compared.
        batch: requests in a step.
        seconds: approximate duration; up to four times as long with little evidence. Exact sums take their own time.
        most_seconds: hard limit, except for the computation in progress.
        tell: callback with a part and its completed fraction.
        announce: callback before the checks with a prediction of what the time can show; None skips the trial.
        in_float32: compares greedy and seeded answers of the same stack in float32; None skips it.

    Raises OptionError for no prompts, or a batch, time or options that cannot be used; TruedraftError if the target
    failed.
    """
    check_run(prompts, stack.target.context_length - 2, batch, seconds)
    began = common.now()
    checks = checks_of(stack, params, in_float32)
    shared_s = seconds - sum(check.extra_s for check in checks)
    whole = Context(stack, prompts, params, batch, shared_s, ends=began + most_seconds)
    try:
        if announce is not None and stack.rule.lossless:
            with suppress(DrafterError):  # the checks meet it, too, and report it
                announce(predicted_time(whole, min(shared_s, most_seconds)))
        findings = _findings(checks, whole, tell)
    finally:  # drafters follow the target of their last check: restore the user's
        stack.drafter.check(stack.target)
    return Report(
        "Certificate",
        findings,
        ", ".join([*option_words(params), *["seeded"] * params.seeded, f"batch {batch}"]),
        _notes(findings),
        {"lossless": stack.rule.lossless, "batch": batch},
        lossy=not stack.rule.lossless,
        seconds=common.now() - began,
    )


def _findings(checks: Sequence[Check], whole: Context, report: Callable[[Part, float], None]) -> list[Finding]:
    findings: list[Finding] = []
    for number, check in enumerate(checks):
        own = [each for each in checks if each.part is check.part]
        left_s = whole.ends - common.now()
        coming_s = sum(each.share for each in checks[number:]) * whole.seconds
        extra_s = sum(each.extra_s for each in checks[number:])
        scale = min(1.0, max(left_s - extra_s, 0.0) / coming_s)
        seconds = check.share * whole.seconds * scale
        context = replace(
            whole,
            seconds=seconds,
            tell=share_of(partial(report, check.part), own.index(check), len(own)),
            earlier=tuple(findings),
            ends=whole.ends - (coming_s * scale - seconds) - (extra_s - check.extra_s),  # less the time of later checks
        )
        try:
            findings += check.run(context)
        except DrafterError as error:
            findings.append(Finding(check.part, "drafting", Status.FAILS, str(error)))
    return findings


def checks_of(stack: Stack, params: SamplingParams, in_float32: EqualityInFloat32 | None = None) -> list[Check]:
    """The checks of a certificate for a stack and options, in their order.

    Raises OptionError for options that shape logits, or a seed with a lossy rule.
    """
    if params.seeded:
        stack.rule.check_seed()
    if params.shapes_logits:
        raise OptionError(
            "a certificate compares distributions by temperature, top-k, top-p and min-p; leave out penalties, biases, "
            "banned tokens, min_tokens and structured (docs/options.md shows that they are exact)"
        )
    if not stack.rule.lossless:
        return [Exact(), LossyDivergence(), Invariance(), DraftState()]
    equality: list[Check] = [Equality()]
    if in_float32 is not None and stack.target.dtype is not torch.float32:
        equality.append(in_float32)
    if params.greedy:
        tests: list[Check] = [ComparedControls()]
    elif params.seed is None:
        tests = [Statistics(), SampledControls()]
    else:  # the tests of sampled answers cover what the comparison cannot see
        tests = [Statistics(), ComparedControls(share=0.15), SampledControls([SHARED_BY_TOKENS], share=0.1)]
    return [Exact(), *equality, *tests, Invariance(), DraftState()]


def _notes(findings: Sequence[Finding]) -> list[str]:
    notes = []
    if any(finding.part is Part.STATISTICAL for finding in findings):
        notes.append(
            f"A correct stack fails the statistical checks with probability {FALSE_ALARM:g} at most; their lines "
            "say what they would have found with probability 0.99."
        )
    if any(finding.part is Part.CONTROLS for finding in findings):
        notes.append("Each negative control plants a fault that the same tests must find, or they are not trusted.")
    return [
        *notes,
        "It is about this target, drafter, rule, dtype, device and these options, as far as was tested here.",
    ]


_TRIED = 16  # tokens of a trial's answer
_MINUTE = 60.0


def predicted_time(context: Context, seconds: float) -> str:
    """A sentence with the measured rate, the number of tokens in `seconds`, and the detectable deviation."""
    stack, length = context.stack, min(_TRIED, context.params.max_tokens)
    if context.params.greedy:
        options, prompt = open_ended(as_greedy(context.params), length), [list(context.prompts[0])[:_TRIED]]
        engines = [stack.plain(1), stack.engine(1)]
        rate = _per_s(lambda: sum(len(each.generate(prompt, options)[0].token_ids) for each in engines) // 2)
        tokens = int(rate * Equality.share * seconds)
        return (
            f"{rate:.1f} tokens a second are answered plainly and with speculation, so in {_said(seconds)} about "
            f"{tokens:,} are compared with plain decoding's"
        )
    prompts = beginnings(context.prompts, _TRIED, len(context.prompts))
    answers = scored_answers(stack, prompts, context.params, context.batch, length=length)
    rate = _per_s(lambda: sum(len(scored.tokens) for scored in next(answers)))
    share = Statistics.share * TOKENS_SHARE
    found = detectable(int(rate * share * seconds), context)
    most = max(seconds, 1.0)
    while detectable(int(rate * share * most), context) > ENOUGH:
        most *= 1.1
    enough = (
        "which is enough for a verdict"
        if found <= ENOUGH
        else (f"which is too little for a verdict: that takes {ENOUGH:g}, and about --minutes {most / _MINUTE:.1f}")
    )
    return (
        f"{rate:.1f} tokens a second are answered and tested, so in {_said(seconds)} about "
        f"{int(rate * share * seconds):,} tokens, among which a total variation of {found:.3f} would be found, {enough}"
    )


def detectable(tokens: int, context: Context) -> float:
    """The total variation that tests of so many tokens detect, on the events with the largest variance."""
    tests = len(Events(context.stack.target.vocab_size, context.batch).names)
    whole = TestResult("", tokens, tokens / 2, tokens // 2, tokens / 4, 1.0)
    return whole.smallest_detectable(FALSE_ALARM / tests)


def _per_s(trial: Callable[[], int]) -> float:
    """Tokens of a trial per second; the first of two trials is a warm-up."""
    trial()
    began = common.now()
    return trial() / max(common.now() - began, 1e-9)


def _said(seconds: float) -> str:
    return f"{seconds / _MINUTE:.1f} minutes" if seconds >= _MINUTE else f"{seconds:.0f} seconds"
