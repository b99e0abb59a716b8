"""Prediction of what a certificate can show in its time, from a trial of the stack before it begins."""

from __future__ import annotations

from collections.abc import Callable

from truedraft.certify import checks as common
from truedraft.certify.checks import Context, open_ended
from truedraft.certify.e_process import ENOUGH, Events, TestResult
from truedraft.certify.equality import Equality, as_greedy
from truedraft.certify.sampling import beginnings, scored_answers
from truedraft.certify.statistics import FALSE_ALARM, TOKENS_SHARE, Statistics

_TRIED = 16  # tokens of a trial's answer
_MINUTE = 60.0


def predicted_time(context: Context, seconds: float) -> str:
    """A sentence with the measured rate, the number of tokens in `seconds`, and the detectable deviation."""
    if context.params.greedy:
        rate = _compared_per_s(context)
        tokens = int(rate * Equality.share * seconds)
        return (
            f"{rate:.1f} tokens a second are answered plainly and with speculation, so in {_said(seconds)} about "
            f"{tokens:,} are compared with plain decoding's"
        )
    rate = _tested_per_s(context)
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


def _tested_per_s(context: Context) -> float:
    """Tokens per second that are generated and have their distributions computed."""
    prompts, length = beginnings(context.prompts, _TRIED, len(context.prompts)), min(_TRIED, context.params.max_tokens)
    answers = scored_answers(context.stack, prompts, context.params, context.batch, length=length)
    return _per_s(lambda: sum(len(scored.tokens) for scored in next(answers)))


def _compared_per_s(context: Context) -> float:
    """Tokens per second that are generated plainly and again with speculation."""
    options = open_ended(as_greedy(context.params), min(_TRIED, context.params.max_tokens))
    prompt = [list(context.prompts[0])[:_TRIED]]
    engines = [context.stack.plain(1), context.stack.engine(1)]
    return _per_s(lambda: sum(len(each.generate(prompt, options)[0].token_ids) for each in engines) // len(engines))


def _per_s(trial: Callable[[], int]) -> float:
    """Tokens of a trial per second; the first of two trials is a warm-up."""
    trial()
    began = common.now()
    return trial() / max(common.now() - began, 1e-9)


def _said(seconds: float) -> str:
    return f"{seconds / _MINUTE:.1f} minutes" if seconds >= _MINUTE else f"{seconds:.0f} seconds"
