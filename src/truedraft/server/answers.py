"""Answers on their way to a client: reads the output of the samples once, whole or as a stream.

Each endpoint implements a `View`, which formats the parts by its protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.stats import Counters
from truedraft.engine import Answer
from truedraft.engine.policy.decisions import Decisions
from truedraft.options import record_of
from truedraft.server.errors import ApiError
from truedraft.server.events import EventStream, cancel_on_disconnect
from truedraft.server.front import Front
from truedraft.server.service import ResponseHandle, Stream, StreamUpdate
from truedraft.server.tools import ToolUse
from truedraft.server.traces import trace_of
from truedraft.text.calls import Call, CallDelta, Reasoning, parsed
from truedraft.text.notations import AnswerReader

_Value = TypeVar("_Value")
_LONG = 256  # tokens; formatting longer answers would delay other clients

Ending: TypeAlias = Literal["stop", "length", "calls"]
"""Why an answer ended: at a stop token or text, at the token limit, or with function calls."""

_SHARED_NAMES = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_draft_tokens")


@dataclass(frozen=True, slots=True)
class Part:
    """New output of a sample: of one or several steps of a stream, or all of it.

    Attributes:
        found: plain text, reasoning and pieces of calls, in order.
        ending: why the answer ended; None before the last part.
    """

    stream: Stream
    news: StreamUpdate
    found: Sequence[str | Reasoning | CallDelta]
    ending: Ending | None

    @property
    def answer(self) -> Answer | None:
        """The finished answer; None before the last part."""
        return self.news.answer

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Logprobs of its tokens; empty unless requested."""
        return [entry for piece in self.news.pieces for entry in piece.logprobs]

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.news.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(part for part in self.found if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.found if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.found if isinstance(part, CallDelta)]


class View(Protocol):
    """An answer in the format of an endpoint."""

    def begun(self) -> Iterator[str]:
        """The first events of a stream."""

    def read(self, part: Part) -> Iterator[str]:
        """The events of a part."""

    def ended(self) -> Iterator[str]:
        """The last events."""

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The body of a response that is not streamed.

        Args:
            parts: one for each sample, with all of its output.
        """

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that failed."""


class Answers:
    """The samples of one HTTP request. They can be read once.

    Args:
        readers: parse the samples' texts, one each; None for plain text.
    """

    def __init__(
        self,
        front: Front,
        answering: ResponseHandle,
        readers: Sequence[AnswerReader] | None = None,
        use: ToolUse | None = None,
    ) -> None:
        self.front = front
        self.answering = answering
        self._readers = readers
        self._use = use

    @property
    def streams(self) -> Sequence[Stream]:
        """The samples."""
        return self.answering.streams

    async def reply(self, http: HttpRequest, view: View, *, stream: bool | None) -> Response:
        """The HTTP response: a stream of the view's events, or one body.

        Raises:
            ApiError: an answer that is not streamed failed, or the client has disconnected.
        """
        if stream:
            return EventStream(self._events(http, view), self.answering.close, view.failed)
        await cancel_on_disconnect(http.receive, self.answering.answers())
        return await self._apart(
            http, lambda: JSONResponse(view.whole([self._part(StreamUpdate.of(each)) for each in self.streams]))
        )

    async def _events(self, http: HttpRequest, view: View) -> AsyncIterator[str]:
        def read(output: StreamUpdate) -> list[str]:
            return list(view.read(self._part(output)))

        for each in await self._apart(http, lambda: list(view.begun())):
            yield each
        begun = set[int]()  # samples with output so far: the first event may contain the prompt
        async for output in self.answering.news():
            is_first = output.number not in begun
            begun.add(output.number)
            for each in await self._apart(http, partial(read, output)) if is_first else read(output):
                yield each
        for each in await self._apart(http, lambda: list(view.ended())):
            yield each

    async def _apart(self, http: HttpRequest, work: Callable[[], _Value]) -> _Value:
        """Run work over all of the request and its answers; in a thread if that is long, so that other clients need not
        wait.
        """
        written = sum(len(stream.answer.token_ids) for stream in self.streams if stream.answer is not None)
        if written <= _LONG and not self.front.is_long(http):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.front.writer, work)

    def _part(self, output: StreamUpdate) -> Part:
        text = "".join(piece.text for piece in output.pieces)
        reader = None if self._readers is None else self._readers[output.number]
        found = [text] if reader is None else reader.push(text, last=output.answer is not None)
        ending = None if output.answer is None else _ending(output.answer, reader)
        return Part(self.streams[output.number], output, found, ending)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the tools that may be called."""
        return [] if self._use is None else self._use.warnings

    def misfits(self) -> list[str]:
        """What is wrong with the arguments of finished calls."""
        calls = [call for reader in self._readers or () for call in reader.calls]
        return [] if self._use is None else self._use.misfits(calls)

    def trace(self, part: Part) -> dict[str, Any]:
        """The origins of the tokens of a part; empty unless a trace is requested."""
        if not part.stream.shows_steps:
            return {}
        return {"trace": trace_of(part.stream, part.news, self.front.token_text)}

    def usage(self, samples_of_one: int = 1, *, answers_count: bool = True) -> dict[str, Any]:
        """Token usage of the whole HTTP request; call it after all samples are read.

        Args:
            samples_of_one: samples per prompt; the prompt is counted once.
            answers_count: whether generated tokens count.
        """
        streams = self.streams
        answers = [stream.answer for stream in streams if stream.answer is not None]
        prompt = sum(stream.request.prompt_tokens for stream in streams[::samples_of_one])
        written = sum(len(answer.token_ids) for answer in answers) if answers_count else 0
        copied = sum(stream.request.copied_tokens for stream in streams[::samples_of_one])
        predicted = [answer.stats.by_drafter.get("prediction") for answer in answers]
        accepted = sum(each.accepted_tokens for each in predicted if each is not None)
        drafted = sum(each.draft_tokens for each in predicted if each is not None)
        readers = self._readers or ()
        reasoned = (self._tokens_of(stream, reader.reasoned) for stream, reader in zip(streams, readers, strict=False))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": copied},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": sum(reasoned),
            },
        }

    def _tokens_of(self, stream: Stream, characters: int) -> int:
        """Number of tokens in the first `characters` characters of an answer."""
        count, tokens = 0, () if stream.answer is None else stream.answer.token_ids
        while characters > 0 and count < len(tokens):
            characters -= len(self.front.token_text(tokens[count]))
            count += 1
        return count

    def speculation(self, streams: Sequence[Stream] | None = None) -> dict[str, Any]:
        """Speculation statistics of some samples, or of all (None), under vLLM's names."""
        streams = self.streams if streams is None else streams
        counters = sum((s.answer.stats for s in streams if s.answer is not None), start=Counters())
        accepted = [sum(counts) for counts in zip_longest(*(stream.accepted for stream in streams), fillvalue=0)]
        forward_s = self.front.service.forward_s
        speedup = sum((stream.decisions for stream in streams), Decisions(forward_s)).estimate()
        return {
            "mean_acceptance_length": counters.mean_acceptance_length,
            "draft_acceptance_rate": counters.draft_acceptance_rate,
            "acceptance_histogram": accepted,
            "num_drafts": sum(accepted),
            "num_draft_tokens": counters.draft_tokens,
            "num_accepted_tokens": counters.accepted_tokens,
            "num_accepted_tokens_per_pos": counters.accepted_per_position,
            "target_calls": counters.target_calls,
            "drafted_calls": counters.drafted_calls,
            "undrafted": counters.undrafted,
            "drafters": {
                name: {"num_draft_tokens": each.draft_tokens, "num_accepted_tokens": each.accepted_tokens}
                for name, each in counters.by_drafter.items()
            },
            "speedup": None if speedup is None else record_of(speedup),
        }

    def metrics(self) -> dict[str, Any]:
        """The same for one sample, where vLLM's `--per-request-spec-decode-metrics summary` puts it.

        AIPerf and llama-swap read it. Empty for several samples, or without a drafter.
        """
        depth = self.front.service.engine.drafter.limits.depth
        if len(self.streams) != 1 or not depth:
            return {}
        found = self.speculation()
        summary = {name: found[name] for name in _SHARED_NAMES}
        summary |= {"num_spec_steps": found["num_drafts"], "num_accepted_draft_tokens": found["num_accepted_tokens"]}
        return {"metrics": {"speculative_decoding": summary | {"num_spec_tokens": depth}}}


def _ending(answer: Answer, reader: AnswerReader | None) -> Ending:
    """Why a finished answer ended; calls do not count if a stop text cut the last one."""
    if answer.finish_reason != "stop":
        return "length"
    if reader is None or not reader.calls:
        return "stop"
    return "stop" if answer.stop_text is not None and parsed(reader.calls[-1].arguments) is None else "calls"


@dataclass(eq=False, slots=True)
class Segment:
    """A contiguous part of an answer of one kind.

    Attributes:
        index: position in the answer, from 0.
        logprobs: of the tokens of its text, in the format of chats.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    call: Call | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; "" for a call."""
        return "".join(self._texts)


Step: TypeAlias = tuple[Literal["began", "wrote", "ended"], Segment, str, list[dict[str, Any]]]
"""An event of a segment; for "wrote" with the new text and the logprobs of its tokens."""


class Segments:
    """Splits one answer into segments; one ends where the next begins."""

    def __init__(self, front: Front) -> None:
        self.found: list[Segment] = []
        self._front = front
        self._logprobs: list[dict[str, Any]] = []  # of tokens without text so far

    def read(self, part: Part) -> Iterator[Step]:
        """The steps of a part; the last segment stays open."""
        self._logprobs += map(self._front.logprobs_entry, part.logprobs)
        for each in part.found:
            if isinstance(each, str):
                yield from self._wrote("text", each)
            elif isinstance(each, Reasoning):
                yield from self._wrote("reasoning", each.text)
            elif each.begins:
                self._logprobs = []  # tokens of a call belong to no text
                yield from self.begin("call", each.call)
            else:
                yield "wrote", self.found[-1], each.arguments, []
        if part.answer is not None and self.found and self.found[-1].call is None:
            self.found[-1].logprobs += self._logprobs

    def _wrote(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[Step]:
        if not text:  # tokens without text of their own; their logprobs are added to the next text
            return
        if not self.found or self.found[-1].kind != kind:
            yield from self.begin(kind)
        segment = self.found[-1]
        logprobs, self._logprobs = self._logprobs, []
        segment._texts.append(text)
        segment.logprobs += logprobs
        yield "wrote", segment, text, logprobs

    def begin(self, kind: Literal["text", "reasoning", "call"], call: Call | None = None) -> Iterator[Step]:
        """Begin a new segment and end the last one."""
        yield from self.end()
        self.found.append(Segment(len(self.found), kind, call))
        yield "began", self.found[-1], "", []

    def end(self) -> Iterator[Step]:
        """End the last segment, if there is one."""
        for segment in self.found[-1:]:
            yield "ended", segment, "", []
