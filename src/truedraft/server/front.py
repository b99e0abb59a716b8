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
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import Request as HttpRequest

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.params import ReasoningSpan, SamplingParams
from truedraft.core.stats import Counters
from truedraft.engine import Request
from truedraft.engine.prompts import Chat, Prompt, check_max_tokens
from truedraft.errors import PromptError, TruedraftError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.access import Client
from truedraft.server.errors import ApiError, invalid, quoted
from truedraft.server.events import cancel_on_disconnect
from truedraft.server.fields import SamplingFields, Thinking
from truedraft.server.options import ServerOptions
from truedraft.server.preparing import PictureReader
from truedraft.server.service import ResponseHandle, Service
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


class Front:
    """State and options that endpoints share: the model's names, of which answers give the first, and rules by name."""

    def __init__(
        self,
        service: Service,
        names: Sequence[str],
        rules: Mapping[str, Rule],
        options: ServerOptions,
        chat_template: str | None = None,
    ) -> None:
        target = service.engine.target
        tokenizer = self._tokenizer = target.tokenizer
        self.service, self.names, self.rules, self.options = service, names, rules, options
        self.chat_template = chat_template
        self.created = int(time.time())
        self.notation = notation_of(self.template, None if tokenizer is None else tokenizer.whole_tokens)
        self.pictures = PictureReader(target)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="truedraft-writes")
        # By id; the id itself if the model has no tokenizer.
        self.token_text: Callable[[int], str] = lru_cache(1 << 16)(str if tokenizer is None else tokenizer.token_text)
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="truedraft-bodies")
        self._slots: dict[Client, asyncio.Semaphore] = {}

    @property
    def served(self) -> list[str]:
        """The models that a request may name: the target by its names, and its adapters."""
        return [*self.names, *self.service.engine.target.adapters]

    def shown(self, name: str | None) -> str:
        """The model name in answers to a request with this name."""
        return self.names[0] if name is None or name in self.names else name

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served, by an `ApiError` with the served ones."""
        if name is not None and name not in self.served:
            message = f"there is no model {quoted(name)} here; served is {', '.join(map(repr, self.served))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def template(self) -> str:
        return self.chat_template or ("" if self._tokenizer is None else self._tokenizer.chat_template)

    @cached_property
    def history(self) -> HistoryForm:
        """How the chat template formats earlier calls."""
        if (tokenizer := self._tokenizer) is None:
            return HistoryForm()
        template = self.chat_template
        return HistoryForm.of(lambda messages, tools: tokenizer.chat_text(messages, tools=tools, template=template))

    def reasons(self, notation: Notation, prompt: Prompt) -> bool:
        """Whether a prompt ends inside reasoning."""
        tokenizer, marks = self._tokenizer, notation.reasoning
        ids = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt
        if marks is None or tokenizer is None or isinstance(ids, str | Chat):
            return False
        return marks.opens(tokenizer.shown_text(ids[-_END_TOKENS:]))

    @cached_property
    def _turn_end(self) -> int | None:
        """The end-of-turn token of a template that replaces the model's own; the model's own token ends all answers."""
        if self._tokenizer is None or self.chat_template is None:
            return None
        return self._tokenizer.turn_end(self.chat_template)

    @cached_property
    def _switch(self) -> str | None:
        """The template's variable that switches reasoning on and off; None if it has none."""
        return next((name for name, pattern in _SWITCHES.items() if pattern.search(self.template)), None)

    def switches(self, thinks: Thinking) -> dict[str, Any]:
        """The template variables for the requested reasoning; an `ApiError` if it cannot be switched off."""
        effort = {"reasoning_effort": thinks.effort} if thinks.effort and "reasoning_effort" in self.template else {}
        if thinks.enabled is None:
            return effort
        if self._switch is None:
            if not thinks.enabled and self.notation.reasoning is None and "reasoning_effort" in self.template:
                message = "the chat template of this model cannot switch reasoning off; request little of it"
                raise invalid("reasoning_effort", message)
            return effort
        return {self._switch: thinks.enabled} | effort

    def _reasoned(
        self, params: SamplingParams, prompt: Prompt, fields: SamplingFields, notation: Notation | None
    ) -> SamplingParams:
        marks, thinks = None if notation is None else notation.reasoning, fields.thinks
        if fields.model is not None and fields.model not in self.names:
            params = replace(params, adapter=fields.model)
        if notation is not None:
            ends = *notation.end_ids, *(() if self._turn_end is None else (self._turn_end,))
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends)) if ends else params
        if notation is None or marks is None:
            if fields.reasoning_budget is not None:
                message = "needs a chat with a model whose chat template shows marks around reasoning; leave it out"
                raise invalid("reasoning_budget", f"reasoning_budget {message}")
            return params
        budget = 0 if thinks.enabled is False and self._switch is None else thinks.budget
        if budget is None and params.structured is None:
            return params
        inside = self.reasons(notation, prompt)
        return replace(params, reasoning=ReasoningSpan(marks.opening, marks.closing, inside, budget))

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        fields: SamplingFields,
        http: HttpRequest,
        samples: int | None = None,
        notation: Notation | None = None,
    ) -> ResponseHandle:
        """Queue all samples of all prompts, prompt by prompt; of each prompt `params.n` if `samples` is None.

        The marks of `notation` are shown in the texts, and its end tokens end answers; None is for plain text.
        """
        self.check_model(fields.model)
        ids = self.service.engine.target.vocab_size
        if (wrong := next((token for token in fields.stop_token_ids or () if token >= ids), None)) is not None:
            message = f"stop_token_ids names token id {wrong}, and the model's ids end at {ids - 1}"
            raise invalid("stop_token_ids", message)
        count = samples if samples is not None else params.n
        self.check_count(len(prompts) * count, len(prompts))
        shown = {number: token for token, number in notation.special.items()} if notation is not None else None
        params = await self.run_in_thread(http, self._reasoned, params, prompts[0], fields, notation)
        limit_s = self.options.request_timeout_s
        deadline, names = None if limit_s is None else time.monotonic() + limit_s, fields.called
        # The client within which prefixes and forms are shared; None is all clients.
        scope: Client | None = None if self.options.share_prefixes else http.state.client
        answering = ResponseHandle(self.service, deadline, names)
        try:
            check_max_tokens(self.service.engine.target, params.max_tokens)
            params = replace(params, max_tokens=min(params.max_tokens, self.options.max_new_tokens))
            # Referenced until there are requests, because a form without references may be dropped and prepared again.
            form = None
            if params.structured is not None:
                if http.state.reserved is None:  # places in the queue, while the request waits for its form
                    self.reserve(http, len(prompts) * count)
                preparing = self.service.forms.prepared(params.structured, deadline, scope)
                form = await cancel_on_disconnect(http.receive, preparing)
            requests = await self.run_in_thread(http, self._prepared, prompts, params, fields, scope, count, shown)
            del form
        except TruedraftError as error:
            if isinstance(error, PromptError) and notation is None:
                error.field = error.field or "prompt"
            raise self.service.api_error(error, names) from error
        traced = fields.speculation is not None and fields.speculation.trace
        late = http.state.reserved is not None
        self.release(http)  # no other request takes the places, because nothing is awaited until `start`
        answering.start(requests, http.state.client, shows_steps=traced, late=late)
        http.state.answering = answering
        return answering

    def check_count(self, count: int, prompts: int = 1) -> None:
        """Refuse more answers to one request than the limit, by an `ApiError`."""
        if count > (most := self.options.max_samples):
            message = f"asks for {count} answers, and this server gives {most}"
            raise ApiError(400, message, param="prompt" if prompts > most else "n")

    def reserve(self, http: HttpRequest, count: int) -> None:
        """Reserve places for a request until it begins or ends; an `ApiError` if there is no room for them."""
        self.check_count(count)
        self.service.reserve(http.state.client, count)
        http.state.reserved = count

    def release(self, http: HttpRequest) -> None:
        if (count := http.state.reserved) is not None:
            http.state.reserved = None
            self.service.give_back(http.state.client, count)

    async def run_in_thread(self, http: HttpRequest, work: Callable[..., _Value], *given: Any) -> _Value:
        """Run work over a request's body; in a thread if it is long, of which each client has at most `_AT_ONCE`."""
        if not self.is_long(http):
            return work(*given)
        loop, slots = asyncio.get_running_loop(), self._slots.setdefault(http.state.client, asyncio.Semaphore(_AT_ONCE))
        await slots.acquire()
        doing = self._workers.submit(contextvars.copy_context().run, work, *given)
        doing.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(slots.release))
        return await asyncio.wrap_future(doing)

    def is_long(self, http: HttpRequest) -> bool:
        """Whether work over a request's body would delay other clients."""
        return bool(http.state.body_bytes > _LONG_BODY)

    def _prepared(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        fields: SamplingFields,
        scope: Client | None,
        count: int,
        shown: Mapping[int, str] | None,
    ) -> list[Request]:
        speculation, rule = fields.speculation, None
        if speculation is not None and (words := speculation.rule) is not None:
            if words not in self.rules:
                allowed = ", ".join(map(repr, self.rules)) or "none but the server's own, which need not be named"
                message = f"speculation.rule {quoted(words)} is not allowed here; allowed is {allowed}"
                raise invalid("speculation.rule", message)
            rule = self.rules[words]
        limits = None if speculation is None else speculation.limits
        prepare = self.service.engine.prepare
        return [
            prepare(prompt, params, sample=sample, speculation=limits, rule=rule, scope=scope, shown=shown)
            for prompt in prompts
            for sample in range(count)
        ]

    def logprobs_entry(self, found: TokenLogprobs) -> dict[str, Any]:
        """The logprobs of one token, in the format of chats."""
        top = [self._named(token, logprob) for token, logprob in found.top]
        return self._named(found.token, found.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        spelled = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": spelled}

    def left_out(self, warnings: Sequence[str]) -> None:
        """Log that parts of a request are ignored, without text of clients; the answer lists the parts."""
        if warnings:
            _log.warning("left out of a request: %d tools or items that this server has not", len(warnings))

    def log(self, http: HttpRequest, status: int) -> None:
        """Log one line about an HTTP request, without its content."""
        answering: ResponseHandle | None = http.state.answering
        parts = [f"{quote(http.method)} {quote(http.scope['path'])} {status}", f"client={http.state.client.name}"]
        parts.append(f"seconds={time.perf_counter() - http.state.began:.3f}")
        if answering is not None and answering.streams:
            # An aborted answer has the tokens generated so far.
            answers = [each.answer or each.request.answer(each.request.emitted) for each in answering.streams]
            first = [a.timing.first_token_s for a in answers if a.timing.first_token_s is not None]
            counters = sum((answer.stats for answer in answers), start=Counters())
            parts.append(f"prompt_tokens={answering.streams[0].request.prompt_tokens}")
            parts.append(f"tokens={sum(len(answer.token_ids) for answer in answers)}")
            if first:
                parts.append(f"first_token_s={min(first):.3f}")
            parts.append(f"finish={','.join(sorted({answer.finish_reason for answer in answers}))}")
            parts.append(f"tokens_per_call={counters.mean_acceptance_length:.2f}")
        _log.info(" ".join(parts))


def finite(logprob: float) -> float:
    """Clip to -9999, because JSON has no infinity."""
    return max(logprob, -9999.0)


def new_id(kind: str) -> str:
    """A random id for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"
