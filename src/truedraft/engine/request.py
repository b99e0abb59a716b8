"""One request of the engine: its tokens, its cache and its answer."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from truedraft.core.budget import MOST_NODES, RequestView
from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams, Structured
from truedraft.core.shaping import Form, Shaping
from truedraft.core.stats import Counters, DraftShare, RequestStep
from truedraft.core.token_view import TokenView
from truedraft.core.verdict import Divergence, Origin, Verdict
from truedraft.drafters.base import DraftRequest
from truedraft.engine.answer import Answer, FinishReason, Piece, Timing
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.models.cache import RequestCache
from truedraft.text.detokenizer import TextStream
from truedraft.text.forms import Forms
from truedraft.text.reasoning import ReasonedForm
from truedraft.text.tokenizer import Tokenizer
from truedraft.verification import Rule

if TYPE_CHECKING:
    from truedraft.engine.batch import StepItem
    from truedraft.models.base import LanguageModel

_numbers = itertools.count()  # over all engines, because two of them may share a drafter


class Request:
    """A request from its prompt to its answer.

    Args:
        rule: verifies its drafts.
        sample: which of several answers to the same prompt; each has its own noise.
        scope: prefixes are shared only with requests of the same scope.
        inputs: inputs of its prompt in addition to tokens; the whole prompt is then read in one step, and shared as a
            whole.
        shown: names by id of special tokens that its text shows.
        owner: prepared forms are shared only with requests of the same owner.

    Raises:
        OptionError: an option names ids that do not exist, or texts without a tokenizer.
        UnknownOptionError: the target has no such adapter.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        rule: Rule,
        target: LanguageModel,
        sample: int = 0,
        scope: Hashable = None,
        forms: Forms | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        shown: Mapping[int, str] | None = None,
        owner: Hashable = None,
    ) -> None:
        self.inputs, self.owner = inputs, owner
        self._source_tokens = target.source_tokens(prompt)
        _check_target(params, target, self._source_tokens)
        self.params, self.rule = params, rule
        self.noise_seed = params.seed or 0  # key of its noise; an engine sets it for a request without a seed
        self.sample = sample
        self.tokens = list(prompt)  # prompt and answer so far
        self.prompt_tokens = self._read_to = len(prompt)  # and tokens to prefill, more after a preemption
        self._stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)))
        self.shaping = self._shaped(target, forms)  # how its options change logits
        self.leader: Request | None = None  # request that reads the common prefix, and that it waits for
        self.awaits = 0  # length of that prefix
        self.copied_tokens = 0  # of its prompt, computed by others
        view = TokenView(self.tokens)
        predicted = _predicted(params.prediction, target)
        self.draft = DraftRequest(
            next(_numbers), params, view, self.shaping, scope, predicted, inputs, judged=rule.prefers
        )
        self.counters = Counters()
        self.excluded: set[str] = set()  # drafters that failed for it or that it may not use
        self.most_positions: int | None = None  # limit of its cache, uncommitted ones included; None is no limit
        self.preemptions = 0  # how often it was preempted
        self.most_depth = MOST_NODES  # limit of drafts
        self.no_room: set[str] = set()  # drafters without state for it: excluded, or memory is short
        self.view: RequestView | None = None  # what a controller sees of it
        self.last_step: StepItem | None = None
        self.told: dict[str, int] = {}  # by drafter, context of the last step reported to it
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.warnings: list[str] = []
        self.origins: list[Origin] = []
        self.divergences: list[Divergence] = []  # of each emitted token, under a lossy rule
        self.logprobs: list[TokenLogprobs] = []  # of each emitted token, if enabled
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's second and later tokens
        self.pieces: list[Piece] = []  # not yet taken by a stream
        self._given = 0  # tokens that went into pieces
        self._prefilled: list[int] = []  # answer indices of tokens from prefill steps
        self._drafted: list[tuple[int, tuple[DraftShare, ...]]] = []  # first token of a step, and its drafters
        self.closed = False  # whether it is finished and its last piece is available
        self.engine: weakref.ref[object] | None = None  # where it was submitted; an answer must not keep it alive
        self._tokenizer = target.tokenizer
        self._text = TextStream(self._tokenizer, params.stop, params.min_tokens, shown)
        # Limit of tokens, and the tokens granted, at most as many.
        self._limit = self.granted = min(self.prompt_tokens + params.max_tokens, target.most_tokens(prompt))
        self._steps, self._submitted = 0, time.perf_counter()
        self._first_token: float | None = None
        self._finished: float | None = None

    def _shaped(self, target: LanguageModel, forms: Forms | None) -> Shaping | None:
        params, tokenizer, vocab_size = self.params, target.tokenizer, target.vocab_size
        if not params.shapes_logits:
            return None
        banned = ids_of_words(params.bad_words, tokenizer)
        _check_ids(params, banned, vocab_size)
        ends = [token for token in self._stop_ids if token < vocab_size]
        form = _reasoned(self, target, forms) if params.reasoning is not None else None
        if form is None and params.structured is not None:
            form = _form_of(params.structured, forms, self)
        return Shaping(params, self.tokens, self.prompt_tokens, ends, banned, vocab_size, form, self._source_tokens)

    @property
    def id(self) -> int:
        """Unique in this process."""
        return self.draft.id

    @property
    def most_tokens(self) -> int:
        """Limit of prompt and answer together."""
        return self._limit

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted, by max_tokens and the context."""
        return self._limit - len(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens in the target's cache."""
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
        """New tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def undrafted_by(self) -> set[str]:
        """Drafters that do not draft for it now."""
        return self.excluded | self.no_room if self.no_room else self.excluded

    def put_back(self) -> None:
        """Wait again after a preemption; the answer so far is kept, and is prefilled like a prompt later."""
        self.cache, self.leader, self.last_step = None, None, None
        self._read_to = len(self.tokens)
        self.no_room = set(self.excluded)
        self.told.clear()
        self.preemptions += 1

    def noise(self) -> KeyedNoise:
        """The noise of the next step, with keys that occur in no other step of this request."""
        return KeyedNoise(self.noise_seed, len(self.tokens), self._steps, self.sample)

    def emit(self, verdict: Verdict, logprobs: Sequence[TokenLogprobs] = ()) -> tuple[tuple[int, ...], bool]:
        """Append what a verdict emits, up to the first token that ends the answer.

        Returns:
            The tokens, and whether an end-of-text or stop token ended the answer after them.
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
            if stopped:
                self.finish_reason = "stop"
                break
            if len(tokens) >= room:
                self.finish_reason = "length"
                break
        self._steps += 1
        if tokens and self._first_token is None:
            self._first_token = time.perf_counter()
        self.tokens.extend(tokens)
        self.origins.extend(verdict.origins[: len(tokens)])
        self.logprobs.extend(logprobs[: len(tokens)])
        if verdict.divergence is not None:
            emitted = verdict.divergence[: len(tokens)]
            self.divergences.extend(emitted)
            self.counters.divergence = (self.counters.divergence or Divergence()) + Divergence.of(emitted)
        self._give("".join(text), self._text.settled_tokens)
        return tuple(tokens), ended_by_id

    def count(self, step: RequestStep) -> None:
        """Count a step's work for it, after its tokens were emitted."""
        self.counters.count(step)
        if step.prefill and step.emitted:
            self._prefilled.append(self.emitted - step.emitted)
        if step.shares and self.params.stop:  # a stop text may remove tokens counted for drafters
            self._drafted.append((self.emitted - step.emitted, step.shares))

    def _give(self, text: str, settled: int, answer: Answer | None = None) -> None:
        """Append a piece with the tokens not given yet, up to the answer's first `settled`."""
        first, self._given = self._given, settled
        tokens = self.tokens[self.prompt_tokens + first : self.prompt_tokens + settled]
        self.pieces.append(Piece(text, tokens, self.origins[first:settled], answer, self.logprobs[first:settled]))

    def take_piece(self) -> Piece:
        """The next piece for a stream.

        Raises:
            TruedraftError: it is the last one, of a request that failed.
        """
        piece = self.pieces.pop(0)
        if piece.answer is not None and self.error is not None:
            raise self.error
        return piece

    def fail(self, error: Exception) -> None:
        self.error = error
        self.finish_reason = "error"

    def finish(self) -> Answer:
        """Close the answer; the last piece carries it."""
        assert self.finish_reason is not None
        self._finished = time.perf_counter()
        rest = self._text.finish()
        if self._text.stopped and self.finish_reason == "length":
            self.finish_reason = "stop"  # the stop text became complete in the held text
        if self.last_step is not None:
            self.last_step.shown = None  # frees the output of the whole batch
        self.view = None
        kept = min(self._text.kept_tokens, self.emitted)
        self._take_back(kept)
        answer = self.answer(kept)
        self._give(rest, kept, answer)
        return answer

    def _take_back(self, kept: int) -> None:
        """Remove tokens of a stop text from the counts of accepted, emitted and tried tokens."""
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
        """The answer with the first `kept` new tokens."""
        end = self._finished if self._finished is not None else time.perf_counter()
        first = None if self._first_token is None else self._first_token - self._submitted
        return Answer(
            text=None if self._tokenizer is None else self._text.text,
            token_ids=self.tokens[self.prompt_tokens : self.prompt_tokens + kept],
            finish_reason=self.finish_reason or "cancelled",
            stats=self.counters,
            origins=self.origins[:kept],
            logprobs=None if self.params.logprobs is None else self.logprobs[:kept],
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            seed=self.params.seed,
            prompt_tokens=self.prompt_tokens,
            timing=Timing(first, end - self._submitted),
            error=None if self.error is None else str(self.error),
            warnings=tuple(self.warnings),
            stop_text=self._text.stop_text,
        )


def _check_target(params: SamplingParams, target: LanguageModel, source_tokens: int) -> None:
    """Refuse an adapter that the target does not have, and logprobs of a prompt that an encoder reads."""
    if params.prompt_logprobs is not None and source_tokens:
        raise OptionError("is for models that write their prompts, and an encoder reads them", field="prompt_logprobs")
    name = params.adapter
    if name is None or name in target.adapters:
        return
    if not target.adapters:
        raise OptionError(
            f"names {name!r}, and the target was loaded without adapters; load it with some", field="adapter"
        )
    raise UnknownOptionError.nearest("adapter", name, target.adapters)


def _form_of(structured: Structured, forms: Forms | None, request: Request) -> Form:
    if forms is None:
        raise OptionError("needs a tokenizer, and this model has none", field="structured")
    return forms.start(structured, request.tokens, request.prompt_tokens, request.owner)


def _reasoned(request: Request, target: LanguageModel, forms: Forms | None) -> Form | None:
    """The form of an answer with reasoning; None if both may be anything."""
    structured, span = request.params.structured, request.params.reasoning
    assert span is not None
    if structured is None and span.budget is None:
        return None
    if target.tokenizer is None or forms is None:
        raise OptionError("needs a tokenizer, and this model has none", field="reasoning")
    start = None if structured is None else partial(forms.start, structured, prompt_tokens=0, owner=request.owner)
    tokens, size = request.tokens, target.vocab_size
    return ReasonedForm(span, start, target.tokenizer, size, target.eos_token_ids, tokens, request.prompt_tokens)


def _predicted(prediction: str | tuple[int, ...] | None, target: LanguageModel) -> tuple[int, ...]:
    """Token ids that an answer is expected to repeat."""
    if isinstance(prediction, str):
        if target.tokenizer is None:
            raise OptionError("is a text and needs a tokenizer; this model has none, so give ids", field="prediction")
        known = target.tokenizer.plain_ids(prediction)
        ids = tuple(itertools.takewhile(lambda token: token < target.vocab_size, known))
    else:
        ids = prediction or ()
        _check_known("prediction", ids, target.vocab_size)
    if len(ids) > target.context_length:
        raise OptionError(
            f"has {len(ids)} tokens, and this model's context holds {target.context_length}; shorten it",
            field="prediction",
        )
    return ids


def _check_ids(params: SamplingParams, banned: Sequence[tuple[int, ...]], vocab_size: int) -> None:
    """Refuse options with ids that do not exist."""
    _check_known("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_known("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    _check_known("bad_words", [token for word in banned for token in word], vocab_size)


def _check_known(field: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if token >= vocab_size), None)
    if wrong is not None:
        raise OptionError(f"names token id {wrong}, and the model's ids end at {vocab_size - 1}", field=field)


def ids_of_words(words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Token ids of words at the beginning of a text and after a space; lists of ids are unchanged.

    Raises:
        OptionError: a text without a tokenizer, or one that no tokens write.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
        elif tokenizer is None:
            raise OptionError(f"{word!r} needs a tokenizer, and this model has none; give token ids", field="bad_words")
        elif ids := tokenizer.word_ids(word):
            found += ids
        else:
            raise OptionError(f"holds {word!r}, which is no token of this model; remove it", field="bad_words")
    return found
