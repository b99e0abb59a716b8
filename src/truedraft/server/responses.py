"""`/v1/responses`: OpenAI's newer endpoint, for text and functions, without a memory: each request brings its whole
conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.params import Structured
from truedraft.engine import Answer
from truedraft.server.chat import chat_prompt, room_for
from truedraft.server.errors import ApiError
from truedraft.server.events import OR_STREAM, EventStream, event
from truedraft.server.fields import Fields, Items, SamplingFields, Thinking, checked_logprobs
from truedraft.server.front import Front, finish_reason, has_called, new_id, unless_gone
from truedraft.server.items import (
    Callable,
    Choice,
    Input,
    InputMessage,
    Item,
    TextReader,
    Tool,
    Toolbox,
    messages_of,
    urls_in,
)
from truedraft.server.service import Answering
from truedraft.server.tools import ToolUse
from truedraft.text.calls import Call
from truedraft.text.notations import AnswerReader, Reasoning

_Event: TypeAlias = tuple[str, dict[str, Any]]
"""The kind of an event of an item, and what it says beside which item that is."""


Included: TypeAlias = Literal[
    "message.output_text.logprobs",
    # Of no effect: there is nothing of these in an answer.
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""What clients ask to be told beside an answer."""


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
    # Taken, and of no effect: nothing is stored or cut, and tools run at the client.
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None
    max_tool_calls: int | None = None

    @property
    def thinks(self) -> Thinking:
        """What it asks of reasoning."""
        return Thinking.of(self.reasoning_budget, reasoning=self.reasoning)

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
    def items(self) -> list[Item]:
        """What was said so far, without the instructions."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates know it."""
        told = messages_of(self.items)
        if self.instructions is None:
            return told
        first = self.instructions
        while told and told[0]["role"] == "system" and isinstance(told[0]["content"], str):
            first = f"{first}\n\n{told.pop(0)['content']}"  # many templates take one message of the system's
        return [{"role": "system", "content": first}, *told] if first else told

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
        toolbox = Toolbox.of(body.tools or (), body.items)
        front.left_out(toolbox.warnings)
        use = ToolUse.of(*toolbox.use(body.tool_choice), body.parallel_tool_calls, front.notation)
        messages = body.messages
        if not messages:
            raise ApiError(400, "input is empty; give at least one message", param="input")
        more = front.switches(body.thinks)
        prompt = await chat_prompt(front, http, messages, urls_in(body.items), use, more=more, param="input")
        room = room_for(front, prompt, body.max_output_tokens)
        params = use.fitted(body.sampling(room, logprobs=body.wanted_logprobs, form=use.forced or body.form))
        answering = await front.begin([prompt], params, body, http, notation=front.notation)
        made = _Response(front, body, answering, front.reader(use, prompt), toolbox)
        if body.stream:
            return EventStream(made.events(), answering.close, made.failed)
        await unless_gone(http, answering.answers())
        return await front.answer(answering, made.whole)

    return router


@dataclass(eq=False)
class _Writing:
    """A message, or reasoning, on its way.

    Attributes:
        index: of the item in the output.
        reasons: whether it is reasoning.
        text: so far.
        logprobs: of its tokens.
        id: of the item.
    """

    index: int
    reasons: bool
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = field(default_factory=lambda: new_id("item"))

    def record(self, status: str) -> dict[str, Any]:
        """As it is sent."""
        content = [self.part] if self.text or status != "in_progress" else []
        about = {"type": "reasoning", "summary": []} if self.reasons else {"type": "message", "role": "assistant"}
        return about | {"id": self.id, "status": status, "content": content}

    @property
    def part(self) -> dict[str, Any]:
        """The text as a part."""
        if self.reasons:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begun(self) -> list[_Event]:
        """What is sent where it begins."""
        return [("response.content_part.added", {"content_index": 0, "part": self.part})]

    def wrote(self, text: str, logprobs: list[dict[str, Any]]) -> list[_Event]:
        """The next text of it."""
        self.text += text
        self.logprobs += logprobs
        more = {} if self.reasons else {"logprobs": logprobs}
        return [(f"response.{self.part['type']}.delta", {"content_index": 0, "delta": text} | more)]

    def ended(self) -> list[_Event]:
        """What is sent where it ends."""
        part = self.part
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = (f"response.{part['type']}.done", {"content_index": 0} | text)
        return [done, ("response.content_part.done", {"content_index": 0, "part": part})]


@dataclass(eq=False)
class _Calling:
    """A call on its way.

    Attributes:
        index: of the item in the output.
        call: that is read.
        named: the tool; None where the model called one that is not there.
        text: that a custom tool is called with.
        id: of the item.
    """

    index: int
    call: Call
    named: Callable | None
    text: TextReader | None
    id: str = field(default_factory=lambda: new_id("item"))

    def record(self, status: str) -> dict[str, Any]:
        """As it is sent."""
        name = self.call.name if self.named is None else self.named.name
        about = {"id": self.id, "status": status, "call_id": self.call.id, "name": name}
        if self.named is not None and self.named.namespace is not None:
            about["namespace"] = self.named.namespace
        if self.text is not None:
            return about | {"type": "custom_tool_call", "input": self.text.text}
        return about | {"type": "function_call", "arguments": "" if status == "in_progress" else self.call.arguments}

    def begun(self) -> list[_Event]:
        """What is sent where it begins."""
        return []

    def wrote(self, arguments: str) -> list[_Event]:
        """The next text of its arguments."""
        if self.text is None:
            return [("response.function_call_arguments.delta", {"delta": arguments})]
        new = self.text.push(arguments)
        return [("response.custom_tool_call_input.delta", {"delta": new})] if new else []

    def ended(self) -> list[_Event]:
        """What is sent where it ends."""
        if self.text is None:
            done = {"arguments": self.call.arguments, "name": self.record("completed")["name"]}
            return [("response.function_call_arguments.done", done)]
        rest = self.text.finish(self.call.arguments)
        delta: list[_Event] = [("response.custom_tool_call_input.delta", {"delta": rest})] if rest else []
        return [*delta, ("response.custom_tool_call_input.done", {"input": self.text.text})]


class _Response:
    """One answer to a request for a response, on its way.

    Args:
        front: what endpoints share.
        body: of the request.
        answering: its one sample.
        reader: of its text.
        toolbox: what may be called, and what was left out.
    """

    def __init__(
        self, front: Front, body: ResponseRequest, answering: Answering, reader: AnswerReader, toolbox: Toolbox
    ) -> None:
        self._front = front
        self._body = body
        self._answering = answering
        self._reader = reader
        self._toolbox = toolbox
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._id = new_id("resp")
        self._created = time.time()
        self._numbers = itertools.count()
        self._items: list[_Writing | _Calling] = []
        self._writing: _Writing | None = None  # the last item, where it is one
        self._calling: _Calling | None = None

    def whole(self) -> dict[str, Any]:
        """The response."""
        for _ in self._read(self._answer.text or "", self._answer.logprobs or (), last=True):
            pass
        for _ in self._closed():
            pass
        return self._finished()

    @property
    def _answer(self) -> Answer:
        answer = self._answering.streams[0].answer
        assert answer is not None
        return answer

    @property
    def _status(self) -> str:
        return "incomplete" if finish_reason(self._answer) == "length" else "completed"

    @property
    def _last_status(self) -> str:
        """Of the last item, which a stop text may have cut."""
        cut = self._items[-1] is self._calling and not has_called(self._answer, self._reader)
        return "incomplete" if cut else self._status

    def _finished(self) -> dict[str, Any]:
        front = self._front
        used = front.usage(self._answering, 1, [self._reader])
        status = self._status
        cut = status == "incomplete"
        *whole, last = self._items
        return self._record(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*(item.record("completed") for item in whole), last.record(self._last_status)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
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
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
            "warnings": self._toolbox.warnings,
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
        for each in self._closed():
            yield each
        done = self._finished()
        yield self._event(
            "response.incomplete" if done["status"] == "incomplete" else "response.completed", response=done
        )

    def _read(self, text: str, entries: Sequence[TokenLogprobs], *, last: bool) -> Iterator[str]:
        """The next text of the answer, and its tokens, as events; `last` where nothing follows."""
        self._logprobs += map(self._front.logprobs_entry, entries)
        for part in self._reader.push(text, last=last):
            if isinstance(part, str):
                yield from self._wrote(part, reasons=False)
            elif isinstance(part, Reasoning):
                yield from self._wrote(part.text, reasons=True)
            elif part.begins:
                self._logprobs = []  # those of a call belong to no text
                named = self._toolbox.callables.get(part.call.name)
                custom = TextReader() if named is not None and named.custom else None
                calling = _Calling(len(self._items), part.call, named, custom)
                yield from self._begin(calling)
                self._writing, self._calling = None, calling
            elif self._calling is not None:
                yield from self._of(self._calling, self._calling.wrote(part.arguments))
        if last and self._writing is not None:
            self._writing.logprobs += self._logprobs

    def _wrote(self, text: str, *, reasons: bool) -> Iterator[str]:
        if not text:  # of tokens that make none by themselves; their logprobs go with the next text
            return
        writing = self._writing
        if writing is None or writing.reasons is not reasons:
            writing = _Writing(len(self._items), reasons)
            yield from self._begin(writing)
            self._writing, self._calling = writing, None
        logprobs, self._logprobs = self._logprobs, []
        yield from self._of(writing, writing.wrote(text, logprobs))

    def _of(self, item: _Writing | _Calling, events: Sequence[_Event]) -> Iterator[str]:
        for kind, more in events:
            yield self._event(kind, item_id=item.id, output_index=item.index, **more)

    def _begin(self, item: _Writing | _Calling) -> Iterator[str]:
        """A new item; the one before is over."""
        yield from self._end("completed")
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=item.index, item=item.record("in_progress"))
        yield from self._of(item, item.begun())

    def _end(self, status: str) -> Iterator[str]:
        """The last item is over."""
        for item in self._items[-1:]:
            yield from self._of(item, item.ended())
            yield self._event("response.output_item.done", output_index=item.index, item=item.record(status))

    def _closed(self) -> Iterator[str]:
        """Nothing follows; an answer without any item is an empty message."""
        if not self._items:
            yield from self._begin(_Writing(0, False))
        yield from self._end(self._last_status)
