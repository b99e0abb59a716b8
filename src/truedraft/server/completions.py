"""`/v1/completions`: text or token ids in, text out."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.core.logprobs import TokenLogprobs
from truedraft.engine import Answer
from truedraft.engine.prompts import TextPrompt
from truedraft.server.errors import ApiError
from truedraft.server.events import DONE, OR_STREAM, EventStream, event
from truedraft.server.fields import Items, ResponseFormat, SamplingFields, checked_logprobs
from truedraft.server.front import Front, finish_reason, finite, new_id, unless_gone
from truedraft.server.service import Answering, Stream
from truedraft.server.traces import trace_of
from truedraft.text.infill import Infilling


class CompletionRequest(SamplingFields):
    """The body of a request for completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]] = Field(
        description="A text, token ids, or a list of either."
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def prompts(self) -> list[TextPrompt]:
        """Each of them."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)  # type: ignore[arg-type]

    @property
    def drawn(self) -> int:
        """Answers that are drawn for each prompt; of these the best `samples` are given."""
        return self.samples if self.best_of is None else self.best_of

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ApiError: says what.
        """
        if self.suffix and self.echo:
            message = "echo gives the prompt back, and with suffix the answer stands in its middle; leave one out"
            raise ApiError(400, message, param="suffix")
        if not self.prompts:
            raise ApiError(400, "prompt is an empty list; give at least one", param="prompt")
        if self.drawn < self.samples:
            raise ApiError(400, f"best_of must be at least n, {self.samples}, got {self.best_of}", param="best_of")
        if self.drawn > self.samples and self.stream:
            raise ApiError(400, "best_of cannot be streamed: the best is known at the end", param="best_of")
        checked_logprobs("logprobs", self.logprobs)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, so nothing would be answered; ask for 1 or more", param="max_tokens")


def completions_router(front: Front) -> APIRouter:
    """The endpoint."""
    router = APIRouter()
    infilling_of = cache(_infilling)

    @router.post("/v1/completions", responses=OR_STREAM)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Continue texts."""
        body.check()
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        logprobs = body.logprobs if body.logprobs is not None else (0 if body.drawn > body.samples else None)
        form = None if body.response_format is None else body.response_format.asked
        params = body.sampling(max(max_tokens, 1), logprobs=logprobs, form=form)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=body.logprobs)
        prompts = body.prompts
        if body.suffix:
            infilling = infilling_of(front)
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *infilling.ends))
            prompts = await front.apart(http, _infilled, infilling, prompts, body.suffix)
        answering = await front.begin(prompts, params, body, http, samples=body.drawn)
        made = _Completion(front, body, answering, max_tokens)
        if body.stream:
            return EventStream(made.events(), answering.close)
        await unless_gone(http, answering.answers())
        return await front.answer(answering, made.whole)

    return router


def _infilling(front: Front) -> Infilling:
    """How the model is asked for a text in the middle.

    Raises:
        ApiError: it has no tokenizer.
        PromptError: its vocabulary has no tokens for that.
    """
    tokenizer = front.service.engine.target.tokenizer
    if tokenizer is None:
        raise ApiError(400, "suffix is a text, and this model has no tokenizer; it takes token ids", param="suffix")
    return Infilling.of(tokenizer)


def _infilled(infilling: Infilling, prompts: Sequence[TextPrompt], suffix: str) -> list[TextPrompt]:
    """Prompts for what stands between each of them and a suffix.

    Raises:
        ApiError: one of them is no text.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ApiError(400, "suffix goes with a prompt that is text, not token ids; send the text", param="suffix")
    return [infilling.prompt(text, suffix) for text in texts]


class _Completion:
    """One answer to a request for completions, on its way.

    Args:
        front: what endpoints share.
        body: of the request.
        answering: its samples.
        max_tokens: of each; 0 gives back the prompt alone.
    """

    def __init__(self, front: Front, body: CompletionRequest, answering: Answering, max_tokens: int) -> None:
        self._front = front
        self._body = body
        self._answering = answering
        self._keeps = max_tokens > 0
        self._head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time())}
        self._head["model"] = front.shown(body.model)

    def whole(self) -> dict[str, Any]:
        """All choices."""
        body, streams = self._body, self._answering.streams
        chosen: list[Stream] = []
        for first in range(0, len(streams), body.drawn):
            ranked = sorted(streams[first : first + body.drawn], key=_mean_logprob, reverse=body.drawn > body.samples)
            chosen += ranked[: body.samples]
        choices = [self._choice(number, stream) for number, stream in enumerate(chosen)]
        front = self._front
        rest = {"usage": self._usage(), "speculation": front.speculation(streams)}
        return self._head | {"choices": choices} | rest

    def _usage(self) -> dict[str, Any]:
        return self._front.usage(self._answering, self._body.drawn, answers_count=self._keeps)

    def _choice(self, number: int, stream: Stream) -> dict[str, Any]:
        answer = stream.answer
        assert answer is not None
        texts = self._echoed(stream) if self._body.echo else ""
        text = texts + ((answer.text or "") if self._keeps else "")
        found: dict[str, Any] = {"index": number, "text": text, "logprobs": None}
        if self._body.logprobs is not None:
            found["logprobs"] = self._logprobs(stream, answer.logprobs or [], 0, echoes=bool(self._body.echo))
        if answer.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None, *map(self._front.logprobs_entry, answer.prompt_logprobs)]
        if self._body.return_token_ids:
            found["prompt_token_ids"] = stream.prompt_ids
            found["token_ids"] = answer.token_ids if self._keeps else []
        return found | {"finish_reason": finish_reason(answer) if self._keeps else "length"}

    def _echoed(self, stream: Stream) -> str:
        """The text of the prompt."""
        prompts = self._body.prompts
        prompt = prompts[stream.number // self._body.drawn]
        tokenizer = self._front.service.engine.target.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt)

    def _logprobs(
        self, stream: Stream, found: Sequence[TokenLogprobs], offset: int, *, echoes: bool = False
    ) -> dict[str, Any]:
        """Of tokens whose text begins `offset` characters behind the beginning."""
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        if echoes:
            tokens.append(self._front.token_text(stream.request.tokens[0]))
            values.append(None)
            top.append(None)
            found = [*stream.request.prompt_logprobs, *(found if self._keeps else ())]
        for each in found:
            tokens.append(self._front.token_text(each.token))
            values.append(finite(each.logprob))
            top.append({self._front.token_text(token): finite(value) for token, value in each.top})
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        asked = self._body.logprobs
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top if asked else None,
            "text_offset": offsets,
        }

    async def events(self) -> AsyncIterator[str]:
        """The choices piece by piece, each as it comes."""
        body, front, streams = self._body, self._front, self._answering.streams
        offsets = [0] * len(streams)
        waiting = {stream.number for stream in streams if body.echo}  # for the text of their prompt
        untold = {stream.number for stream in streams if body.return_token_ids}  # as to the ids of their prompt
        async for news in self._answering.news():
            stream = streams[news.number]
            if news.number in waiting:  # here, for logprobs of a prompt are known once it is read
                waiting.remove(news.number)
                choice = _delta(news.number, self._echoed(stream))
                if body.logprobs is not None:
                    choice["logprobs"] = self._logprobs(stream, (), 0, echoes=True)
                offsets[news.number] = len(choice["text"])
                if body.return_token_ids:
                    choice |= {"token_ids": [], "prompt_token_ids": stream.prompt_ids}
                    untold.discard(news.number)
                yield event(self._head | {"choices": [choice]})
            pieces = news.pieces if self._keeps else [each for each in news.pieces if each.answer is not None]
            answer = pieces[-1].answer if pieces else None
            text = "".join(piece.text for piece in pieces) if self._keeps else ""
            choice = _delta(news.number, text)
            if body.logprobs is not None:
                entries = [entry for piece in pieces for entry in piece.logprobs] if self._keeps else []
                choice["logprobs"] = self._logprobs(stream, entries, offsets[news.number])
                offsets[news.number] += sum(len(front.token_text(entry.token)) for entry in entries)
            if body.return_token_ids:
                choice["token_ids"] = [token for piece in pieces for token in piece.token_ids] if self._keeps else []
            chunk = self._head | {"choices": [choice]}
            if stream.shows_steps:
                chunk["trace"] = trace_of(stream, news, front.token_text)
            if answer is not None:
                choice["finish_reason"] = finish_reason(answer) if self._keeps else "length"
                chunk["speculation"] = front.speculation([stream])
            if text or answer is not None or choice["logprobs"] or choice.get("token_ids") or stream.shows_steps:
                if news.number in untold:
                    untold.remove(news.number)
                    choice["prompt_token_ids"] = stream.prompt_ids
                yield event(chunk)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage()})
        yield DONE


def _delta(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}


def _mean_logprob(stream: Stream) -> float:
    """Of an answer's tokens, by which the best of several is chosen."""
    answer: Answer | None = stream.answer
    values = [] if answer is None or answer.logprobs is None else [each.logprob for each in answer.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf
