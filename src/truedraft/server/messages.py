"""`/v1/messages`: a conversation as Anthropic's clients send it, answered by what answers chats."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, Tag

from truedraft.core.params import Structured
from truedraft.engine import Answer
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.chat import chat_prompt, room_for
from truedraft.server.errors import ApiError
from truedraft.server.events import OR_STREAM, EventStream, event
from truedraft.server.fields import (
    Fields,
    ImageBlock,
    Items,
    SamplingFields,
    TextPart,
    Texts,
    Thinking,
    Told,
    parts_of,
    text_or_parts,
    urls_of,
)
from truedraft.server.front import Front, has_called, new_id, unless_gone
from truedraft.server.service import Answering
from truedraft.server.tools import (
    FunctionFields,
    FunctionName,
    NamedFunction,
    NamedTool,
    Parameters,
    ToolFields,
    ToolUse,
)
from truedraft.text.calls import Call, parsed
from truedraft.text.notations import AnswerReader, Reasoning

_Shown = Annotated[list[Annotated[TextPart | ImageBlock, Field(discriminator="type")]], Field(fail_fast=True)]
Shown: TypeAlias = Annotated[Annotated[str, Tag("text")] | Annotated[_Shown, Tag("parts")], text_or_parts]


class ToolUseBlock(Told):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Told):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Shown | None = None


class ThinkingBlock(Told):
    """What an earlier answer reasoned."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Told):
    """Reasoning that is encrypted, which says nothing to a model."""

    type: Literal["redacted_thinking"]


_Block = Annotated[
    TextPart | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock, Field(discriminator="type")
]
_Blocks = Annotated[list[_Block], Field(fail_fast=True)]


class InputMessage(Told):
    """A part of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[_Blocks, Tag("parts")], text_or_parts]

    @property
    def blocks(self) -> Sequence[_Block]:
        """What it holds."""
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates know it: results of calls first, each a message of its own."""
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
            said["tool_calls"] = [
                {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.input}}
                for each in calls
            ]
        return [*found, said]

    @property
    def urls(self) -> list[str]:
        """Where its pictures are, those of results first."""
        results = [each.content for each in self.blocks if isinstance(each, ToolResultBlock)]
        return [url for content in (*results, self.blocks) for url in urls_of(content)]


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Whether it is the assistant's and says nothing."""
    return message["role"] == "assistant" and not any(map(message.get, ("content", "tool_calls", "reasoning_content")))


class MessageTool(Told):
    """A function that may be called; without a schema it is one that Anthropic's models know, or servers run."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: Parameters | None = None

    @property
    def for_chats(self) -> ToolFields:
        """As chats have it."""
        function = FunctionFields(name=self.name, description=self.description, parameters=self.input_schema)
        return ToolFields(type="function", function=function)


class MessageChoice(Told):
    """Whether a function is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chats(self) -> str | NamedTool:
        """As chats have it."""
        if self.type == "tool":
            return NamedTool(type="function", function=NamedFunction(name=self.name or ""))
        return "required" if self.type == "any" else self.type


class OutputConfig(Told):
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
    # Taken, and of no effect.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates know it."""
        first = [{"role": "system", "content": parts_of(self.system)}] if self.system else []
        told = [each for message in self.messages for each in message.for_template]
        if told and _is_empty(told[-1]):  # the answer goes on with what it says, which is nothing
            told.pop()
        return [*first, *told]

    @property
    def thinks(self) -> Thinking:
        """What it asks of reasoning."""
        effort = None if self.output_config is None else self.output_config.effort
        return Thinking.of(getattr(self, "reasoning_budget", None), self.thinking, effort=effort)

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        last = self.messages[-1].for_template[-1]
        return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last

    @property
    def urls(self) -> list[str]:
        """Where the pictures are."""
        return [url for each in self.messages for url in each.urls]

    @property
    def warnings(self) -> list[str]:
        """About tools that are left out."""
        return [
            f"tools[{number}] is left out: {tool.type or tool.name} has no input_schema, and this server runs no tools"
            for number, tool in enumerate(self.tools or ())
            if tool.input_schema is None
        ]

    def use(self, front: Front) -> ToolUse:
        """Of tools.

        Raises:
            ApiError: the function that must be called is not there, or an answer cannot begin with a call.
        """
        tools = [tool.for_chats for tool in self.tools or () if tool.input_schema is not None]
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
        """Of the answer."""
        form = None if self.output_config is None else self.output_config.format
        return None if form is None else Structured("json_schema", form.get("schema", True))


def messages_router(front: Front) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    async def prompt_of(body: CountRequest, use: ToolUse, http: HttpRequest) -> list[int] | MultimodalPrompt:
        front.check_model(body.model)
        conversation = body.conversation
        if not conversation[bool(body.system) :]:
            raise ApiError(400, "messages is empty; give at least one that says something", param="messages")
        front.left_out(body.warnings)
        more = front.switches(body.thinks)
        return await chat_prompt(front, http, conversation, body.urls, use, more=more, continues=body.continues)

    @router.post("/v1/messages", responses=OR_STREAM)
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        if body.samples != 1:
            raise ApiError(400, f"a message is one answer, n must be 1, got {body.n}", param="n")
        use = body.use(front)
        prompt = await prompt_of(body, use, http)
        room = room_for(front, prompt, body.max_tokens)
        params = use.fitted(body.sampling(room, form=use.forced or body.form))
        answering = await front.begin([prompt], params, body, http, notation=front.notation)
        made = _Message(front, body, answering, front.reader(use, prompt))
        if body.stream:
            return EventStream(made.events(), answering.close, failed)
        await unless_gone(http, answering.answers())
        return await front.answer(answering, made.whole)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: HttpRequest) -> dict[str, int]:
        """How many tokens a conversation has."""
        prompt = await prompt_of(body, body.use(front), http)
        return {"input_tokens": len(prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt)}

    return router


def failed(error: ApiError) -> str:
    """The last event where an answer failed."""
    return event(error.anthropic, "error")


@dataclass(eq=False)
class _Part:
    """A block of the answer on its way.

    Attributes:
        index: of it.
        record: as it is sent.
        call: of a function; None where it is none.
    """

    index: int
    record: dict[str, Any]
    call: Call | None = None

    def whole(self) -> dict[str, Any]:
        """The record, with all the arguments of a call."""
        return self.record if self.call is None else self.record | {"input": _object(self.call.arguments)}


class _Message:
    """One answer to a request for a message, on its way.

    Args:
        front: what endpoints share.
        body: of the request.
        answering: its one sample.
        reader: of its text.
    """

    def __init__(self, front: Front, body: MessagesRequest, answering: Answering, reader: AnswerReader) -> None:
        self._front = front
        self._answering = answering
        self._reader = reader
        self._parts: list[_Part] = []
        self._head: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        self._head |= {"model": front.shown(body.model), "warnings": body.warnings}

    def whole(self) -> dict[str, Any]:
        """The message."""
        for _ in self._read(self._answer.text or "", last=True):
            pass
        rest = {"usage": self._usage(), "speculation": self._front.speculation(self._answering.streams)}
        return self._head | {"content": [part.whole() for part in self._parts]} | self._reason() | rest

    @property
    def _answer(self) -> Answer:
        answer = self._answering.streams[0].answer
        assert answer is not None
        return answer

    def _reason(self) -> dict[str, str | None]:
        answer = self._answer
        if answer.finish_reason != "stop":
            reason = "max_tokens"
        elif has_called(answer, self._reader):
            reason = "tool_use"
        else:
            reason = "end_turn" if answer.stop_text is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": answer.stop_text if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, int]:
        used = self._front.usage(self._answering, 1)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        found = {"input_tokens": used["prompt_tokens"] - cached, "output_tokens": used["completion_tokens"]}
        return found | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}

    async def events(self) -> AsyncIterator[str]:
        """The message piece by piece."""
        begun = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=begun)
        yield _event("ping")
        async for news in self._answering.news():
            last = bool(news.pieces) and news.pieces[-1].answer is not None
            for each in self._read("".join(piece.text for piece in news.pieces), last=last):
                yield each
        about = {"usage": self._usage(), "speculation": self._front.speculation(self._answering.streams)}
        yield _event("message_delta", delta=self._reason(), **about)
        yield _event("message_stop")

    def _read(self, text: str, *, last: bool = False) -> Iterator[str]:
        """The next text of the answer as events; `last` where nothing follows."""
        for part in self._reader.push(text, last=last):
            if isinstance(part, str):
                yield from self._wrote("text", part)
            elif isinstance(part, Reasoning):
                yield from self._wrote("thinking", part.text)
            elif part.begins:
                about = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
                yield from self._begin(_Part(len(self._parts), about, part.call))
            else:
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
                yield _event("content_block_delta", index=self._parts[-1].index, delta=delta)
        if last:
            yield from self._end()

    def _wrote(self, kind: str, text: str) -> Iterator[str]:
        if not text:
            return
        if not self._parts or self._parts[-1].record["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(_Part(len(self._parts), {"type": kind, kind: ""} | more))
        part = self._parts[-1]
        part.record[kind] += text
        yield _event("content_block_delta", index=part.index, delta={"type": f"{kind}_delta", kind: text})

    def _begin(self, part: _Part) -> Iterator[str]:
        """A new block; the one before is over."""
        yield from self._end()
        self._parts.append(part)
        yield _event("content_block_start", index=part.index, content_block=part.record)

    def _end(self) -> Iterator[str]:
        for part in self._parts[-1:]:
            yield _event("content_block_stop", index=part.index)


def _event(kind: str, **more: Any) -> str:
    return event({"type": kind} | more, kind)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where the answer was cut inside them."""
    value = parsed(arguments)
    return value if isinstance(value, dict) else {}
