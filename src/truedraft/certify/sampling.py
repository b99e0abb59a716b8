"""Sampled answers of the whole pipeline, with the target's distribution and the draft's information at each token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.checks import Deadline, Stack, check_sound, numbered, open_ended
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import Proposal
from truedraft.core.tree import chain_shape
from truedraft.core.verdict import Divergence
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.models.base import LanguageModel, Segment
from truedraft.testing import altered
from truedraft.verification import Rule
from truedraft.verification.rule import BatchVerdicts

TOKENS = 64  # default maximum length of an answer: many positions, with all prompts in rotation
_CHUNK = 256  # tokens of a text in one forward, as in the engine's prefill
_ENTRIES = 1 << 25  # maximum number of logits per forward


@dataclass(frozen=True, slots=True)
class Decision:
    """One emitted token's place in its step."""

    depth: int  # tokens that the step emitted before it
    q: Tensor | None  # [vocab]: of the first draw there; None if nothing was drawn
    candidates: tuple[int, ...]  # deterministic ones, in order; empty if q is set
    used: Tensor | None = None  # [vocab]: p as the rule received it, if recorded


class Recorder:
    """Records the draft's information at each token that its `drafter` emits, and the input of its `rule`, if given."""

    def __init__(self, drafter: Drafter, rule: Rule | None = None) -> None:
        self._given: list[Tensor] = []  # `[rows, vocab]` of each request of the step, in order
        self._decisions: dict[int, list[Decision]] = {}

        def observe(batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
            self._note(batch, outcomes)
            drafter.observe(batch, outcomes)

        def accept(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
            assert rule is not None
            self._given.extend(own.clone() for own in probs)
            return rule.accept(proposals, probs, noise)

        self.drafter = altered(drafter, observe=observe, observes_lazily=False)
        self.rule = None if rule is None else altered(rule, accept=accept)

    def taken(self, request: int) -> list[Decision]:
        return self._decisions.pop(request, [])

    def _note(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        given = iter(self._given)
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.tokens:
                self._decisions.setdefault(request.id, []).extend(_decisions(outcome, next(given, None)))
        self._given.clear()


def _decisions(outcome: StepOutcome, probs: Tensor | None) -> list[Decision]:
    proposal = outcome.proposal
    rows = (0, *(node + 1 for node in outcome.path))
    found = []
    for depth, row in enumerate(rows[: len(outcome.tokens)]):
        draws = proposal.draws[row]
        drawn = bool(draws) and draws[0].dist >= 0 and proposal.probs is not None
        q = proposal.probs[draws[0].dist].clone() if drawn and proposal.probs is not None else None
        chosen = () if drawn else [draw for draw in draws if draw.dist < 0]
        fixed = tuple(proposal.tree.host_ids[draw.child] for draw in chosen)
        found.append(Decision(depth, q, fixed, None if probs is None else probs[row]))
    return found


@dataclass(frozen=True, slots=True)
class Scored:
    """Emitted tokens of one request, with the target's distributions at their own prefixes."""

    probs: Tensor  # [tokens, vocab], by a plain forward over the text
    tokens: Sequence[int]
    before: Sequence[int]  # the prompt
    decisions: Sequence[Decision]
    place: int  # the request's number in its batch
    coupled: bool  # the drafter may have seen the noise that decides
    divergence: Divergence | None = None  # of a lossy rule's verdicts


def scored_answers(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    *,
    judge: LanguageModel | None = None,
    records_probs: bool = False,
    length: int = TOKENS,
) -> Iterator[list[Scored]]:
    """Answer the prompts in rotation without end, with new noise each time; yields one batch of requests after another.

    Args:
        params: the user's options; answers do not end early here.
        judge: computes the distributions; None is the stack's target.
        records_probs: whether to record `Decision.used`.
        length: tokens of an answer.

    Raises TruedraftError if a request or its drafter failed.
    """
    recorder = Recorder(stack.drafter, stack.rule if records_probs else None)
    engine = stack.but(drafter=recorder.drafter, rule=recorder.rule or stack.rule).engine(batch)
    room = stack.target.context_length
    turn = itertools.cycle(prompts)
    for first in itertools.count(0, batch):
        group = [list(prompt) for prompt in itertools.islice(turn, batch)]
        options = [
            open_ended(numbered(params, first + place), min(length, room - len(prompt)))
            for place, prompt in enumerate(group)
        ]
        answers = Deadline(math.inf).answers(engine, group, options)
        for request, answer in answers:
            if request.error is not None:
                raise request.error
            check_sound(answer, stack.drafter.name)
        texts = [(prompt, request.tokens[len(prompt) :]) for prompt, (request, _) in zip(group, answers, strict=True)]
        probs = plain_probs(judge or stack.target, texts, params)
        yield [
            Scored(own, tokens, prompt, recorder.taken(request.id), place, params.seeded, answer.stats.divergence)
            for place, (own, (prompt, tokens), (request, answer)) in enumerate(zip(probs, texts, answers, strict=True))
        ]


def beginnings(prompts: Sequence[Sequence[int]], length: int, whole: int) -> list[list[int]]:
    """Prompts cut to `length` tokens, except every `whole`-th, because a prefill tests nothing."""
    return [list(prompt) if i % whole == 0 else list(prompt)[:length] for i, prompt in enumerate(prompts)]


Text = tuple[Sequence[int], Sequence[int]]  # a prompt, and the tokens after it


@torch.inference_mode()
def plain_logits(target: LanguageModel, texts: Sequence[Text]) -> list[Tensor]:
    """For each text `[tokens after the prompt, vocab]`: the target's logits before each token, by plain forwards."""
    found: list[Tensor] = []
    for group in _groups(texts, target.vocab_size):
        found.extend(_together(target, group))
    return found


def plain_probs(target: LanguageModel, texts: Sequence[Text], params: SamplingParams) -> list[Tensor]:
    """`plain_logits` as distributions under sampling options: `[tokens after the prompt, vocab]`, float32."""
    return [probs_from_logits(logits, params) for logits in plain_logits(target, texts)]


def _groups(texts: Sequence[Text], vocab: int) -> Iterator[list[Text]]:
    group: list[Text] = []
    rows = 0
    for text in texts:
        if group and (rows + len(text[1])) * vocab > _ENTRIES:
            yield group
            group, rows = [], 0
        group.append(text)
        rows += len(text[1])
    if group:
        yield group


def _together(target: LanguageModel, texts: Sequence[Text]) -> list[Tensor]:
    caches = [target.new_cache() for _ in texts]
    rows: list[list[Tensor]] = [[] for _ in texts]
    try:
        longest = max(len(prompt) + len(tokens) - 1 for prompt, tokens in texts)
        for start in range(0, longest, _CHUNK):
            parts = []
            for number, (prompt, tokens) in enumerate(texts):
                ids = [*prompt, *tokens[:-1]][start : start + _CHUNK]
                if ids and tokens:
                    needed = range(max(0, len(prompt) - 1 - start), len(ids))
                    segment = Segment(caches[number], torch.tensor(ids), chain_shape(len(ids)), needed)
                    parts.append((number, segment))
            logits = target.forward([segment for _, segment in parts]).logits
            counts = [len(segment.rows) for _, segment in parts]
            for (number, segment), own in zip(parts, logits.split(counts), strict=True):
                segment.cache.commit(range(len(segment.shape)))
                rows[number].append(own)
    finally:
        for cache in caches:
            target.release_cache(cache)
    empty = torch.empty(0, target.vocab_size, device=target.device)
    return [torch.cat(own) if own else empty for own in rows]
