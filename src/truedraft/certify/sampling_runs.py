"""Answers of the whole pipeline at a temperature, with the target's laws at the place of every token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from truedraft.certify.clock import answer_of
from truedraft.certify.directions import Scored
from truedraft.certify.recording import RecordingDrafter, RecordingRule
from truedraft.certify.scoring import plain_laws
from truedraft.certify.stack import Stack
from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.engine import Answer
from truedraft.errors import DrafterError, ModelError
from truedraft.models.base import LanguageModel

TOKENS = 64
"""Most tokens of an answer, unless fewer are asked for: many places, and prompts taken in turn."""
_BEGINNING = 16
_SEEDS = 1 << 63
_WHOLE = 8
"""Of so many prompts one is taken whole, the others cut to their beginning: a prefill tests nothing."""


def scored_answers(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    *,
    judge: LanguageModel | None = None,
    first_seed: int = 0,
    records_laws: bool = False,
    length: int = TOKENS,
) -> Iterator[list[Scored]]:
    """Answer the prompts in turn, over and over, each time with another seed; one batch of requests after another.

    Args:
        stack: what answers.
        prompts: token ids.
        params: the user's options; an answer does not end early here.
        batch: requests in a batch.
        judge: gives the laws that tokens are held against; None is the stack's target.
        first_seed: of the first request; the others follow.
        records_laws: whether `Decision.used` is wanted.
        length: tokens of an answer.

    Raises:
        TruedraftError: a request failed, or its drafter did.
    """
    rules = [RecordingRule(stack.rule)] if records_laws else []
    drafter = RecordingDrafter(stack.drafter, rules[0] if rules else None)
    engine = stack.but(drafter=drafter, rule=rules[0] if rules else stack.rule).engine(batch)
    judge = judge if judge is not None else stack.target
    turn = itertools.cycle(_cut(prompts))
    for first in itertools.count(first_seed, batch):
        asked = list(itertools.islice(turn, batch))
        requests = [
            engine.submit(
                prompt,
                open_ended(params, (first + place) % _SEEDS, min(length, stack.target.context_length - len(prompt))),
            )
            for place, prompt in enumerate(asked)
        ]
        try:
            while any(request.finish_reason is None for request in requests):
                engine.step()
        finally:
            for request in requests:
                engine.cancel(request)
        for request in requests:
            if request.error is not None:
                raise request.error
            check_sound(answer_of(request), stack.drafter.name)
        texts = [(prompt, request.tokens[len(prompt) :]) for prompt, request in zip(asked, requests, strict=True)]
        yield [
            Scored(law, tokens, prompt, drafter.taken(request.id), place, params.coupled)
            for place, (law, (prompt, tokens), request) in enumerate(
                zip(plain_laws(judge, texts, params), texts, requests, strict=True)
            )
        ]


def _cut(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts of several lengths."""
    return [list(prompt) if i % _WHOLE == 0 else list(prompt)[:_BEGINNING] for i, prompt in enumerate(prompts)]


def open_ended(params: SamplingParams, seed: int, length: int) -> SamplingParams:
    """The user's options for an answer that ends by its length alone."""
    return replace(params, seed=seed, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=())


def check_sound(answer: Answer, drafter: str) -> None:
    """Raise where an answer, or its drafter, failed: what is left says nothing of the stack.

    Args:
        answer: with speculation.
        drafter: its name.

    Raises:
        DrafterError: the drafter gave up, and the answer went on without it, or batches failed.
        ModelError: the answer ended with an error.
    """
    if answer.finish_reason == "error":
        raise ModelError(f"nothing can be certified while answers fail: {answer.error}")
    told = [*answer.warnings, *recovered(answer.stats, drafter)]
    if told:
        raise DrafterError(f"nothing can be certified while parts fail: {told[0]}")


def recovered(stats: Counters, drafter: str) -> list[str]:
    """A sentence if something failed for a batch: answers are right then, and a fault is out of sight."""
    if not stats.recoveries:
        return []
    return [
        f"with drafter {drafter!r} a step or a proposal failed for several requests together and was asked for again "
        f"for each of them alone, {stats.recoveries} times"
    ]
