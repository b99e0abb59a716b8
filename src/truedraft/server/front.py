"""What all endpoints share: conversion from fields to queued requests, the model's names, logprobs and logging."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import Request as HttpRequest

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.params import ReasoningSpan, SamplingParams, Structured
from truedraft.core.stats import Counters
from truedraft.engine import Request
from truedraft.engine.prompts import Chat, Prompt, check_max_tokens
from truedraft.errors import PromptError, TruedraftError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.errors import ApiError, quoted
from truedraft.server.events import cancel_on_disconnect
from truedraft.server.fields import SamplingFields, Thinking
from truedraft.server.keys import ANYONE, Client
from truedraft.server.pictures import PictureReader
from truedraft.server.service import ResponseHandle, Service, Stream
from truedraft.text.forms import Prepared
from truedraft.text.histories import HistoryForm
from truedraft.text.notations import Notation, notation_of
from truedraft.verification import Rule

_log = logging.getLogger("truedraft.server.requests")
_Value = TypeVar("_Value")

_END_TOKENS = 16  # last tokens of a prompt that are searched for an opening mark of reasoning
_SWITCHES = {  # variables of templates that switch reasoning off, and how templates read them
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\b(?:if|not|and|or)\s+thinking\b(?!\.)|(?<!\.)\bthinking\s+is\b"),
}
_LONG_BODY = 4096  # bytes; reading longer bodies would delay other clients
_WORKERS, _AT_ONCE = 8, 2  # threads for long bodies, in total and per client


@dataclass(eq=False)
class Front:
    """State and options that endpoints share.

    Attributes:
        names: of the model; answers give the first one.
        rules: verification rules that a request may select, by their text form.
        max_samples: limit of answers per HTTP request.
        max_new_tokens: limit of new tokens per answer.
        timeout_s: limit per answer; None is no limit.
        shares_prefixes: whether clients share prefix caches.
        chat_template: replaces the model's own; None keeps that.
        trust_control_tokens: whether control tokens written out in messages are read as these tokens.
        created: when the server started, in seconds since 1970.
    """

    service: Service
    names: Sequence[str]
    rules: Mapping[str, Rule] = field(default_factory=dict)
    max_samples: int = 16
    max_new_tokens: int = 4096
    timeout_s: float | None = None
    shares_prefixes: bool = False
    chat_template: str | None = None
    trust_control_tokens: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def served(self) -> list[str]:
        """The models that a request may name: the target by its names, and its adapters."""
        return [*self.names, *self.service.engine.target.adapters]

    def shown(self, name: str | None) -> str:
        """The model name in answers to a request with this name."""
        return self.names[0] if name is None or name in self.names else name

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: lists the served ones.
        """
        if name is not None and name not in self.served:
            served = ", ".join(map(repr, self.served))
            raise ApiError(
                404,
                f"there is no model {quoted(name)} here; served is {served}",
                param="model",
                code="model_not_found",
            )

    @property
    def template(self) -> str:
        """The chat template in use; "" if there is none."""
        tokenizer = self.service.engine.target.tokenizer
        return self.chat_template or ("" if tokenizer is None else tokenizer.chat_template)

    @cached_property
    def history(self) -> HistoryForm:
        """How the chat template formats earlier calls."""
        tokenizer = self.service.engine.target.tokenizer
        if tokenizer is None:
            return HistoryForm()
        return HistoryForm.of(
            lambda messages, tools: tokenizer.chat_text(messages, tools=tools, template=self.chat_template)
        )

    def reasons(self, notation: Notation, prompt: Prompt) -> bool:
        """Whether a prompt ends inside reasoning."""
        tokenizer, marks = self.service.engine.target.tokenizer, notation.reasoning
        ids = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt
        if marks is None or tokenizer is None or isinstance(ids, str | Chat):
            return False
        return marks.opens(tokenizer.shown_text(ids[-_END_TOKENS:]))

    @cached_property
    def _turn_ends(self) -> list[int]:
        """The end-of-turn token of a template that replaces the model's own; the model's own token ends all answers."""
        tokenizer = self.service.engine.target.tokenizer
        end = None if tokenizer is None or self.chat_template is None else tokenizer.turn_end(self.chat_template)
        return [] if end is None else [end]

    @cached_property
    def _switch(self) -> str | None:
        """The template's variable that switches reasoning on and off; None if it has none."""
        return next((name for name, pattern in _SWITCHES.items() if pattern.search(self.template)), None)

    def switches(self, thinks: Thinking) -> dict[str, Any]:
        """The template variables for the requested reasoning.

        Raises:
            ApiError: reasoning is to be switched off, and neither the template nor its marks allow that.
        """
        effort = {"reasoning_effort": thinks.effort} if thinks.effort and "reasoning_effort" in self.template else {}
        if thinks.enabled is None:
            return effort
        if self._switch is None:
            if not thinks.enabled and self.notation.reasoning is None and "reasoning_effort" in self.template:
                message = "the chat template of this model cannot switch reasoning off; ask for little of it"
                raise ApiError(400, message, param="reasoning_effort")
            return effort
        return {self._switch: thinks.enabled} | effort

    def _reasoned(
        self, params: SamplingParams, prompt: Prompt, fields: SamplingFields, notation: Notation | None
    ) -> SamplingParams:
        """Options with the adapter, the end-of-turn tokens and the reasoning budget.

        Raises:
            ApiError: a budget is requested, and the marks around reasoning are unknown.
            OptionError: the budget is not a number of tokens.
        """
        marks, thinks = None if notation is None else notation.reasoning, fields.thinks
        if fields.model is not None and fields.model not in self.names:
            params = replace(params, adapter=fields.model)
        if notation is not None and (ends := (*notation.end_ids, *self._turn_ends)):
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        if notation is None or marks is None:
            if fields.reasoning_budget is not None:
                message = "needs a chat with a model whose chat template shows marks around reasoning; leave it out"
                raise ApiError(400, f"reasoning_budget {message}", param="reasoning_budget")
            return params
        budget = 0 if thinks.enabled is False and self._switch is None else thinks.budget
        if budget is None and params.structured is None:
            return params
        inside = self.reasons(notation, prompt)
        return replace(params, reasoning=ReasoningSpan(marks.opening, marks.closing, inside, budget))

    def __post_init__(self) -> None:
        tokenizer = self.service.engine.target.tokenizer
        self.notation = notation_of(self.template, None if tokenizer is None else tokenizer.whole_tokens)
        self.pictures = PictureReader(self.service.engine.target)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="truedraft-writes")
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="truedraft-bodies")
        self._turns: dict[Client, asyncio.Semaphore] = {}
        # The text of a token; its id if the model has no tokenizer.
        self.token_text: Callable[[int], str] = lru_cache(1 << 16)(str if tokenizer is None else tokenizer.token_text)

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        fields: SamplingFields,
        http: HttpRequest,
        samples: int | None = None,
        notation: Notation | None = None,
    ) -> ResponseHandle:
        """Queue all samples of all prompts, prompt by prompt.

        Args:
            prompts: texts, ids, or the output of a processor for pictures.
            params: shared by all prompts.
            fields: of the HTTP request.
            samples: per prompt; None is `params.n`.
            notation: its marks are shown in the texts, and its end tokens end answers; None for plain text.

        Raises:
            ApiError: the request is invalid, or there is no room.
        """
        self.check_model(fields.model)
        ids = self.service.engine.target.vocab_size
        if (wrong := next((token for token in fields.stop_token_ids or () if token >= ids), None)) is not None:
            message = f"stop_token_ids names token id {wrong}, and the model's ids end at {ids - 1}"
            raise ApiError(400, message, param="stop_token_ids")
        count = samples if samples is not None else params.n
        self.check_count(len(prompts) * count, len(prompts))
        shown = {number: token for token, number in notation.special.items()} if notation is not None else None
        params = await self.apart(http, self._reasoned, params, prompts[0], fields, notation)
        client: Client = getattr(http.state, "client", ANYONE)
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        names = fields.called
        answering = ResponseHandle(self.service, deadline, names)
        try:
            check_max_tokens(self.service.engine.target, params.max_tokens)
            if params.max_tokens > self.max_new_tokens:
                params = replace(params, max_tokens=self.max_new_tokens)
            # Referenced until there are requests, because a form without references may be dropped and prepared again.
            form = (
                None
                if params.structured is None
                else await self._form(http, params.structured, deadline, len(prompts) * count)
            )
            requests = await self.apart(http, self._prepared, prompts, params, fields, self._scope(http), count, shown)
            del form
        except TruedraftError as error:
            if isinstance(error, PromptError) and notation is None:
                error.field = error.field or "prompt"
            raise self.service.api_error(error, names) from error
        traced = fields.speculation is not None and fields.speculation.trace
        late = getattr(http.state, "reserved", None) is not None
        self.release(http)  # no other request takes the places, because nothing is awaited until `start`
        answering.start(requests, client, shows_steps=traced, late=late)
        http.state.answering = answering
        return answering

    async def _form(
        self, http: HttpRequest, structured: Structured, deadline: float | None, count: int
    ) -> Prepared | None:
        """Prepare a form, with places in the queue reserved while the request waits for it."""
        if getattr(http.state, "reserved", None) is None:
            self.reserve(http, count)
        return await cancel_on_disconnect(
            http.receive, self.service.forms.prepared(structured, deadline, self._scope(http))
        )

    def _scope(self, http: HttpRequest) -> Client | None:
        """The client within which prefixes and forms are shared; None is all clients."""
        client: Client = getattr(http.state, "client", ANYONE)
        return None if self.shares_prefixes else client

    def check_count(self, count: int, prompts: int = 1) -> None:
        """Refuse more answers to one request than `max_samples`.

        Raises:
            ApiError: gives the limit.
        """
        if count > self.max_samples:
            message = f"asks for {count} answers, and this server gives {self.max_samples}"
            raise ApiError(400, message, param="prompt" if prompts > self.max_samples else "n")

    def reserve(self, http: HttpRequest, count: int) -> None:
        """Reserve places for a request that takes long to prepare, until it begins or ends.

        Raises:
            ApiError: there is no room, or too many answers are requested.
        """
        self.check_count(count)
        client: Client = getattr(http.state, "client", ANYONE)
        self.service.reserve(client, count)
        http.state.reserved = (client, count)

    def release(self, http: HttpRequest) -> None:
        kept: tuple[Client, int] | None = getattr(http.state, "reserved", None)
        http.state.reserved = None
        if kept is not None:
            self.service.give_back(*kept)

    async def apart(self, http: HttpRequest, work: Callable[..., _Value], *given: Any) -> _Value:
        """Run work over a request's body; in a thread if the body is long, so that other clients need not wait.

        Each client has at most `_AT_ONCE` such threads.
        """
        if not self.is_long(http):
            return work(*given)
        client: Client = getattr(http.state, "client", ANYONE)
        loop, slots = asyncio.get_running_loop(), self._turns.setdefault(client, asyncio.Semaphore(_AT_ONCE))
        await slots.acquire()
        doing = self._workers.submit(contextvars.copy_context().run, work, *given)
        doing.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(slots.release))
        return await asyncio.wrap_future(doing)

    def is_long(self, http: HttpRequest) -> bool:
        """Whether a request's body is so long that work over it would delay other clients."""
        return getattr(http.state, "body_bytes", 0) > _LONG_BODY

    def _prepared(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        fields: SamplingFields,
        scope: Client | None,
        count: int,
        shown: Mapping[int, str] | None,
    ) -> list[Request]:
        speculation = fields.speculation
        rule = None if speculation is None or speculation.rule is None else self._rule(speculation.rule)
        limits = None if speculation is None else speculation.limits
        prepare = self.service.engine.prepare
        return [
            prepare(prompt, params, sample=sample, speculation=limits, rule=rule, scope=scope, shown=shown)
            for prompt in prompts
            for sample in range(count)
        ]

    def _rule(self, words: str) -> Rule:
        if words not in self.rules:
            allowed = ", ".join(map(repr, self.rules)) or "none but the server's own, which needs no asking"
            message = f"rule {quoted(words)} is not allowed here; allowed is {allowed}"
            raise ApiError(400, f"speculation.{message}", param="speculation.rule")
        return self.rules[words]

    def logprobs_entry(self, found: TokenLogprobs) -> dict[str, Any]:
        """The logprobs of one token, in the format of chats."""
        return self._named(found.token, found.logprob) | {
            "top_logprobs": [self._named(token, logprob) for token, logprob in found.top]
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def left_out(self, warnings: Sequence[str]) -> None:
        """Log that parts of a request are ignored. The log has no text of clients; the answer lists the parts."""
        if warnings:
            _log.warning("left out of a request: %d tools or items that this server has not", len(warnings))

    def log(self, http: HttpRequest, status: int) -> None:
        """Log one line about an HTTP request, without its content."""
        answering: ResponseHandle | None = getattr(http.state, "answering", None)
        client: Client = getattr(http.state, "client", ANYONE)
        parts = [f"{quote(http.method)} {quote(http.scope['path'])} {status}", f"client={client.name}"]
        began = getattr(http.state, "began", None)
        if began is not None:
            parts.append(f"seconds={time.perf_counter() - began:.3f}")
        if answering is not None and answering.streams:
            parts += _log_parts(answering.streams)
        _log.info(" ".join(parts))


def _log_parts(streams: Sequence[Stream]) -> list[str]:
    # An aborted answer has the tokens generated so far.
    answers = [stream.answer or stream.request.answer(stream.request.emitted) for stream in streams]
    first = [a.timing.first_token_s for a in answers if a.timing.first_token_s is not None]
    tokens = sum(len(answer.token_ids) for answer in answers)
    counters = sum((answer.stats for answer in answers), start=Counters())
    parts = [f"prompt_tokens={streams[0].request.prompt_tokens}", f"tokens={tokens}"]
    if first:
        parts.append(f"first_token_s={min(first):.3f}")
    reasons = ",".join(sorted({answer.finish_reason for answer in answers}))
    return [*parts, f"finish={reasons}", f"tokens_per_call={counters.mean_acceptance_length:.2f}"]


def finite(logprob: float) -> float:
    """Clip to -9999, because JSON has no infinity."""
    return max(logprob, -9999.0)


def new_id(kind: str) -> str:
    """A random id for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"
