"""`/v1/responses`: OpenAI's newer endpoint, for text and functions. Stateless: a request has its whole conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.server.answers import Segment, Segments, View
from truedraft.server.bodies import BodyRoute
from truedraft.server.conversations import Conversation, ToolUse
from truedraft.server.errors import ApiError, invalid
from truedraft.server.events import OR_STREAM, event
from truedraft.server.fields import Fields, Items, SamplingFields, Thinking, checked_logprobs, json_form
from truedraft.server.front import Front, new_id
from truedraft.server.items import Callable, Choice, Input, InputMessage, Item, TextReader, Tool, Toolbox, messages_of
from truedraft.server.service import Ending, ResponseHandle, StreamUpdate

_Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an item's event, and its fields except those that identify the item."""


Included: TypeAlias = Literal[
    "message.output_text.logprobs",
    # No effect: answers have none of these.
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""Further parts of a response that clients can request."""


class TextFormat(Fields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFields(Fields):
    """About the text of an answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(SamplingFields):
    """The body of a request for a response."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    top_logprobs: int | None = None
    include: Items[Included] | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    # Accepted without effect: nothing is stored or truncated, and tools run at the client.
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None
    max_tool_calls: int | None = None

    @property
    def thinks(self) -> Thinking:
        return Thinking.of(self.reasoning_budget, reasoning=self.reasoning)

    @property
    def items(self) -> list[Item]:
        """The conversation so far, without the instructions."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def conversation(self, front: Front, toolbox: Toolbox) -> Conversation:
        """What is to be answered; an `ApiError` if it is empty, or the required tool does not exist."""
        tools, choice = toolbox.use(self.tool_choice)
        use = ToolUse.of(tools, choice, self.parallel_tool_calls, front.notation)
        messages = messages_of(self.items)
        if self.instructions is not None:  # many templates allow only one system message
            known: Iterator[Any] = (each["content"] if each["role"] == "system" else None for each in messages)
            texts = list(itertools.takewhile(lambda content: isinstance(content, str), known))
            first = "\n\n".join([self.instructions, *texts])
            messages[: len(texts)] = [{"role": "system", "content": first}] if first else []
        if not messages:
            raise invalid("input", "input is empty; give at least one message")
        given = None if self.text is None else self.text.format
        requested = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        return Conversation(
            messages,
            use,
            self.thinks,
            param="input",
            form=None if given is None else json_form(given.type, given.schema_),
            max_tokens=self.max_output_tokens,
            logprobs=checked_logprobs("top_logprobs", self.top_logprobs or 0) if requested else None,
            warnings=toolbox.warnings,
        )


def responses_router(front: Front) -> APIRouter:
    """The router of the endpoint."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/responses", responses=OR_STREAM)
    async def responses(body: ResponseRequest, http: HttpRequest) -> Response:
        """Answer a conversation."""
        front.check_model(body.model)
        if body.previous_response_id is not None:
            message = "this server stores no responses; send the whole conversation as input"
            raise invalid("previous_response_id", message)
        if body.samples != 1:
            raise invalid("n", f"a response is one answer, n must be 1, got {body.n}")
        toolbox, talk = await front.run_in_thread(http, read, body)
        answering = await talk.answers(front, body, http)
        return await _Response(front, answering, body, talk, toolbox).reply(http)

    def read(body: ResponseRequest) -> tuple[Toolbox, Conversation]:
        toolbox = Toolbox.of(body.tools or (), body.items)
        front.left_out(toolbox.warnings)
        return toolbox, body.conversation(front, toolbox)

    return router


@dataclass(eq=False)
class _Item:
    """An item of the output; `named` is None for an unknown tool, and `input` reads the text of a custom one."""

    segment: Segment
    named: Callable | None
    input: TextReader | None
    id: str = field(default_factory=lambda: new_id("item"))

    @property
    def _kind(self) -> tuple[str, Sequence[str]]:
        return _KINDS["custom" if self.input is not None else self.segment.kind]

    @property
    def _place(self) -> dict[str, int]:
        return {"content_index": 0} if self.segment.call is None else {}

    @property
    def _part(self) -> dict[str, Any]:
        part = {"type": self._kind[0], "text": self.segment.text}
        more = {"annotations": [], "logprobs": self.segment.logprobs} if self.segment.kind == "text" else {}
        return part | more

    def record(self, status: str) -> dict[str, Any]:
        segment, call, is_new = self.segment, self.segment.call, status == "in_progress"
        if call is None:
            kind = {"type": "message", "role": "assistant"} if segment.kind == "text" else _REASONING
            return kind | {"id": self.id, "status": status, "content": [] if is_new else [self._part]}
        name = call.name if self.named is None else self.named.name
        about = {"id": self.id, "status": status, "call_id": call.id, "name": name}
        if self.named is not None and self.named.namespace is not None:
            about["namespace"] = self.named.namespace
        if self.input is not None:
            return about | {"type": "custom_tool_call", "input": self.input.text}
        return about | {"type": "function_call", "arguments": "" if is_new else call.arguments}

    def events(self, what: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[_Event]:
        """The events of a step: after the item is added, of new text, or before the item is done."""
        call, (kind, names) = self.segment.call, self._kind
        if what == "began" and call is None:
            yield "response.content_part.added", self._place | {"part": self._part}
        elif what == "wrote" and (new := text if self.input is None else self.input.push(text)):
            more = {"logprobs": logprobs} if self.segment.kind == "text" else {}
            yield f"response.{kind}.delta", self._place | {"delta": new} | more
        elif what == "ended":
            if call is not None and self.input is not None and (rest := self.input.finish(call.arguments)):
                yield f"response.{kind}.delta", {"delta": rest}
            content = self._part if call is None else self.record("completed")
            yield f"response.{kind}.done", self._place | {name: content[name] for name in names}
            if call is None:
                yield "response.content_part.done", self._place | {"part": content}


_KINDS: dict[str, tuple[str, Sequence[str]]] = {
    "text": ("output_text", ("text", "logprobs")),
    "reasoning": ("reasoning_text", ("text",)),
    "call": ("function_call_arguments", ("arguments", "name")),
    "custom": ("custom_tool_call_input", ("input",)),
}
"""For each kind of item: the name of its events, and the fields of the last one."""
_REASONING: dict[str, Any] = {"type": "reasoning", "summary": []}


class _Response(View):
    kind = "resp"

    def __init__(
        self, front: Front, answering: ResponseHandle, body: ResponseRequest, talk: Conversation, toolbox: Toolbox
    ) -> None:
        super().__init__(front, answering, body, talk)
        self._body = body
        self._callables = toolbox.callables
        self._created = time.time()
        self._numbers = itertools.count()
        self._segments = Segments(front)
        self._items: list[_Item] = []
        self._ending: Ending | None = None

    def begun(self) -> Iterator[str]:
        yield self._event("response.created", response=self._record("in_progress"))
        yield self._event("response.in_progress", response=self._record("in_progress"))

    def read(self, part: StreamUpdate) -> Iterator[str]:
        self._ending = part.ending
        for step in self._segments.read(part):
            yield from self._step(*step)

    def ended(self) -> Iterator[str]:
        yield from self._closed()
        yield self._event(f"response.{self._status}", response=self._finished())

    def whole(self, parts: Sequence[StreamUpdate]) -> dict[str, Any]:
        for _ in (*self.read(parts[0]), *self._closed()):
            pass
        return self._finished()

    def failed(self, error: ApiError) -> str:
        about = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._record("failed") | {"error": about})

    def _closed(self) -> Iterator[str]:
        """End the last item; an answer without items gets an empty message."""
        for step in () if self._items else self._segments.begin("text"):
            yield from self._step(*step)
        for step in self._segments.end():
            yield from self._step(*step, status=self._last_status)

    def _step(
        self, what: str, segment: Segment, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
    ) -> Iterator[str]:
        index = segment.index
        if what == "began":
            named = None if segment.call is None else self._callables.get(segment.call.name)
            self._items.append(_Item(segment, named, TextReader() if named is not None and named.custom else None))
            record = self._items[index].record("in_progress")
            yield self._event("response.output_item.added", output_index=index, item=record)
        item = self._items[index]
        for kind, more in item.events(what, text, logprobs):
            yield self._event(kind, item_id=item.id, output_index=index, **more)
        if what == "ended":
            yield self._event("response.output_item.done", output_index=index, item=item.record(status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._ending == "length" else "completed"

    @property
    def _last_status(self) -> str:
        cut = self._segments.found[-1].call is not None and self._ending != "calls"
        return "incomplete" if cut else self._status

    def _finished(self) -> dict[str, Any]:
        used, status = self.usage(), self._status
        *whole, last = self._items
        return self._record(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*(item.record("completed") for item in whole), last.record(self._last_status)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
            "speculation": self.speculation(),
            "warnings": self.warnings + self.misfits(),
        }

    def _record(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
            "warnings": self.warnings,
        }

    def _event(self, kind: str, **more: Any) -> str:
        return event({"type": kind, "sequence_number": next(self._numbers)} | more, kind)
