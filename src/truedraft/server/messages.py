"""`/v1/messages`: a conversation in Anthropic's format, answered like a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, Tag

from truedraft.core.params import Structured
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.answers import Answers, Part, Segment, Segments
from truedraft.server.bodies import BodyRoute
from truedraft.server.conversations import Conversation
from truedraft.server.errors import ApiError
from truedraft.server.events import OR_STREAM, event
from truedraft.server.fields import (
    Fields,
    ImageBlock,
    Items,
    LenientModel,
    SamplingFields,
    TextPart,
    Texts,
    Thinking,
    parts_of,
    text_or_parts,
)
from truedraft.server.front import Front, new_id
from truedraft.server.tools import (
    FunctionFields,
    FunctionName,
    NamedFunction,
    Parameters,
    ToolUse,
    called,
)
from truedraft.text.calls import parsed
from truedraft.text.histories import says_nothing

_Shown = Items[Annotated[TextPart | ImageBlock, Field(discriminator="type")]]
Shown: TypeAlias = Annotated[Annotated[str, Tag("text")] | Annotated[_Shown, Tag("parts")], text_or_parts]


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
_Blocks = Items[_Block]


class InputMessage(LenientModel):
    """A part of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[_Blocks, Tag("parts")], text_or_parts]

    @property
    def blocks(self) -> Sequence[_Block]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """In the format of chat templates: results of calls first, each as a message of its own."""
        results = [each for each in self.blocks if isinstance(each, ToolResultBlock)]
        calls = [each for each in self.blocks if isinstance(each, ToolUseBlock)]
        found = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": parts_of(each.content or "")}
            for each in results
        ]
        shown = [each for each in self.blocks if isinstance(each, TextPart | ImageBlock)]
        if results and not shown:
            return found
        said: dict[str, Any] = {"role": self.role, "content": parts_of(shown)}
        if thoughts := "".join(each.thinking for each in self.blocks if isinstance(each, ThinkingBlock)):
            said["reasoning_content"] = thoughts
        if calls:
            said["tool_calls"] = [called(each.id, each.name, each.input) for each in calls]
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

    @property
    def for_chats(self) -> str | NamedFunction:
        if self.type == "tool":
            return NamedFunction(name=self.name or "")
        return "required" if self.type == "any" else self.type


class OutputConfig(LenientModel):
    """About the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(Fields):
    """The body of a request for the tokens of a conversation."""

    model: str | None = None
    messages: Items[InputMessage]
    system: Annotated[Annotated[str, Tag("text")] | Annotated[Items[TextPart], Tag("parts")], text_or_parts] | None = (
        None
    )
    tools: Items[MessageTool] | None = None
    tool_choice: MessageChoice | None = None
    output_config: OutputConfig | None = None
    thinking: dict[str, Any] | None = None
    # Accepted without effect.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The conversation in the format of chat templates."""
        first = [{"role": "system", "content": parts_of(self.system)}] if self.system else []
        messages = [each for message in self.messages for each in message.for_template]
        if messages and says_nothing(messages[-1]):  # the answer would continue an empty message
            messages.pop()
        return [*first, *messages]

    @property
    def thinks(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        return Thinking.of(getattr(self, "reasoning_budget", None), self.thinking, effort=effort)

    @property
    def continues(self) -> bool:
        last = self.messages[-1].for_template[-1]
        return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last

    @property
    def warnings(self) -> list[str]:
        """Warnings about ignored tools."""
        return [
            f"tools[{number}] is left out: {tool.type or tool.name} has no input_schema, and this server runs no tools"
            for number, tool in enumerate(self.tools or ())
            if tool.input_schema is None
        ]

    def use(self, front: Front) -> ToolUse:
        """The requested use of tools.

        Raises:
            ApiError: the required function does not exist, or an answer cannot begin with a call.
        """
        tools = [tool.function for tool in self.tools or () if tool.input_schema is not None]
        given = self.tool_choice
        hosted = {tool.name: tool.type or tool.name for tool in self.tools or () if tool.input_schema is None}
        if given is not None and given.type == "tool" and given.name in hosted:
            message = f"tool_choice asks for {hosted[given.name]}, a tool that this server has not; name a function"
            raise ApiError(400, message, param="tool_choice")
        parallel = None if given is None else not given.disable_parallel_tool_use
        use = ToolUse.of(tools, None if given is None else given.for_chats, parallel, front.notation)
        if use.forced is not None and self.continues:
            message = "tool_choice begins the answer with a call, and the last message is the assistant's to go on with"
            raise ApiError(400, message, param="tool_choice")
        return use


class MessagesRequest(CountRequest, SamplingFields):
    """The body of a request for a message; the options of the other endpoints go here, too."""

    max_tokens: int
    stop: Texts | None = Field(None, alias="stop_sequences")
    metadata: dict[str, Any] | None = None

    @property
    def form(self) -> Structured | None:
        """The grammar of the answer; None for free text."""
        form = None if self.output_config is None else self.output_config.format
        return None if form is None else Structured("json_schema", form.get("schema", True))


def messages_router(front: Front) -> APIRouter:
    """The router of the endpoints."""
    router = APIRouter(route_class=BodyRoute)

    def talk_of(body: CountRequest, http: HttpRequest, form: Structured | None = None) -> Conversation:
        front.check_model(body.model)
        use, messages = body.use(front), body.conversation
        if not messages[bool(body.system) :]:
            raise ApiError(400, "messages is empty; give at least one that says something", param="messages")
        front.left_out(body.warnings)
        counts = not isinstance(body, MessagesRequest)
        return Conversation(front, http, messages, use, body.thinks, form, continues=body.continues, counts=counts)

    @router.post("/v1/messages", responses=OR_STREAM)
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        if body.samples != 1:
            raise ApiError(400, f"a message is one answer, n must be 1, got {body.n}", param="n")
        talk = await front.apart(http, lambda: talk_of(body, http, body.form))
        answers = await talk.answers(body, body.max_tokens)
        return await answers.reply(http, _Message(answers, body), stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: HttpRequest) -> dict[str, int]:
        """How many tokens a conversation has."""
        prompt = await (await front.apart(http, talk_of, body, http)).prompt()
        return {"input_tokens": len(prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt)}

    return router


class _Message:
    """The view of an answer as a message."""

    def __init__(self, answers: Answers, body: MessagesRequest) -> None:
        self._answers = answers
        self._segments = Segments(answers.front)
        self._head: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        self._head |= {"model": answers.front.shown(body.model), "warnings": body.warnings + answers.warnings}
        self._last: Part | None = None

    def begun(self) -> Iterator[str]:
        begun = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=begun)
        yield _event("ping")

    def read(self, part: Part) -> Iterator[str]:
        self._last = part
        for what, segment, text, _ in self._segments.read(part):
            if what == "ended":
                yield _stopped(segment)
            elif what == "began":
                yield _event("content_block_start", index=segment.index, content_block=_block(segment, {}))
            else:
                kind, name = _DELTAS[segment.kind]
                yield _event("content_block_delta", index=segment.index, delta={"type": kind, name: text})

    def ended(self) -> Iterator[str]:
        for _, segment, *_ in self._segments.end():
            yield _stopped(segment)
        about: dict[str, Any] = {"usage": self._usage(), "speculation": self._answers.speculation()}
        if misfits := self._answers.misfits():
            about["warnings"] = self._head["warnings"] + misfits
        yield _event("message_delta", delta=self._reason(), **about)
        yield _event("message_stop")

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        for _ in self.read(parts[0]):
            pass
        content = [
            _block(each, {} if each.call is None else _object(each.call.arguments)) for each in self._segments.found
        ]
        rest = {"usage": self._usage(), "speculation": self._answers.speculation()}
        rest["warnings"] = self._head["warnings"] + self._answers.misfits()
        return self._head | {"content": content} | self._reason() | rest

    def failed(self, error: ApiError) -> str:
        return event(error.anthropic, "error")

    def _reason(self) -> dict[str, str | None]:
        assert self._last is not None and self._last.answer is not None
        stop_text = self._last.answer.stop_text
        reasons = {"length": "max_tokens", "calls": "tool_use", "stop": "end_turn"}
        reason = reasons[self._last.ending or "stop"]
        if reason == "end_turn" and stop_text is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_text if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, int]:
        used = self._answers.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        found = {"input_tokens": used["prompt_tokens"] - cached, "output_tokens": used["completion_tokens"]}
        return found | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""For each kind of segment: the type of its deltas, and the name of their text."""


def _block(segment: Segment, given: dict[str, Any]) -> dict[str, Any]:
    """A segment as a content block; a call with the given arguments."""
    if segment.call is not None:
        return {"type": "tool_use", "id": segment.call.id, "name": segment.call.name, "input": given}
    if segment.kind == "text":
        return {"type": "text", "text": segment.text}
    return {"type": "thinking", "thinking": segment.text, "signature": ""}


def _stopped(segment: Segment) -> str:
    return _event("content_block_stop", index=segment.index)


def _event(kind: str, **more: Any) -> str:
    return event({"type": kind} | more, kind)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the answer was cut inside them."""
    value = parsed(arguments)
    return value if isinstance(value, dict) else {}
