"""`/v1/chat/completions`: a conversation in, a message or function calls out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.server.answers import View
from truedraft.server.bodies import BodyRoute
from truedraft.server.conversations import (
    Conversation,
    FunctionFields,
    NamedFunction,
    NamedTool,
    ToolFields,
    ToolUse,
    called,
)
from truedraft.server.errors import invalid
from truedraft.server.events import DONE, OR_STREAM, event
from truedraft.server.fields import (
    Items,
    LenientModel,
    ResponseFormat,
    SamplingFields,
    SeenContent,
    Thinking,
    checked_logprobs,
    parts_of,
)
from truedraft.server.front import Front
from truedraft.server.service import ResponseHandle, StreamUpdate
from truedraft.text.calls import CallDelta


class CalledFunction(LenientModel):
    """A function that was called."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(LenientModel):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(LenientModel):
    """A part of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SeenContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same field
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # the older field, before `tool_calls`

    @property
    def for_template(self) -> dict[str, Any]:
        content = self.content if self.content is not None else self.refusal or ""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        found: dict[str, Any] = {"role": role, "content": parts_of(content)}
        if reasoning := self.reasoning_content or self.reasoning:
            found["reasoning_content"] = reasoning
        if calls := self.calls:
            found["tool_calls"] = [called(each.id, each.function.name, each.function.arguments or {}) for each in calls]
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        return found | {name: value for name, value in more.items() if value is not None}

    @property
    def calls(self) -> list[CalledTool]:
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
    # Accepted without effect.
    store: bool | None = None
    verbosity: str | None = None

    @property
    def thinks(self) -> Thinking:
        return Thinking.of(self.reasoning_budget, self.thinking, self.reasoning, self.reasoning_effort)

    @property
    def templated(self) -> list[dict[str, Any]]:
        """The conversation in the format of chat templates; calls and results without ids are matched in order."""
        found = [each.for_template for each in self.messages]
        waiting: OrderedDict[str, None] = OrderedDict()  # ids of calls without a result so far
        for place, message in enumerate(found):
            for number, call in enumerate(message.get("tool_calls", ())):
                waiting[call.setdefault("id", f"call_{place}_{number}")] = None
            if message["role"] == "tool":
                answered = message.setdefault("tool_call_id", next(iter(waiting), f"call_{place}"))
                waiting.pop(answered, None)
        return found

    def conversation(self, front: Front) -> Conversation:
        """What is to be answered; an `ApiError` if fields conflict, or the required function does not exist."""
        if not self.messages:
            raise invalid("messages", "messages is empty; give at least one")
        use, continues, param = self._use(front), self._continues, "continue_final_message"
        if continues and use.forced is not None:
            raise invalid(param, f"tool_choice begins the answer with a call, and {param} continues a text")
        return Conversation(
            self.templated,
            use,
            self.thinks,
            form=None if self.response_format is None else self.response_format.form,
            variables=self.chat_template_kwargs or {},
            continues=continues,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self._requested_logprobs,
        )

    def _use(self, front: Front) -> ToolUse:
        if not self.functions:
            choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
            tools = [tool.function for tool in self.tools or ()]
            return ToolUse.of(tools, choice, self.parallel_tool_calls, front.notation)
        if self.tools:
            raise invalid("functions", "functions and tools say the same; leave functions out")
        fields = "functions", "function_call"
        return ToolUse.of(self.functions, self.function_call, False, front.notation, fields)

    @property
    def _continues(self) -> bool:
        param, begins, last = "continue_final_message", self.add_generation_prompt, self.messages[-1]
        if not self.continue_final_message and begins is False:
            message = f"add_generation_prompt is false, so no answer would begin; set {param}"
            raise invalid("add_generation_prompt", message)
        if self.continue_final_message and begins:
            message = f"{param} continues the last message and add_generation_prompt begins another; leave one out"
            raise invalid(param, message)
        if self.continue_final_message and (last.role != "assistant" or last.calls or not last.content):
            message = f"{param} needs a last message of the assistant's that has text and no calls; send that"
            raise invalid(param, message)
        return bool(self.continue_final_message)

    @property
    def _requested_logprobs(self) -> int | None:
        if self.logprobs:
            return checked_logprobs("top_logprobs", self.top_logprobs or 0)
        if self.top_logprobs is not None:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        return None


def chat_router(front: Front) -> APIRouter:
    """The router of the endpoint."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/chat/completions", responses=OR_STREAM)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        front.check_model(body.model)
        talk = await front.run_in_thread(http, body.conversation, front)
        return await _Chat(front, await talk.answers(front, body, http), body, talk).reply(http)

    return router


class _Chat(View):
    kind = "chatcmpl"

    def __init__(self, front: Front, answering: ResponseHandle, body: ChatRequest, talk: Conversation) -> None:
        super().__init__(front, answering, body, talk)
        self._shows_ids = bool(body.return_token_ids)
        self._called = "function_call" if body.functions else "tool_calls"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": self.model}
        self._chunk_head = self._head | {"object": "chat.completion.chunk"}

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.streams[0].prompt_ids} if self._shows_ids else {}

    @property
    def _warned(self) -> dict[str, Any]:
        warnings = self.warnings + self.misfits()
        return {"warnings": warnings} if warnings else {}

    def _reason(self, part: StreamUpdate) -> str | None:
        return self._called if part.ending == "calls" else part.ending

    def _logprobs(self, part: StreamUpdate) -> dict[str, Any]:
        return {"content": list(map(self.front.logprobs_entry, part.logprobs)), "refusal": None}

    def whole(self, parts: Sequence[StreamUpdate]) -> dict[str, Any]:
        choices = [self._choice(part) for part in parts]
        rest = {"usage": self.usage(len(parts)), "speculation": self.speculation()} | self.metrics()
        return self._head | {"object": "chat.completion", "choices": choices} | rest | self._prompt_ids | self._warned

    def _choice(self, part: StreamUpdate) -> dict[str, Any]:
        answer = part.answer
        assert answer is not None
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if calls := [each.call.record for each in part.calls if each.begins]:
            value: Any = calls[0]["function"] if self._called == "function_call" else calls
            message |= {"content": part.text or None, self._called: value}
        found = {"index": part.stream.number, "message": message, "logprobs": None, "finish_reason": self._reason(part)}
        if answer.logprobs is not None:
            found["logprobs"] = self._logprobs(part)
        if answer.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None, *map(self.front.logprobs_entry, answer.prompt_logprobs)]
        return found | ({"token_ids": part.token_ids} if self._shows_ids else {})

    def begun(self) -> Iterator[str]:
        begin = self._chunk_head | self._prompt_ids
        for stream in self.streams:
            yield event(begin | {"choices": [_delta(stream.number, {"role": "assistant", "content": ""})]})
            begin = self._chunk_head

    def read(self, part: StreamUpdate) -> Iterator[str]:
        delta: dict[str, Any] = {"content": text} if (text := part.text) else {}
        if reasoning := part.reasoning:
            delta["reasoning_content"] = reasoning
        if calls := part.calls:
            deltas = list(map(_call_delta, calls))
            delta[self._called] = _joined(deltas) if self._called == "function_call" else deltas
        choice = _delta(part.stream.number, delta)
        if part.logprobs:
            choice["logprobs"] = self._logprobs(part)
        if self._shows_ids:
            choice["token_ids"] = part.token_ids
        chunk = self._chunk_head | {"choices": [choice]} | self.trace(part)
        if part.answer is not None:
            choice["finish_reason"] = self._reason(part)
            chunk["speculation"] = self.speculation(part.stream)
        if delta or part.logprobs or choice.get("token_ids") or part.answer is not None or "trace" in chunk:
            yield event(chunk)

    def ended(self) -> Iterator[str]:
        if warned := self._warned:
            yield event(self._chunk_head | {"choices": []} | warned)
        yield from self.usage_chunk(self._chunk_head, lambda: self.usage(len(self.streams)))
        yield DONE


def _delta(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_delta(new: CallDelta) -> dict[str, Any]:
    if new.begins:
        return {"index": new.index} | new.call.record | {"function": {"name": new.call.name, "arguments": ""}}
    return {"index": new.index, "function": {"arguments": new.arguments}}


def _joined(deltas: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The pieces of one call, in the format of `function_call`."""
    pieces = [each["function"] for each in deltas]
    return {name: "".join(piece.get(name, "") for piece in pieces) for name in pieces[0] | pieces[-1]}
