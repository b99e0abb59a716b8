"""`/v1/chat/completions`: a conversation in, a message or calls of functions out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from truedraft.errors import PromptError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.errors import ApiError
from truedraft.server.events import DONE, OR_STREAM, EventStream, event
from truedraft.server.fields import (
    Fields,
    Items,
    ResponseFormat,
    SamplingFields,
    SeenContent,
    checked_logprobs,
    parts_of,
    urls_of,
)
from truedraft.server.front import Front, finish_reason, new_id, unless_gone
from truedraft.server.service import Answering, Stream
from truedraft.server.tools import CallDelta, CallReader, NamedTool, ToolFields, ToolUse, arguments_for_template
from truedraft.server.traces import trace_of


class CalledFunction(Fields):
    """A function that was called."""

    name: str
    arguments: str


class CalledTool(Fields):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.function.name, "arguments": arguments_for_template(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Message(Fields):
    """A part of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: SeenContent | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    # What OpenAI's own library sends where an answer of it is sent back as it came.
    annotations: Items[Any] | None = None
    audio: None = None
    function_call: None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = self.content if self.content is not None else self.refusal or ""
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": parts_of(content),
        }
        if self.tool_calls:
            found["tool_calls"] = [call.for_template for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found


class ChatRequest(SamplingFields):
    """The body of a request for a chat's next message."""

    messages: Items[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[ToolFields] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Items[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    # Taken, and of no effect: nothing is stored, and how models think is a matter of their templates.
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens are told."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        return checked_logprobs("top_logprobs", self.top_logprobs or 0)


async def chat_prompt(
    front: Front,
    http: HttpRequest,
    messages: Sequence[Mapping[str, Any]],
    urls: Sequence[str],
    use: ToolUse | None,
    *,
    more: Mapping[str, Any] | None = None,
    param: str = "messages",
    samples: int = 1,
) -> list[int] | MultimodalPrompt:
    """A conversation as a prompt, by the chat template. It takes no time of other clients where it is long.

    Args:
        front: what endpoints share.
        http: the HTTP request.
        messages: as templates know them.
        urls: of the pictures in them, in order.
        use: of tools; None for a request without.
        more: what else the template is given.
        param: the field that holds the messages.
        samples: that are asked for, whose places are kept while pictures are read.

    Raises:
        ApiError: there is no template, it refuses the messages, the pictures cannot be used, or there is no room.
        OptionError: what else it is given are no variables of templates.
    """
    if not urls:
        return await front.apart(http, _chat_ids, front, messages, use, more)
    front.reserve(http, max(samples, 1))  # what it may be is checked later
    told, tools = _with_tools(front, messages, use)
    return await front.pictures.chat(told, urls, tools=tools, template=front.chat_template, variables=more, param=param)


def _chat_ids(
    front: Front, messages: Sequence[Mapping[str, Any]], use: ToolUse | None, more: Mapping[str, Any] | None
) -> list[int]:
    """A conversation as token ids, by the chat template.

    Args:
        front: what endpoints share.
        messages: as templates know them.
        use: of tools; None for a request without.
        more: what else the template is given.

    Raises:
        ApiError: there is no template, or it refuses the messages.
        OptionError: what else it is given are no variables of templates.
    """
    tokenizer = front.service.engine.target.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer, so there are no chats; ask /v1/completions with token ids")
    told, tools = _with_tools(front, messages, use)
    try:
        return tokenizer.chat(told, tools=tools, template=front.chat_template, variables=more)
    except PromptError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


def _with_tools(
    front: Front, messages: Sequence[Mapping[str, Any]], use: ToolUse | None
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools for the template; of tools that it does not know a message of the system's tells."""
    tools = None if use is None else [tool.model_dump(exclude_none=True) for tool in use.tools]
    told = list(messages)
    if use is not None and "tools" not in template_of(front):
        told.insert(0, {"role": "system", "content": use.style.told(use.tools)})
    return told, tools


def template_of(front: Front) -> str:
    """The chat template that is used; "" where there is none."""
    tokenizer = front.service.engine.target.tokenizer
    return front.chat_template or ("" if tokenizer is None else tokenizer.chat_template)


def room_for(front: Front, prompt: list[int] | MultimodalPrompt, asked: int | None) -> int:
    """Most tokens of an answer: as many as are asked for, else all that the context has left.

    Raises:
        ApiError: the context has no room.
    """
    ids = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt
    left = front.service.engine.target.most_tokens(ids) - len(ids)
    if left < 1:
        raise ApiError(
            400,
            f"the conversation has {len(ids)} tokens, and this model's context is {left + len(ids)}; shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    return left if asked is None else asked


def chat_router(front: Front) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=OR_STREAM)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        front.check_model(body.model)
        if not body.messages:
            raise ApiError(400, "messages is empty; give at least one", param="messages")
        use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls, template_of(front))
        messages = [each.for_template for each in body.messages]
        urls = [url for each in body.messages for url in urls_of(each.content)]
        prompt = await chat_prompt(
            front, http, messages, urls, use, more=body.chat_template_kwargs, samples=body.samples
        )
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        form = None if body.response_format is None else body.response_format.asked
        if use is not None and use.forced is not None:
            form = use.forced
        params = body.sampling(room_for(front, prompt, asked), logprobs=body.wanted_logprobs, form=form)
        answering = await front.begin([prompt], params, body, http)
        made = _Chat(front, body, answering, use)
        if body.stream:
            return EventStream(made.events(), answering.close)
        await unless_gone(http, answering.answers())
        return await front.answer(answering, made.whole)

    return router


class _Chat:
    """One answer to a request for a message, on its way.

    Args:
        front: what endpoints share.
        body: of the request.
        answering: its samples.
        use: of tools.
    """

    def __init__(self, front: Front, body: ChatRequest, answering: Answering, use: ToolUse | None) -> None:
        self._front = front
        self._body = body
        self._answering = answering
        self._use = use
        model = front.shown(body.model)
        self._head: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """All choices."""
        streams, front = self._answering.streams, self._front
        rest: dict[str, Any] = {
            "usage": front.usage(self._answering, len(streams)),
            "speculation": front.speculation(streams),
        }
        choices = [self._choice(stream) for stream in streams]
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = streams[0].prompt_ids
        return self._head | {"object": "chat.completion", "choices": choices} | rest

    def _choice(self, stream: Stream) -> dict[str, Any]:
        answer = stream.answer
        assert answer is not None
        reason, text = finish_reason(answer), answer.text or ""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._use is not None:
            reader = CallReader(self._use)
            plain = "".join(part for part in reader.push(text, last=True) if isinstance(part, str))
            message["content"] = plain
            if reader.calls:
                message |= {"content": plain or None, "tool_calls": [call.record for call in reader.calls]}
                reason = "tool_calls" if reason == "stop" else reason
        logprobs = None
        if answer.logprobs is not None:
            logprobs = {"content": list(map(self._front.logprobs_entry, answer.logprobs)), "refusal": None}
        found = {"index": stream.number, "message": message, "logprobs": logprobs, "finish_reason": reason}
        if answer.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None, *map(self._front.logprobs_entry, answer.prompt_logprobs)]
        if self._body.return_token_ids:
            found["token_ids"] = answer.token_ids
        return found

    async def events(self) -> AsyncIterator[str]:
        """The choices piece by piece."""
        front, streams = self._front, self._answering.streams
        head = self._head | {"object": "chat.completion.chunk"}
        readers = [None if self._use is None else CallReader(self._use) for _ in streams]
        begin = head | ({"prompt_token_ids": streams[0].prompt_ids} if self._body.return_token_ids else {})
        for stream in streams:
            yield event(begin | {"choices": [_delta(stream.number, {"role": "assistant", "content": ""})]})
            begin = head
        async for news in self._answering.news():
            stream, reader = streams[news.number], readers[news.number]
            answer = news.pieces[-1].answer if news.pieces else None
            text, calls = "".join(piece.text for piece in news.pieces), list[CallDelta]()
            if reader is not None:
                parts = reader.push(text, last=answer is not None)
                text = "".join(part for part in parts if isinstance(part, str))
                calls = [part for part in parts if not isinstance(part, str)]
            delta: dict[str, Any] = {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = list(map(_call_delta, calls))
            choice = _delta(news.number, delta)
            entries = [entry for piece in news.pieces for entry in piece.logprobs]
            if entries:
                choice["logprobs"] = {"content": list(map(front.logprobs_entry, entries)), "refusal": None}
            if self._body.return_token_ids:
                choice["token_ids"] = [token for piece in news.pieces for token in piece.token_ids]
            chunk = head | {"choices": [choice]}
            if stream.shows_steps:
                chunk["trace"] = trace_of(stream, news, front.token_text)
            if answer is not None:
                reason = finish_reason(answer)
                called = reader is not None and reader.calls and reason == "stop"
                choice["finish_reason"] = "tool_calls" if called else reason
                chunk["speculation"] = front.speculation([stream])
            if delta or entries or choice.get("token_ids") or answer is not None or stream.shows_steps:
                yield event(chunk)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": front.usage(self._answering, len(streams))})
        yield DONE


def _delta(number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": dict(delta), "logprobs": None, "finish_reason": None}


def _call_delta(new: CallDelta) -> dict[str, Any]:
    if new.begins:
        return {"index": new.index} | new.call.record | {"function": {"name": new.call.name, "arguments": ""}}
    return {"index": new.index, "function": {"arguments": new.arguments}}
