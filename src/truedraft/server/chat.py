"""`/v1/chat/completions`: a conversation in, a message or calls of functions out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.errors import PromptError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.errors import ApiError
from truedraft.server.events import DONE, OR_STREAM, EventStream, event
from truedraft.server.fields import (
    Items,
    ResponseFormat,
    SamplingFields,
    SeenContent,
    Thinking,
    Told,
    checked_logprobs,
    parts_of,
    urls_of,
)
from truedraft.server.front import Front, finish_reason, has_called, new_id, unless_gone
from truedraft.server.service import Answering, Stream
from truedraft.server.tools import FunctionFields, NamedFunction, NamedTool, ToolFields, ToolUse, arguments_for_template
from truedraft.server.traces import trace_of
from truedraft.text.calls import CallDelta
from truedraft.text.histories import first_taken
from truedraft.text.notations import AnswerReader, Reasoning


class CalledFunction(Told):
    """A function that was called."""

    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        given = self.arguments or {}
        return {"name": self.name, "arguments": arguments_for_template(given) if isinstance(given, str) else given}


class CalledTool(Told):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": "function", "function": self.function.for_template}


class Message(Told):
    """A part of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SeenContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # as it was before there were tools

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = self.content if self.content is not None else self.refusal or ""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        found: dict[str, Any] = {"role": role, "content": parts_of(content)}
        if reasoning := self.reasoning_content or self.reasoning:
            found["reasoning_content"] = reasoning
        if calls := self.calls:
            found["tool_calls"] = [call.for_template for call in calls]
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found

    @property
    def calls(self) -> list[CalledTool]:
        """What it called."""
        old = [] if self.function_call is None else [CalledTool(function=self.function_call)]
        return [*(self.tool_calls or ()), *old]


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
    functions: Items[FunctionFields] | None = Field(None, description="Tools as they were once; use `tools`.")
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    response_format: ResponseFormat | None = None
    continue_final_message: bool | None = Field(None, description="Go on with the last message, the assistant's.")
    add_generation_prompt: bool | None = None
    modalities: Items[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    # Taken, and of no effect.
    store: bool | None = None
    verbosity: str | None = None

    @property
    def thinks(self) -> Thinking:
        """What it asks of reasoning."""
        return Thinking.of(self.reasoning_budget, self.thinking, self.reasoning, self.reasoning_effort)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens are told."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        return checked_logprobs("top_logprobs", self.top_logprobs or 0)

    @property
    def use(self) -> tuple[Sequence[ToolFields] | None, str | NamedTool | None, bool | None]:
        """Tools, the choice among them, and whether several may be called."""
        if not self.functions:
            return self.tools, self.tool_choice, self.parallel_tool_calls
        if self.tools:
            raise ApiError(400, "functions and tools say the same; leave functions out", param="functions")
        tools = [ToolFields(type="function", function=each) for each in self.functions]
        if isinstance(self.function_call, NamedFunction):
            return tools, NamedTool(type="function", function=self.function_call), False
        return tools, self.function_call, False

    @property
    def tool_fields(self) -> tuple[str, str]:
        """What the request calls tools and the choice among them."""
        return ("functions", "function_call") if self.functions else ("tools", "tool_choice")

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates know it; calls and results that come without ids go together in their order."""
        found = [each.for_template for each in self.messages]
        waiting: list[str] = []  # ids of calls without results
        for place, message in enumerate(found):
            for number, call in enumerate(message.get("tool_calls", ())):
                waiting.append(call.setdefault("id", f"call_{place}_{number}"))
            if message["role"] == "tool":
                answered = message.setdefault("tool_call_id", waiting[0] if waiting else f"call_{place}")
                waiting = [each for each in waiting if each != answered]
        return found

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message.

        Raises:
            ApiError: it cannot, or another message is to begin as well.
        """
        param = "continue_final_message"
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                message = "add_generation_prompt is false, so no answer would begin; set continue_final_message"
                raise ApiError(400, message, param="add_generation_prompt")
            return False
        if self.add_generation_prompt:
            message = f"{param} goes on with the last message and add_generation_prompt begins another; leave one out"
            raise ApiError(400, message, param=param)
        last = self.messages[-1]
        if last.role != "assistant" or last.calls or not last.content:
            message = f"{param} needs a last message of the assistant's that has text and no calls; send that"
            raise ApiError(400, message, param=param)
        return True


async def chat_prompt(
    front: Front,
    http: HttpRequest,
    messages: Sequence[Mapping[str, Any]],
    urls: Sequence[str],
    use: ToolUse,
    *,
    more: Mapping[str, Any] | None = None,
    continues: bool = False,
    param: str = "messages",
    samples: int = 1,
) -> list[int] | MultimodalPrompt:
    """A conversation as a prompt, by the chat template. It takes no time of other clients where it is long.

    Args:
        front: what endpoints share.
        http: the HTTP request.
        messages: as templates know them.
        urls: of the pictures in them, in order.
        use: of tools.
        more: what else the template is given.
        continues: whether the answer goes on with the last message.
        param: the field that holds the messages.
        samples: that are asked for, whose places are kept while pictures are read.

    Raises:
        ApiError: there is no template, it refuses the messages, the pictures cannot be used, or there is no room.
        OptionError: what else it is given are no variables of templates.
    """
    if not urls:
        return await front.apart(http, _chat_ids, front, messages, use, more, continues, param)
    front.reserve(http, max(samples, 1))  # what it may be is checked later
    told, tools = _with_tools(front, messages, use)
    how = {
        "tools": tools,
        "template": front.chat_template,
        "variables": more,
        "continues": continues,
        "trust_control_tokens": front.trust_control_tokens,
    }
    return await front.pictures.chat(told, urls, param=param, **how)


def _chat_ids(
    front: Front,
    messages: Sequence[Mapping[str, Any]],
    use: ToolUse,
    more: Mapping[str, Any] | None,
    continues: bool,
    param: str,
) -> list[int]:
    """A conversation as token ids, by the chat template; arguments and errors as of `chat_prompt`."""
    tokenizer = front.service.engine.target.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer, so there are no chats; ask /v1/completions with token ids")
    told, tools = _with_tools(front, messages, use)
    try:
        return first_taken(
            told,
            partial(
                tokenizer.chat,
                tools=tools,
                template=front.chat_template,
                variables=more,
                continues=continues,
                trust_control_tokens=front.trust_control_tokens,
            ),
        )
    except PromptError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error


def _with_tools(
    front: Front, messages: Sequence[Mapping[str, Any]], use: ToolUse
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the template takes them; of tools that it does not know the system's message tells."""
    tools = [tool.model_dump(exclude_none=True) for tool in use.tools]
    told = list(messages)
    if any(message.get("tool_calls") or message.get("tool_call_id") for message in told):
        told = list(front.history.fitted(told, use.notation))
    if tools and "tools" not in front.template:
        text = use.notation.told(tools)
        if told[0]["role"] == "system" and isinstance(told[0]["content"], str):  # many templates take but one
            text += "\n\n" + told.pop(0)["content"]
        told.insert(0, {"role": "system", "content": text})
    return told, front.history.tools(tools) if tools else None


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
        use, continues = ToolUse.of(*body.use, front.notation, body.tool_fields), body.continues
        if continues and use.forced is not None:
            message = "tool_choice begins the answer with a call, and continue_final_message goes on with a text"
            raise ApiError(400, message, param="continue_final_message")
        urls = [url for each in body.messages for url in urls_of(each.content)]
        prompt = await chat_prompt(
            front,
            http,
            body.conversation,
            urls,
            use,
            more=front.switches(body.thinks) | (body.chat_template_kwargs or {}),
            continues=continues,
            samples=body.samples,
        )
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        form = use.forced or (None if body.response_format is None else body.response_format.asked)
        room = room_for(front, prompt, asked)
        params = use.fitted(body.sampling(room, logprobs=body.wanted_logprobs, form=form))
        answering = await front.begin([prompt], params, body, http, notation=front.notation)
        made = _Chat(front, body, answering, [front.reader(use, prompt) for _ in answering.streams])
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
        readers: of the samples.
    """

    def __init__(self, front: Front, body: ChatRequest, answering: Answering, readers: Sequence[AnswerReader]) -> None:
        self._front = front
        self._body = body
        self._answering = answering
        self._readers = readers
        self._called = "function_call" if body.functions else "tool_calls"
        model = front.shown(body.model)
        self._head: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """All choices."""
        streams, front = self._answering.streams, self._front
        choices = [self._choice(stream) for stream in streams]  # first, for the usage tells what is read there
        rest: dict[str, Any] = {
            "usage": front.usage(self._answering, len(streams), self._readers),
            "speculation": front.speculation(streams),
        }
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = streams[0].prompt_ids
        return self._head | {"object": "chat.completion", "choices": choices} | rest

    def _choice(self, stream: Stream) -> dict[str, Any]:
        answer = stream.answer
        assert answer is not None
        reason, reader = finish_reason(answer), self._readers[stream.number]
        text, reasoning, _ = _sorted(reader.push(answer.text or "", last=True))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if reader.calls:
            called: Any = [call.record for call in reader.calls]
            called = called[0]["function"] if self._called == "function_call" else called
            message |= {"content": text or None, self._called: called}
            reason = self._called if has_called(answer, reader) else reason
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
        begin = head | ({"prompt_token_ids": streams[0].prompt_ids} if self._body.return_token_ids else {})
        for stream in streams:
            yield event(begin | {"choices": [_delta(stream.number, {"role": "assistant", "content": ""})]})
            begin = head
        async for news in self._answering.news():
            stream, reader = streams[news.number], self._readers[news.number]
            answer = news.pieces[-1].answer if news.pieces else None
            parts = reader.push("".join(piece.text for piece in news.pieces), last=answer is not None)
            text, reasoning, calls = _sorted(parts)
            delta: dict[str, Any] = {"content": text} if text else {}
            if reasoning:
                delta["reasoning_content"] = reasoning
            if calls:
                called = list(map(_call_delta, calls))
                delta[self._called] = _joined(called) if self._called == "function_call" else called
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
                choice["finish_reason"] = self._called if has_called(answer, reader) else finish_reason(answer)
                chunk["speculation"] = front.speculation([stream])
            if delta or entries or choice.get("token_ids") or answer is not None or stream.shows_steps:
                yield event(chunk)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": front.usage(self._answering, len(streams), self._readers)})
        yield DONE


def _delta(number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": dict(delta), "logprobs": None, "finish_reason": None}


def _sorted(parts: Sequence[str | Reasoning | CallDelta]) -> tuple[str, str, list[CallDelta]]:
    """Text, reasoning, and what came of calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return text, reasoning, [part for part in parts if isinstance(part, CallDelta)]


def _call_delta(new: CallDelta) -> dict[str, Any]:
    if new.begins:
        return {"index": new.index} | new.call.record | {"function": {"name": new.call.name, "arguments": ""}}
    return {"index": new.index, "function": {"arguments": new.arguments}}


def _joined(called: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What came of the one call, as it was told before there were tools."""
    found: dict[str, str] = {}
    for each in called:
        for name, text in each["function"].items():
            found[name] = found.get(name, "") + text
    return found
