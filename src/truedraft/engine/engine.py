"""The engine: prompts in, answers out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import torch

from truedraft.control import Controller, FixedBudget
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.drafters.none import NoDrafter
from truedraft.engine.answer import Answer, Piece
from truedraft.engine.drafting import Drafting
from truedraft.engine.request import Request
from truedraft.engine.scheduler import Scheduler
from truedraft.engine.step import Step
from truedraft.errors import PromptError, TruedraftError
from truedraft.models.base import LanguageModel
from truedraft.verification import Rule, SpeculativeSampling

Prompt: TypeAlias = str | Sequence[int]


class Engine:
    """Continuous batching with speculation; without a drafter it is plain decoding by the same code.

    Args:
        target: the model that decides what is answered.
        drafter: guesses ahead; None never does.
        rule: how guesses are judged; None is lossless speculative sampling.
        controller: how much is drafted; None is always the drafter's own limits.
        max_batch: most requests in one step.

    Raises:
        CompositionError: the drafter does not fit the target, or the rule cannot judge its draws.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        controller: Controller | None = None,
        *,
        max_batch: int = 32,
    ) -> None:
        self.target = target
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.rule = rule if rule is not None else SpeculativeSampling()
        self.drafter.check(target)
        self.rule.check(self.drafter.kinds, self.drafter.name)
        self._drafting = Drafting(self.drafter, controller or FixedBudget(), target.vocab_size)
        self._step = Step(target, self.rule, self._drafting, self.drafter.needs_hidden)
        self._scheduler = Scheduler(max_batch)
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    @overload
    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Answer: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Answer | list[Answer]:
        """Answer one prompt, or several at once.

        Args:
            prompt: a text, token ids, or a list of either.
            params: sampling options, for a list of prompts one for all or one for each.

        Returns:
            The answer; for a list of prompts the list of answers, where a failed request has the finish reason
            "error".

        Raises:
            TruedraftError: a single prompt failed.
        """
        if _is_one(prompt):
            if params is not None and not isinstance(params, SamplingParams):
                raise PromptError("one prompt takes one SamplingParams, got a list of them")
            request = self.submit(prompt, params)  # type: ignore[arg-type]
            answer = self._finish([request])[0]
            if request.error is not None:
                raise request.error
            return answer
        each = _params_of_each(len(prompt), params)
        requests: list[Request | TruedraftError] = []
        for one, its_params in zip(prompt, each, strict=True):
            try:
                requests.append(self.submit(one, its_params))  # type: ignore[arg-type]
            except TruedraftError as error:
                requests.append(error)
        answers = iter(self._finish([request for request in requests if isinstance(request, Request)]))
        return [next(answers) if isinstance(request, Request) else _refused(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one prompt piece by piece; leaving the loop early cancels the request.

        The last piece carries the whole answer.

        Raises:
            TruedraftError: the request failed.
        """
        request = self.submit(prompt, params)
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        try:
            while True:
                while request.pieces:
                    piece = request.pieces.pop(0)
                    if piece.answer is not None and request.error is not None:
                        raise request.error
                    yield piece
                    if piece.answer is not None:
                        return
                self.step()
        finally:
            self.cancel(request)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a request; it advances with every `step`.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids that do not exist.
        """
        params = params if params is not None else SamplingParams()
        ids = self._encode(prompt)
        with self._lock:
            request = Request(
                next(self._numbers),
                ids,
                params,
                self.target.tokenizer,
                self.target.eos_token_ids,
                self.target.context_length,
            )
            self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request where it stands; its cache goes back. A finished one stays as it is."""
        with self._lock:
            if request.finish_reason is None:
                request.finish_reason = "cancelled"
                self._close(request)

    @torch.inference_mode()
    def step(self) -> bool:
        """One step for all running requests; returns whether any request is left."""
        with self._lock:
            for request in self._scheduler.admit():
                request.cache = self.target.new_cache()
                self._drafting.begin(request)
            batch = self._scheduler.next()
            if batch:
                self._run(batch)
            for request in batch:
                if request.finish_reason is not None:
                    self._close(request)
            return not self._scheduler.idle

    def _run(self, batch: list[Request]) -> None:
        """Run a step; if it fails for several requests together, each is tried alone, so that only the broken fail."""
        try:
            self._step.run(batch, [self._scheduler.chunk_of(request) for request in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].fail(error)
                return
            for request in batch:
                if request.finish_reason is None:
                    self._run([request])

    def _close(self, request: Request) -> None:
        self._scheduler.remove(request)
        if request.cache is not None:
            self._drafting.end(request)
            self.target.release_cache(request.cache)
            request.cache = None
        request.finish()

    def _finish(self, requests: Sequence[Request]) -> list[Answer]:
        """Step until all of these are over."""
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [answer for request in requests if (answer := request.pieces[-1].answer) is not None]

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked."""
        if isinstance(prompt, str):
            if self.target.tokenizer is None:
                raise PromptError(
                    f"{self.target.name!r} has no tokenizer, so a prompt is a list of token ids, not text"
                )
            if not prompt:
                raise PromptError("the prompt is empty; give at least one character")
            ids = self.target.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        vocab, context = self.target.vocab_size, self.target.context_length
        if not ids:
            raise PromptError("the prompt has no tokens; give at least one")
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise PromptError(f"token id {wrong} is outside 0 to {vocab - 1}, the ids of {self.target.name!r}")
        if len(ids) >= context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, and {self.target.name!r} has a context of {context} for prompt and "
                "answer together; shorten it"
            )
        return ids


def _is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or ids. An empty list is an empty list of prompts' ids: one bad prompt."""
    return isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)


def _params_of_each(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise PromptError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return params


def _refused(error: TruedraftError) -> Answer:
    """The answer of a prompt in a list that could not be started."""
    from truedraft.core.counters import Counters
    from truedraft.engine.answer import Timing

    return Answer(None, [], "error", Counters(), [], 0, 0, Timing(None, 0.0), str(error))
