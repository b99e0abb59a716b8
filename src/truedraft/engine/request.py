"""One request of the engine: its token ids, its cache and its answer."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from truedraft.core.budget import MOST_NODES, RequestView
from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.noise import KeyedNoise
from truedraft.core.stats import Counters, DraftShare, RequestStep
from truedraft.core.verdict import Divergence, Origin, Verdict
from truedraft.drafters.base import DraftRequest
from truedraft.engine.answer import Answer, FinishReason, Piece, Timing
from truedraft.models.cache import RequestCache
from truedraft.verification import Rule

if TYPE_CHECKING:
    from truedraft.engine.batch import StepItem
    from truedraft.engine.prompts import TextStream


@dataclass(slots=True, eq=False)
class DraftLimits:
    """Which drafters may draft for a request, and how much."""

    excluded: set[str] = field(default_factory=set)  # those that failed for it or that it may not use
    no_room: set[str] = field(default_factory=set)  # those without state for it: excluded, or memory is short
    most_depth: int = MOST_NODES  # of a drafted path
    most_positions: int | None = None  # of the target's cache, uncommitted ones included; None is no limit
    reported: dict[str, int] = field(default_factory=dict)  # by drafter, context of the last step that it observed
    view: RequestView | None = None  # what a controller sees of it

    @property
    def unavailable(self) -> set[str]:
        return self.excluded | self.no_room if self.no_room else self.excluded


class Request:
    """A request from its prompt to its answer; `truedraft.engine.prompts.new_request` makes it."""

    def __init__(
        self,
        draft: DraftRequest,
        tokens: list[int],
        most_tokens: int,
        stop_ids: frozenset[int],
        text: TextStream,
        rule: Rule,
        sample: int,
    ) -> None:
        self.draft, self.id, self.params = draft, draft.id, draft.params
        self.shaping, self.inputs = draft.shaping, draft.inputs  # how options change logits; inputs beyond tokens
        self.rule, self.sample = rule, sample  # each sample has its noise
        self.noise_seed = draft.params.seed or 0  # key of its noise; an engine sets it for a request without a seed
        self.prompt_tokens, self.most_tokens = len(tokens), most_tokens
        self._stop_ids = stop_ids  # they end the answer, and are not part of it
        self.tokens = tokens  # prompt and answer so far
        self.granted = most_tokens  # tokens that it has memory for
        self.drafting = DraftLimits()
        self.awaits: tuple[Request, int] | None = None  # who reads the common prefix, and the length of that prefix
        self.copied_tokens = 0  # of its prompt, computed by others
        self.preemptions = 0
        self.last_step: StepItem | None = None
        self._read_to = self.prompt_tokens  # tokens to prefill, more after a preemption
        self._steps = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.warnings: list[str] = []
        self.counters = Counters()
        self.origins: list[Origin] = []
        self.divergences: list[Divergence] = []  # of each emitted token, under a lossy rule
        self.logprobs: list[TokenLogprobs] = []  # of each emitted token, if enabled
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's second and later tokens
        self.pieces: list[Piece] = []  # not yet taken by a stream
        self.closed = False  # whether it is finished and its last piece is available
        self.engine: weakref.ref[object] | None = None  # where it was submitted; an answer must not keep it alive
        self._text = text
        self._given = 0  # tokens that went into pieces
        self._prefilled: list[int] = []  # answer indices of tokens from prefill steps
        self._drafted: list[tuple[int, tuple[DraftShare, ...]]] = []  # first token of a step, and its drafters
        self._submitted = time.perf_counter()
        self._first_token_s: float | None = None
        self._total_s: float | None = None

    @property
    def remaining(self) -> int:
        return self.most_tokens - len(self.tokens)

    @property
    def computed(self) -> int:
        cache = self.draft.cache
        return cache.length if cache is not None else 0

    @property
    def uncomputed(self) -> int:
        """Tokens not in the target's cache: 1 while decoding, more during the prefill."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its prompt, and after a preemption the answer so far, is computed."""
        computed = self.computed
        return computed >= self._read_to and len(self.tokens) - computed <= 1

    @property
    def cache(self) -> RequestCache | None:
        return self.draft.cache

    @cache.setter
    def cache(self, cache: RequestCache | None) -> None:
        self.draft = replace(self.draft, cache=cache)

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def put_back(self) -> None:
        """Wait again after a preemption; the answer so far is prefilled later."""
        self.cache, self.awaits, self.last_step = None, None, None
        self._read_to = len(self.tokens)
        self.drafting.no_room = set(self.drafting.excluded)
        self.drafting.reported.clear()
        self.preemptions += 1

    def noise(self) -> KeyedNoise:
        """The noise of the next step, with keys that occur in no other step of this request."""
        return KeyedNoise(self.noise_seed, len(self.tokens), self._steps, self.sample)

    def emit(self, verdict: Verdict, logprobs: Sequence[TokenLogprobs] = ()) -> tuple[tuple[int, ...], bool]:
        """Append a verdict's tokens up to the answer's end; returns them, and whether an end-of-text or stop token
        ended it.
        """
        tokens: list[int] = []
        text: list[str] = []
        ended_by_id = False
        room = self.remaining
        for token in verdict.tokens:
            ended_by_id = token in self._stop_ids
            if ended_by_id:
                self.finish_reason = "stop"
                break
            tokens.append(token)
            piece, stopped = self._text.push(token)
            text.append(piece)
            if stopped or len(tokens) >= room:
                self.finish_reason = "stop" if stopped else "length"
                break
        self._steps += 1
        if tokens and self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._submitted
        self.tokens.extend(tokens)
        self.origins.extend(verdict.origins[: len(tokens)])
        self.logprobs.extend(logprobs[: len(tokens)])
        if verdict.divergence is not None:
            emitted = verdict.divergence[: len(tokens)]
            self.divergences.extend(emitted)
            self.counters.divergence = (self.counters.divergence or Divergence()) + Divergence.of(emitted)
        self._append_piece("".join(text), self._text.settled_tokens)
        return tuple(tokens), ended_by_id

    def count(self, step: RequestStep) -> None:
        self.counters.count(step)
        if step.prefill and step.emitted:
            self._prefilled.append(self.emitted - step.emitted)
        if step.shares and self.params.stop:  # a stop text may remove tokens counted for drafters
            self._drafted.append((self.emitted - step.emitted, step.shares))

    def _append_piece(self, text: str, settled: int, answer: Answer | None = None) -> None:
        first, self._given = self._given, settled
        tokens = self.tokens[self.prompt_tokens + first : self.prompt_tokens + settled]
        self.pieces.append(Piece(text, tokens, self.origins[first:settled], answer, self.logprobs[first:settled]))

    def take_piece(self) -> Piece:
        """The next piece for a stream; raises the error of a failed request."""
        piece = self.pieces.pop(0)
        if piece.answer is not None and self.error is not None:
            raise self.error
        return piece

    def fail(self, error: Exception) -> None:
        self.error = error
        self.finish_reason = "error"

    def finish(self) -> Answer:
        assert self.finish_reason is not None
        self._total_s = time.perf_counter() - self._submitted
        rest = self._text.finish()
        if self._text.stopped and self.finish_reason == "length":
            self.finish_reason = "stop"  # the stop text became complete in the held text
        if self.last_step is not None:
            self.last_step.shown = None  # frees the output of the whole batch
        self.drafting.view = None
        kept = min(self._text.kept_tokens, self.emitted)
        self._take_back(kept)
        answer = self.answer(kept)
        self._append_piece(rest, kept, answer)
        return answer

    def _take_back(self, kept: int) -> None:
        removed = self.origins[kept:]
        counters = self.counters
        prefill = sum(place >= kept for place in self._prefilled)
        counters.prefill_tokens -= prefill
        counters.emitted_tokens -= len(removed) - prefill
        counters.stop_tokens += len(removed) - prefill
        position = 0  # of the first removed token in its step, which ends with the first token that was not accepted
        while position < kept and self.origins[kept - 1 - position] is Origin.ACCEPTED:
            position += 1
        for origin in removed:
            if origin is Origin.ACCEPTED:
                counters.accepted_tokens -= 1
                counters.accepted_per_position[position] -= 1
            if origin is not Origin.BONUS:
                counters.tried_per_position[position] -= 1
            position = position + 1 if origin is Origin.ACCEPTED else 0
        for first, shares in reversed(self._drafted):
            if all(first + len(share.path) <= kept for share in shares):
                break  # earlier steps remain as they are
            for share in shares:
                taken = first + len(share.path) - max(first, kept)
                counters.by_drafter[share.drafter].accepted_tokens -= max(taken, 0)
        if removed and self.divergences:
            del self.divergences[kept:]
            counters.divergence = Divergence.of(self.divergences)

    def answer(self, kept: int) -> Answer:
        total_s = time.perf_counter() - self._submitted if self._total_s is None else self._total_s
        return Answer(
            text=self._text.text if self._text.writes else None,
            token_ids=self.tokens[self.prompt_tokens : self.prompt_tokens + kept],
            finish_reason=self.finish_reason or "cancelled",
            stats=self.counters,
            origins=self.origins[:kept],
            logprobs=None if self.params.logprobs is None else self.logprobs[:kept],
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            seed=self.params.seed,
            prompt_tokens=self.prompt_tokens,
            timing=Timing(self._first_token_s, total_s),
            error=None if self.error is None else str(self.error),
            warnings=tuple(self.warnings),
            stop_text=self._text.stop_text,
        )
