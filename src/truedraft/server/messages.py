"""`/v1/messages`: a conversation in Anthropic's format, answered like a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.core.params import Structured
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.answers import Segment, Segments, View
from truedraft.server.bodies import BodyRoute
from truedraft.server.conversations import (
    Conversation,
    FunctionFields,
    FunctionName,
    NamedFunction,
    Parameters,
    ToolUse,
    called,
)
from truedraft.server.errors import ApiError, invalid
from truedraft.server.events import OR_STREAM, event
from truedraft.server.fields import (
    Fields,
    ImageBlock,
    Items,
    LenientModel,
    SamplingFields,
    TextOr,
    TextPart,
    Texts,
    Thinking,
    parts_of,
)
from truedraft.server.front import Front
from truedraft.server.service import ResponseHandle, StreamUpdate
from truedraft.text.calls import parsed
from truedraft.text.histories import says_nothing

Shown: TypeAlias = TextOr[Annotated[TextPart | ImageBlock, Field(discriminator="type")]]


class ToolUseBlock(LenientModel):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(LenientModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Shown | None = None


class ThinkingBlock(LenientModel):
    """What an earlier answer reasoned."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(LenientModel):
    """Reasoning that is encrypted, which says nothing to a model."""

    type: Literal["redacted_thinking"]


_Block = Annotated[
    TextPart | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock, Field(discriminator="type")
]


class InputMessage(LenientModel):
    """A part of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[_Block]

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """In the format of chat templates: results of calls first, each as a message of its own."""
        blocks = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        found: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": parts_of(each.content or "")}
            for each in blocks
            if isinstance(each, ToolResultBlock)
        ]
        shown = [each for each in blocks if isinstance(each, TextPart | ImageBlock)]
        if found and not shown:
            return found
        said: dict[str, Any] = {"role": self.role, "content": parts_of(shown)}
        if thoughts := "".join(each.thinking for each in blocks if isinstance(each, ThinkingBlock)):
            said["reasoning_content"] = thoughts
        if calls := [called(each.id, each.name, each.input) for each in blocks if isinstance(each, ToolUseBlock)]:
            said["tool_calls"] = calls
        return [*found, said]


class MessageTool(LenientModel):
    """A function that may be called; without a schema it is one that Anthropic's models know, or servers run."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: Parameters | None = None

    @property
    def function(self) -> FunctionFields:
        return FunctionFields(name=self.name, description=self.description, parameters=self.input_schema)


class MessageChoice(LenientModel):
    """Whether a function is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(LenientModel):
    """About the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(Fields):
    """The body of a request for the tokens of a conversation."""

    model: str | None = None
    messages: Items[InputMessage]
    system: TextOr[TextPart] | None = None
    tools: Items[MessageTool] | None = None
    tool_choice: MessageChoice | None = None
    output_config: OutputConfig | None = None
    thinking: dict[str, Any] | None = None
    # Accepted without effect.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None

    @property
    def thinks(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        return Thinking.of(getattr(self, "reasoning_budget", None), self.thinking, effort=effort)

    def conversation(self, front: Front) -> Conversation:
        """What is to be answered or counted."""
        front.check_model(self.model)
        use = self._use(front)
        messages = [each for message in self.messages for each in message.for_template]
        if messages and says_nothing(messages[-1]):  # the answer would continue an empty message
            messages.pop()
        if not messages:
            raise invalid("messages", "messages is empty; give at least one that says something")
        if self.system:
            messages.insert(0, {"role": "system", "content": parts_of(self.system)})
        warnings = [
            f"tools[{number}] is left out: {tool.type or tool.name} has no input_schema, and this server runs no tools"
            for number, tool in enumerate(self.tools or ())
            if tool.input_schema is None
        ]
        front.left_out(warnings)
        return Conversation(messages, use, self.thinks, continues=self._continues, counts=True, warnings=warnings)

    @property
    def _continues(self) -> bool:
        last = self.messages[-1].for_template[-1]
        return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def _use(self, front: Front) -> ToolUse:
        tools, given, param = self.tools or (), self.tool_choice or MessageChoice(type="auto"), "tool_choice"
        choice: str | NamedFunction = "required" if given.type == "any" else given.type
        if given.type == "tool":
            choice = NamedFunction(name=given.name or "")
            hosted = {tool.name: tool.type or tool.name for tool in tools if tool.input_schema is None}
            if (asked := hosted.get(choice.name)) is not None:
                raise invalid(param, f"{param} asks for {asked}, a tool that this server has not; name a function")
        functions = [tool.function for tool in tools if tool.input_schema is not None]
        use = ToolUse.of(functions, choice, not given.disable_parallel_tool_use, front.notation)
        if use.forced is not None and self._continues:
            message = f"{param} begins the answer with a call, and the last message is the assistant's to go on with"
            raise invalid(param, message)
        return use


class MessagesRequest(CountRequest, SamplingFields):
    """The body of a request for a message; the options of the other endpoints go here, too."""

    max_tokens: int
    stop: Texts | None = Field(None, alias="stop_sequences")
    metadata: dict[str, Any] | None = None

    def conversation(self, front: Front) -> Conversation:
        form = None if self.output_config is None else self.output_config.format
        structured = None if form is None else Structured("json_schema", form.get("schema", True))
        found = super().conversation(front)
        return replace(found, form=structured, max_tokens=self.max_tokens, counts=False)


def messages_router(front: Front) -> APIRouter:
    """The router of the endpoints."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/messages", responses=OR_STREAM)
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        if body.samples != 1:
            raise invalid("n", f"a message is one answer, n must be 1, got {body.n}")
        talk = await front.run_in_thread(http, body.conversation, front)
        answering = await talk.answers(front, body, http)
        return await _Message(front, answering, body, talk).reply(http)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: HttpRequest) -> dict[str, int]:
        """How many tokens a conversation has."""
        prompt = await (await front.run_in_thread(http, body.conversation, front)).prompt(front, http)
        return {"input_tokens": len(prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt)}

    return router


class _Message(View):
    kind = "msg"

    def __init__(self, front: Front, answering: ResponseHandle, body: MessagesRequest, talk: Conversation) -> None:
        super().__init__(front, answering, body, talk)
        self._segments = Segments(front)
        self._head: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant"}
        self._head |= {"model": self.model, "warnings": self.warnings}
        self._last: StreamUpdate | None = None

    def begun(self) -> Iterator[str]:
        begun = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=begun)
        yield _event("ping")

    def read(self, part: StreamUpdate) -> Iterator[str]:
        self._last = part
        for what, segment, text, _ in self._segments.read(part):
            if what == "ended":
                yield _event("content_block_stop", index=segment.index)
            elif what == "began":
                yield _event("content_block_start", index=segment.index, content_block=_block(segment))
            else:
                kind, name = _DELTAS[segment.kind]
                yield _event("content_block_delta", index=segment.index, delta={"type": kind, name: text})

    def ended(self) -> Iterator[str]:
        for _, segment, *_ in self._segments.end():
            yield _event("content_block_stop", index=segment.index)
        about: dict[str, Any] = {"usage": self._usage(), "speculation": self.speculation()}
        if misfits := self.misfits():
            about["warnings"] = self.warnings + misfits
        yield _event("message_delta", delta=self._reason(), **about)
        yield _event("message_stop")

    def whole(self, parts: Sequence[StreamUpdate]) -> dict[str, Any]:
        for _ in self.read(parts[0]):
            pass
        content = [
            _block(each, {} if each.call is None else _object(each.call.arguments)) for each in self._segments.found
        ]
        rest = {"usage": self._usage(), "speculation": self.speculation(), "warnings": self.warnings + self.misfits()}
        return self._head | {"content": content} | self._reason() | rest

    def failed(self, error: ApiError) -> str:
        return event(error.anthropic, "error")

    def _reason(self) -> dict[str, str | None]:
        assert self._last is not None and self._last.answer is not None
        stop_text, ending = self._last.answer.stop_text, self._last.ending or "stop"
        if ending == "stop" and stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
        reasons = {"length": "max_tokens", "calls": "tool_use", "stop": "end_turn"}
        return {"stop_reason": reasons[ending], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        found = {"input_tokens": used["prompt_tokens"] - cached, "output_tokens": used["completion_tokens"]}
        return found | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""For each kind of segment: the type of its deltas, and the name of their text."""


def _block(segment: Segment, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    if segment.call is not None:
        return {"type": "tool_use", "id": segment.call.id, "name": segment.call.name, "input": arguments or {}}
    if segment.kind == "text":
        return {"type": "text", "text": segment.text}
    return {"type": "thinking", "thinking": segment.text, "signature": ""}


def _event(kind: str, **more: Any) -> str:
    return event({"type": kind} | more, kind)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the answer was cut inside them."""
    value = parsed(arguments)
    return value if isinstance(value, dict) else {}
