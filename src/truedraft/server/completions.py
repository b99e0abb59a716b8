"""`/v1/completions`: text or token ids in, text out."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.params import SamplingParams
from truedraft.engine.prompts import TextPrompt
from truedraft.server.answers import View
from truedraft.server.bodies import BodyRoute
from truedraft.server.errors import invalid
from truedraft.server.events import DONE, OR_STREAM, event
from truedraft.server.fields import Many, ResponseFormat, SamplingFields, checked_logprobs
from truedraft.server.front import Front, finite
from truedraft.server.service import ResponseHandle, Stream, StreamUpdate
from truedraft.text.infill import Infilling


class CompletionRequest(SamplingFields):
    """The body of a request for completions."""

    prompt: str | Many[int] | Many[str] | Many[Many[int]] = Field(description="A text, token ids, or a list of either.")
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def prompts(self) -> list[TextPrompt]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)  # type: ignore[arg-type]

    @property
    def drawn(self) -> int:
        """Answers generated per prompt; the best `samples` of them are returned."""
        return self.samples if self.best_of is None else self.best_of

    @property
    def most_tokens(self) -> int:
        """Limit of tokens per answer; 0 returns only the prompt."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        """Refuse fields that conflict, by an `ApiError` with their names."""
        checked_logprobs("logprobs", self.logprobs)
        drawn, samples = self.drawn, self.samples
        both = "echo gives the prompt back, and with suffix the answer is in its middle; leave one out"
        nothing = "max_tokens is 0, so nothing would be answered; request 1 or more"
        for is_wrong, param, message in (
            (self.suffix and self.echo, "suffix", both),
            (not self.prompts, "prompt", "prompt is an empty list; give at least one"),
            (drawn < samples, "best_of", f"best_of must be at least n, {samples}, got {drawn}"),
            (drawn > samples and self.stream, "best_of", "best_of cannot be streamed: the best is known at the end"),
            (self.max_tokens == 0 and not self.echo, "max_tokens", nothing),
        ):
            if is_wrong:
                raise invalid(param, message)


def completions_router(front: Front) -> APIRouter:
    """The router of the endpoint."""
    router = APIRouter(route_class=BodyRoute)

    @cache
    def infilling() -> Infilling:
        tokenizer = front.service.engine.target.tokenizer
        if tokenizer is None:
            raise invalid("suffix", "suffix is a text, and this model has no tokenizer; it takes token ids")
        return Infilling.of(tokenizer)

    @router.post("/v1/completions", responses=OR_STREAM)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Continue texts."""
        body.check()
        front.check_count(len(body.prompts) * body.drawn, len(body.prompts))
        prompts, params = await front.run_in_thread(http, prepared, body)
        answering = await front.begin(prompts, params, body, http, samples=body.drawn)
        return await _Completion(front, answering, body).reply(http)

    def prepared(body: CompletionRequest) -> tuple[Sequence[TextPrompt], SamplingParams]:
        logprobs = body.logprobs if body.logprobs is not None else (0 if body.drawn > body.samples else None)
        form = None if body.response_format is None else body.response_format.form
        params = body.sampling(max(body.most_tokens, 1), logprobs=logprobs, form=form)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=body.logprobs)
        if not body.suffix:
            return body.prompts, params
        form_of = infilling()
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        if len(texts) < len(body.prompts):
            raise invalid("suffix", "suffix goes with a prompt that is text, not token ids; send the text")
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *form_of.ends))
        return [form_of.prompt(text, body.suffix) for text in texts], params

    return router


class _Completion(View):
    kind = "cmpl"

    def __init__(self, front: Front, answering: ResponseHandle, body: CompletionRequest) -> None:
        super().__init__(front, answering, body)
        self._body = body
        self._keeps = body.most_tokens > 0
        self._head: dict[str, Any] = {"id": self.id, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = self.model
        self._offsets = [0] * len(answering.streams)
        self._begun: set[int] = set()  # samples with chunks sent so far

    def whole(self, parts: Sequence[StreamUpdate]) -> dict[str, Any]:
        drawn, samples = self._body.drawn, self._body.samples
        chosen: list[StreamUpdate] = []
        for first in range(0, len(parts), drawn):
            ranked = sorted(parts[first : first + drawn], key=_mean_logprob, reverse=drawn > samples)
            chosen += ranked[:samples]
        choices = [self._choice(number, part) for number, part in enumerate(chosen)]
        rest = {"usage": self._usage(), "speculation": self.speculation()}
        return self._head | {"choices": choices} | rest | self.metrics()

    def _usage(self) -> dict[str, Any]:
        return self.usage(self._body.drawn, answers_count=self._keeps)

    def _ending(self, part: StreamUpdate) -> str | None:
        return part.ending if self._keeps else "length"

    def _choice(self, number: int, part: StreamUpdate) -> dict[str, Any]:
        answer, body, stream = part.answer, self._body, part.stream
        assert answer is not None
        text = (self._echoed(stream) if body.echo else "") + (part.text if self._keeps else "")
        found: dict[str, Any] = {"index": number, "text": text, "logprobs": None}
        if body.logprobs is not None:
            found["logprobs"] = self._logprobs(stream, part.logprobs, 0, echoes=bool(body.echo))
        if answer.prompt_logprobs is not None and body.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None, *map(self.front.logprobs_entry, answer.prompt_logprobs)]
        if body.return_token_ids:
            found["prompt_token_ids"] = stream.prompt_ids
            found["token_ids"] = part.token_ids if self._keeps else []
        return found | {"finish_reason": self._ending(part)}

    def _echoed(self, stream: Stream) -> str:
        prompt = self._body.prompts[stream.number // self._body.drawn]
        tokenizer = self.front.service.engine.target.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt)

    def _logprobs(
        self, stream: Stream, found: Sequence[TokenLogprobs], offset: int, *, echoes: bool = False
    ) -> dict[str, Any]:
        """Logprobs of tokens with the first one's text `offset` characters after the beginning."""
        text_of, first = self.front.token_text, stream.request.tokens[:1] if echoes else []
        if echoes:
            found = [*stream.request.prompt_logprobs, *(found if self._keeps else ())]
        tokens = list(map(text_of, [*first, *(each.token for each in found)]))
        unknown = [None] * len(first)
        top = [{text_of(token): finite(value) for token, value in each.top} for each in found]
        return {
            "tokens": tokens,
            "token_logprobs": [*unknown, *(finite(each.logprob) for each in found)],
            "top_logprobs": [*unknown, *top] if self._body.logprobs else None,
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
        }

    def read(self, part: StreamUpdate) -> Iterator[str]:
        body, stream, number = self._body, part.stream, part.stream.number
        if body.echo and number not in self._begun:  # here, because a prompt's logprobs are known after prefill
            choice = _delta(number, self._echoed(stream))
            self._offsets[number] = len(choice["text"])
            if body.logprobs is not None:
                choice["logprobs"] = self._logprobs(stream, (), 0, echoes=True)
            if body.return_token_ids:
                choice["token_ids"] = []
            yield self._sent(self._head | {"choices": [choice]}, stream)
        choice = _delta(number, part.text if self._keeps else "")
        if body.logprobs is not None:
            entries = part.logprobs if self._keeps else ()
            choice["logprobs"] = self._logprobs(stream, entries, self._offsets[number])
            self._offsets[number] += sum(map(len, choice["logprobs"]["tokens"]))
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids if self._keeps else []
        chunk = self._head | {"choices": [choice]} | self.trace(part)
        if part.answer is not None:
            choice["finish_reason"] = self._ending(part)
            chunk["speculation"] = self.speculation(stream)
        has_content = choice["text"] or choice["logprobs"] or choice.get("token_ids") or "trace" in chunk
        if has_content or part.answer is not None:
            yield self._sent(chunk, stream)

    def _sent(self, chunk: dict[str, Any], stream: Stream) -> str:
        """A chunk of a sample; the first one has the ids of its prompt, if requested."""
        if self._body.return_token_ids and stream.number not in self._begun:
            chunk["choices"][0]["prompt_token_ids"] = stream.prompt_ids
        self._begun.add(stream.number)
        return event(chunk)

    def ended(self) -> Iterator[str]:
        yield from self.usage_chunk(self._head, self._usage)
        yield DONE


def _delta(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}


def _mean_logprob(part: StreamUpdate) -> float:
    values = [each.logprob for each in part.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf
