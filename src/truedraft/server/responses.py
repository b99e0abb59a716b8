"""`/v1/responses`: OpenAI's newer endpoint, for text and functions, without a memory: each request brings its whole
conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.params import Structured
from truedraft.engine import Answer
from truedraft.server.chat import chat_prompt, room_for, template_of
from truedraft.server.errors import ApiError
from truedraft.server.events import OR_STREAM, EventStream, event
from truedraft.server.fields import (
    Content,
    Fields,
    Items,
    SamplingFields,
    SeenContent,
    checked_logprobs,
    parts_of,
    text_of,
    urls_of,
)
from truedraft.server.front import Front, finish_reason, new_id, unless_gone
from truedraft.server.service import Answering
from truedraft.server.tools import (
    Call,
    CallDelta,
    CallReader,
    FunctionFields,
    NamedFunction,
    NamedTool,
    ToolFields,
    ToolUse,
    arguments_for_template,
)


class InputMessage(Fields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: SeenContent
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Fields):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputResult(Fields):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class FlatTool(FunctionFields):
    """A function that may be called."""

    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


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

    input: str | Items[InputMessage | InputCall | InputResult]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    top_logprobs: int | None = None
    include: Items[str] | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None
    reasoning: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what needs a memory.

        Raises:
            ApiError: says what.
        """
        if self.previous_response_id is not None:
            message = "this server stores no responses; send the whole conversation as input"
            raise ApiError(400, message, param="previous_response_id")
        if self.samples != 1:
            raise ApiError(400, f"a response is one answer, n must be 1, got {self.n}", param="n")

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens are told."""
        asked = "message.output_text.logprobs" in (self.include or ())
        return checked_logprobs("top_logprobs", self.top_logprobs or 0) if asked or self.top_logprobs else None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates know it."""
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, InputMessage):
                role = "system" if item.role == "developer" else item.role
                found.append({"role": role, "content": parts_of(item.content)})
            elif isinstance(item, InputCall):
                function = {"name": item.name, "arguments": arguments_for_template(item.arguments)}
                call = {"id": item.call_id, "type": "function", "function": function}
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            else:
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        return found

    @property
    def urls(self) -> list[str]:
        """Where the pictures of the conversation are."""
        items = [] if isinstance(self.input, str) else self.input
        return [url for item in items if isinstance(item, InputMessage) for url in urls_of(item.content)]

    @property
    def use(self) -> tuple[list[ToolFields], str | NamedTool | None]:
        """Tools and the choice among them, as chats have them."""
        tools = [
            ToolFields(type="function", function=FunctionFields(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            return tools, NamedTool(type="function", function=NamedFunction(name=choice.name))
        return tools, choice

    @property
    def form(self) -> Structured | None:
        """Of the text."""
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_schema" and wanted.schema_ is not None:
            return Structured("json_schema", wanted.schema_)
        return Structured("json_object", True)


def responses_router(front: Front) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/responses", responses=OR_STREAM)
    async def responses(body: ResponseRequest, http: HttpRequest) -> Response:
        """Answer a conversation."""
        front.check_model(body.model)
        body.check()
        tools, choice = body.use
        use = ToolUse.of(tools, choice, body.parallel_tool_calls, template_of(front))
        messages = body.messages
        if not messages:
            raise ApiError(400, "input is empty; give at least one message", param="input")
        prompt = await chat_prompt(front, http, messages, body.urls, use, param="input")
        form = use.forced if use is not None and use.forced is not None else body.form
        room = room_for(front, prompt, body.max_output_tokens)
        params = body.sampling(room, logprobs=body.wanted_logprobs, form=form)
        answering = await front.begin([prompt], params, body, http)
        made = _Response(front, body, answering, use)
        if body.stream:
            return EventStream(made.events(), answering.close, made.failed)
        await unless_gone(http, answering.answers())
        return await front.answer(answering, made.whole)

    return router


@dataclass(eq=False)
class _Item:
    """One item of the output.

    Attributes:
        index: of it.
        call: of a function; None for the message.
        text: of the message so far.
        logprobs: of its tokens.
        id: of it.
    """

    index: int
    call: Call | None
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = field(default_factory=lambda: new_id("item"))

    def record(self, status: str) -> dict[str, Any]:
        """As it is sent."""
        if self.call is not None:
            about = {"call_id": self.call.id, "name": self.call.name, "arguments": self.call.arguments}
            return {"type": "function_call", "id": self.id, "status": status} | about
        content = [self.part] if self.text or status != "in_progress" else []
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}

    @property
    def part(self) -> dict[str, Any]:
        """The text as a part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class _Response:
    """One answer to a request for a response, on its way.

    Args:
        front: what endpoints share.
        body: of the request.
        answering: its one sample.
        use: of tools.
    """

    def __init__(self, front: Front, body: ResponseRequest, answering: Answering, use: ToolUse | None) -> None:
        self._front = front
        self._body = body
        self._answering = answering
        self._reader = None if use is None else CallReader(use)
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._id = new_id("resp")
        self._created = time.time()
        self._numbers = itertools.count()
        self._items: list[_Item] = []

    def whole(self) -> dict[str, Any]:
        """The response."""
        for _ in self._read(self._answer.text or "", self._answer.logprobs or (), last=True):
            pass
        if not self._items:
            self._items.append(_Item(0, None))
        return self._finished()

    @property
    def _answer(self) -> Answer:
        answer = self._answering.streams[0].answer
        assert answer is not None
        return answer

    @property
    def _status(self) -> str:
        return "incomplete" if finish_reason(self._answer) == "length" else "completed"

    def _finished(self) -> dict[str, Any]:
        front = self._front
        used = front.usage(self._answering, 1)
        status = self._status
        cut = status == "incomplete"
        *whole, last = self._items
        return self._record(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*(item.record("completed") for item in whole), last.record(status)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0} | used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
            "speculation": front.speculation(self._answering.streams),
        }

    def _record(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._front.shown(body.model),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
        }

    def _event(self, kind: str, **more: Any) -> str:
        return event({"type": kind, "sequence_number": next(self._numbers)} | more, kind)

    def failed(self, error: ApiError) -> str:
        """The last event where the answer failed."""
        about = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._record("failed") | {"error": about})

    async def events(self) -> AsyncIterator[str]:
        """The response piece by piece."""
        yield self._event("response.created", response=self._record("in_progress"))
        yield self._event("response.in_progress", response=self._record("in_progress"))
        async for news in self._answering.news():
            text = "".join(piece.text for piece in news.pieces)
            entries = [entry for piece in news.pieces for entry in piece.logprobs]
            last = bool(news.pieces) and news.pieces[-1].answer is not None
            for each in self._read(text, entries, last=last):
                yield each
        if not self._items:
            for each in self._begin(None):
                yield each
        for each in self._end(self._status):
            yield each
        done = self._finished()
        yield self._event(
            "response.incomplete" if done["status"] == "incomplete" else "response.completed", response=done
        )

    def _read(self, text: str, entries: Sequence[TokenLogprobs], *, last: bool) -> Iterator[str]:
        """The next text of the answer, and its tokens, as events; `last` where nothing follows."""
        self._logprobs += map(self._front.logprobs_entry, entries)
        parts: list[str | CallDelta] = [text] if self._reader is None else self._reader.push(text, last=last)
        for part in parts:
            if isinstance(part, str):
                yield from self._wrote(part)
            elif part.begins:
                yield from self._begin(part.call)
            else:
                about = {"item_id": self._items[-1].id, "output_index": self._items[-1].index}
                yield self._event("response.function_call_arguments.delta", **about, delta=part.arguments)
        if last and self._items and self._items[-1].call is None:
            self._items[-1].logprobs += self._logprobs

    def _wrote(self, text: str) -> Iterator[str]:
        if not text:  # of tokens that make none by themselves; their logprobs go with the next text
            return
        if not self._items or self._items[-1].call is not None:
            yield from self._begin(None)
        item, logprobs = self._items[-1], self._logprobs
        item.text += text
        item.logprobs += logprobs
        self._logprobs = []
        about = {"item_id": item.id, "output_index": item.index, "content_index": 0}
        yield self._event("response.output_text.delta", **about, delta=text, logprobs=logprobs)

    def _begin(self, call: Call | None) -> Iterator[str]:
        """A new item; the one before is over."""
        yield from self._end("completed")
        item = _Item(len(self._items), call)
        self._items.append(item)
        record = item.record("in_progress")
        if call is not None:
            self._logprobs = []  # those of a call belong to no text
            record["arguments"] = ""
        yield self._event("response.output_item.added", output_index=item.index, item=record)
        if call is None:
            about = {"item_id": item.id, "output_index": item.index, "content_index": 0}
            yield self._event("response.content_part.added", **about, part=item.part)

    def _end(self, status: str) -> Iterator[str]:
        """The last item is over."""
        if not self._items:
            return
        item = self._items[-1]
        about = {"item_id": item.id, "output_index": item.index}
        if item.call is None:
            text = {"text": item.text, "logprobs": item.logprobs}
            yield self._event("response.output_text.done", **about, content_index=0, **text)
            yield self._event("response.content_part.done", **about, content_index=0, part=item.part)
        else:
            arguments = item.call.arguments
            name = item.call.name
            yield self._event("response.function_call_arguments.done", **about, arguments=arguments, name=name)
        yield self._event("response.output_item.done", output_index=item.index, item=item.record(status))


def _dumped(choice: str | FlatNamedTool | None) -> Any:
    return choice.model_dump() if isinstance(choice, FlatNamedTool) else choice
