"""Answers on their way to a client: a `View` reads the output of the samples once, whole or as a stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from truedraft.core.stats import Counters
from truedraft.core.verdict import Origin
from truedraft.engine.batch import StepItem
from truedraft.engine.policy.decisions import Decisions
from truedraft.options import record_of
from truedraft.server.conversations import Conversation
from truedraft.server.errors import ApiError
from truedraft.server.events import EventStream, cancel_on_disconnect, event
from truedraft.server.fields import SamplingFields
from truedraft.server.front import Front, new_id
from truedraft.server.service import ResponseHandle, Stream, StreamUpdate
from truedraft.text.calls import Call, Reasoning

_Value = TypeVar("_Value")
_LONG = 256  # tokens; formatting longer answers would delay other clients
_FORCED = "forced"  # name of the drafter of tokens that a grammar forces


class View(ABC):
    """The answers to one HTTP request in the format of an endpoint; `talk` is None for plain text."""

    kind: ClassVar[str]
    """Prefix of the answers' ids."""

    def __init__(
        self, front: Front, answering: ResponseHandle, body: SamplingFields, talk: Conversation | None = None
    ) -> None:
        self.front = front
        self.streams: Sequence[Stream] = answering.streams
        self.id, self.model = new_id(self.kind), front.shown(body.model)
        self.warnings = [] if talk is None else [*talk.warnings, *talk.use.warnings]
        self._answering = answering
        self._stream, self._options = body.stream, body.stream_options
        self._use = None if talk is None else talk.use

    def begun(self) -> Iterator[str]:
        yield from ()

    @abstractmethod
    def read(self, part: StreamUpdate) -> Iterator[str]: ...

    @abstractmethod
    def ended(self) -> Iterator[str]: ...

    @abstractmethod
    def whole(self, parts: Sequence[StreamUpdate]) -> dict[str, Any]:
        """The body of a response that is not streamed; `parts` has all output of each sample."""

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that failed."""
        return event(error.body)

    async def reply(self, http: HttpRequest) -> Response:
        """The HTTP response, a stream of events or one body; an `ApiError` if the latter fails or the client left."""
        if self._stream:
            return EventStream(self._events(http), self._answering.close, self.failed)
        await cancel_on_disconnect(http.receive, self._answering.finished())
        return await self._run(http, lambda: JSONResponse(self.whole([each.whole() for each in self.streams])))

    async def _events(self, http: HttpRequest) -> AsyncIterator[str]:
        def read(output: StreamUpdate) -> list[str]:
            return list(self.read(output.parsed()))

        for each in await self._run(http, lambda: list(self.begun())):
            yield each
        begun = set[int]()  # samples with output so far: the first event may contain the prompt
        async for output in self._answering.news():
            is_first = output.stream.number not in begun
            begun.add(output.stream.number)
            for each in await self._run(http, partial(read, output)) if is_first else read(output):
                yield each
        for each in await self._run(http, lambda: list(self.ended())):
            yield each

    async def _run(self, http: HttpRequest, work: Callable[[], _Value]) -> _Value:
        """Run work over the whole request; in a thread if it is long, so that other clients need not wait."""
        written = sum(len(stream.answer.token_ids) for stream in self.streams if stream.answer is not None)
        if written <= _LONG and not self.front.is_long(http):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.front.writer, work)

    def misfits(self) -> list[str]:
        """What is wrong with the arguments of finished calls."""
        calls = [call for each in self.streams if each.reader is not None for call in each.reader.calls]
        return [] if self._use is None else self._use.misfits(calls)

    def trace(self, part: StreamUpdate) -> dict[str, Any]:
        """The origins of the tokens of an update; empty unless a trace is requested."""
        return {"trace": _trace_of(part, self.front.token_text)} if part.stream.shows_steps else {}

    def usage(self, samples_of_one: int = 1, *, answers_count: bool = True) -> dict[str, Any]:
        """Token usage of the whole request after all samples are read; `samples_of_one` of them share one prompt."""
        streams, firsts = self.streams, self.streams[::samples_of_one]
        answers = [stream.answer for stream in streams if stream.answer is not None]
        prompt = sum(stream.request.prompt_tokens for stream in firsts)
        written = sum(len(answer.token_ids) for answer in answers) if answers_count else 0
        predicted = [each for answer in answers if (each := answer.stats.by_drafter.get("prediction")) is not None]
        accepted = sum(each.accepted_tokens for each in predicted)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(stream.request.copied_tokens for stream in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.draft_tokens for each in predicted) - accepted,
                "reasoning_tokens": sum(map(self._reasoning_tokens, streams)),
            },
        }

    def usage_chunk(self, head: Mapping[str, Any], usage: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        """The event with the usage, if the client requested it."""
        if self._options is not None and self._options.include_usage:
            yield event({**head, "choices": [], "usage": usage(), **self.metrics()})

    def _reasoning_tokens(self, stream: Stream) -> int:
        count, tokens = 0, () if stream.answer is None else stream.answer.token_ids
        characters = 0 if stream.reader is None else stream.reader.reasoned
        while characters > 0 and count < len(tokens):
            characters -= len(self.front.token_text(tokens[count]))
            count += 1
        return count

    def speculation(self, *streams: Stream) -> dict[str, Any]:
        """Speculation statistics of some samples, or of all, under vLLM's names."""
        chosen = streams or self.streams
        counters = sum((each.answer.stats for each in chosen if each.answer is not None), start=Counters())
        accepted = [sum(counts) for counts in zip_longest(*(stream.accepted for stream in chosen), fillvalue=0)]
        forward_s = self.front.service.forward_s
        speedup = sum((stream.decisions for stream in chosen), Decisions(forward_s)).estimate()
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
        """Counts of an answer with one sample in the forms of vLLM and of llama.cpp, which other programs read.

        `metrics` is vLLM's `--per-request-spec-decode-metrics summary`: steps are those with a draft, and the histogram
        has an entry for each number of tokens up to the most that can be drafted. `timings` is llama-server's; its
        prompt takes until the first token.
        """
        if len(self.streams) != 1 or (answer := self.streams[0].answer) is None:
            return {}
        stats, timing = answer.stats, answer.timing
        cached, spent = self.streams[0].request.copied_tokens, timing.total_s - timing.decode_s
        found: dict[str, Any] = {"cache_n": cached}
        rest = max(len(answer.token_ids) - 1, 0)  # tokens after the first
        parts = ("prompt", answer.prompt_tokens - cached, spent), ("predicted", rest, timing.decode_s)
        for name, count, seconds in parts:
            found |= {f"{name}_n": count, f"{name}_ms": 1e3 * seconds}
            found[f"{name}_per_token_ms"] = 1e3 * seconds / max(count, 1)
            found[f"{name}_per_second"] = count / seconds if seconds > 0.0 else 0.0
        depth = self.front.service.engine.drafter.limits.depth
        if not depth:
            return {"timings": found}
        if stats.draft_tokens:
            found |= {"draft_n": stats.draft_tokens, "draft_n_accepted": stats.accepted_tokens}
        accepted = self.streams[0].accepted
        steps = sum(accepted)
        summary = {
            "mean_acceptance_length": 1.0 + stats.accepted_tokens / max(steps, 1),
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": [*accepted, *[0] * (depth + 1 - len(accepted))],
            "num_spec_steps": steps,
            "num_draft_tokens": stats.draft_tokens,
            "num_accepted_draft_tokens": stats.accepted_tokens,
            "num_spec_tokens": max(depth, len(accepted) - 1),
        }
        return {"metrics": {"speculative_decoding": summary}, "timings": found}


@dataclass(eq=False, slots=True)
class Segment:
    """A contiguous part of an answer of one kind; `logprobs` of its text's tokens are in the format of chats."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    call: Call | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; "" for a call."""
        return "".join(self.texts)


Step: TypeAlias = tuple[Literal["began", "wrote", "ended"], Segment, str, list[dict[str, Any]]]
"""An event of a segment; for "wrote" with the new text and the logprobs of its tokens."""


class Segments:
    """Splits one answer into segments; one ends where the next begins."""

    def __init__(self, front: Front) -> None:
        self.found: list[Segment] = []
        self._front = front
        self._logprobs: list[dict[str, Any]] = []  # of tokens without text so far

    def read(self, part: StreamUpdate) -> Iterator[Step]:
        """The steps of an update; the last segment stays open."""
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
        segment.texts.append(text)
        segment.logprobs += logprobs
        yield "wrote", segment, text, logprobs

    def begin(self, kind: Literal["text", "reasoning", "call"], call: Call | None = None) -> Iterator[Step]:
        yield from self.end()
        self.found.append(Segment(len(self.found), kind, call))
        yield "began", self.found[-1], "", []

    def end(self) -> Iterator[Step]:
        for segment in self.found[-1:]:
            yield "ended", segment, "", []


def _trace_of(part: StreamUpdate, text_of: Callable[[int], str]) -> dict[str, Any]:
    """The tokens of an update with their origins, and the trees of its steps; each update once, in order."""
    stream, tokens = part.stream, []
    steps = [_step_of(stream, each, text_of) for each in part.steps]
    for piece in part.pieces:
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            forced = origin is Origin.ACCEPTED and stream.shown_tokens in stream.forced_tokens
            name = _FORCED if forced else origin.name.lower()
            tokens.append({"id": token, "text": text_of(token), "origin": name})
            stream.shown_tokens += 1
    return {"tokens": tokens, "steps": steps}


def _step_of(stream: Stream, item: StepItem, text_of: Callable[[int], str]) -> dict[str, Any]:
    """One step of one request: its tree's nodes in order, each after its parent; parent -1 is the text so far."""
    outcome = item.outcome
    assert outcome is not None
    tree = outcome.proposal.tree
    drafters: list[list[str]] = [[] for _ in range(len(tree))]
    for name, nodes in item.drafted.nodes.items():
        for node in nodes:
            if node < len(drafters):
                drafters[node].append(name)
    first = item.context + item.fed - stream.request.prompt_tokens  # index in the answer of the first emitted token
    stream.forced_tokens.update(first + i for i, node in enumerate(outcome.path) if drafters[node] == [_FORCED])
    return {
        "nodes": [
            {"text": text_of(token), "parent": parent, "drafters": own}
            for token, parent, own in zip(tree.host_ids, tree.shape.parents, drafters, strict=True)
        ],
        "accepted": list(outcome.path),
        "emitted": [text_of(token) for token in outcome.tokens],
        "prefill": item.prefill,
    }
