"""The thread that runs engine steps, and the fair queue of all clients' requests."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.stats import StepRecord
from truedraft.engine import Answer, Engine, Piece, Request
from truedraft.engine.batch import StepItem
from truedraft.engine.policy.decisions import Decisions, ForwardSeconds
from truedraft.server.access import Client
from truedraft.server.errors import ApiError
from truedraft.server.preparing import FormQueue, seconds_left, stopping
from truedraft.text.answers import AnswerReader
from truedraft.text.calls import CallDelta, Reasoning, parsed

_log = logging.getLogger("truedraft.server")

_LONGEST_WAIT_S = 60
_IDLE_S = 10.0  # without a request, after which buffers are released to the system
_FOLLOWUP_SHARE = 0.05  # of the last step's time: the longest wait for requests that follow its answers
_MOST_FOLLOWUP_S = 0.02
_LEAST_FOLLOWING = 0.25  # share of these waits that must yield a request
_TRIED_AGAIN = 16  # finished answers until waiting is tried again
_LEAST_STEPS = 32  # a preempted request runs at least so many before it can be preempted again
_MOST_OUTPUTS = 64  # per read, so that a slow reader does not delay others

Ending: TypeAlias = Literal["stop", "length", "calls"]
"""Why an answer ended: at a stop token or text, at the token limit, or with function calls."""


@dataclass(eq=False, slots=True)
class Stream:
    """One sample of an HTTP request, from the queue to its last token."""

    request: Request
    client: Client
    number: int
    answering: ResponseHandle
    decisions: Decisions
    shows_steps: bool = False
    reader: AnswerReader | None = None  # parses the text; None for plain text
    waits: bool = True  # in the service's queue and not in the engine
    accepted: list[int] = field(default_factory=list)  # entry `i` counts the drafts with `i` accepted tokens
    answer: Answer | None = None
    last_item: StepItem | None = None
    began_s: float = 0.0  # when the engine first received it, by `time.monotonic`; 0 before
    turn: int = 0  # number among all admissions to the engine, at the latest one; 0 before the first
    held_steps: int = 0  # decoding steps since it was last admitted
    shown_tokens: int = 0
    forced_tokens: set[int] = field(default_factory=set)  # indices of tokens that a grammar forced, for traces

    def count(self, record: StepRecord) -> None:
        """Count a finished step of the engine; called in the engine thread."""
        if (number := record.numbers.get(self.request.id)) is None:
            return
        self.decisions(record)
        step = record.requests[number]
        self.held_steps += not step.prefill
        if step.nodes and not step.prefill:
            self.accepted += [0] * (step.accepted + 1 - len(self.accepted))
            self.accepted[step.accepted] += 1

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.request.tokens[: self.request.prompt_tokens])

    def whole(self) -> StreamUpdate:
        """The whole output of a finished sample, parsed, without its steps."""
        answer = self.answer
        assert answer is not None
        piece = Piece(answer.text or "", answer.token_ids, [], answer, answer.logprobs or [])
        return StreamUpdate(self, [piece], []).parsed()


@dataclass(eq=False, slots=True)
class StreamUpdate:
    """New output of a sample, from one or several steps.

    `steps` are empty unless the sample `shows_steps`; `found` is text, reasoning and calls, once `parsed` was called.
    """

    stream: Stream
    pieces: list[Piece]
    steps: list[StepItem]
    found: Sequence[str | Reasoning | CallDelta] = ()

    def parsed(self) -> StreamUpdate:
        """This update with its text parsed; each update of a sample once, in order."""
        text, reader = "".join(piece.text for piece in self.pieces), self.stream.reader
        self.found = [text] if reader is None else reader.push(text, last=self.answer is not None)
        return self

    @property
    def answer(self) -> Answer | None:
        """The finished answer; None before the last update of a sample."""
        return self.pieces[-1].answer if self.pieces else None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for piece in self.pieces for entry in piece.logprobs]

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(part for part in self.found if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.found if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.found if isinstance(part, CallDelta)]

    @property
    def ending(self) -> Ending | None:
        """Why the answer ended, None before its end; calls do not count if a stop text cut the last one."""
        if (answer := self.answer) is None:
            return None
        if answer.finish_reason != "stop":
            return "length"
        calls = [] if self.stream.reader is None else self.stream.reader.calls
        cut = answer.stop_text is not None and bool(calls) and parsed(calls[-1].arguments) is None
        return "calls" if calls and not cut else "stop"


class ResponseHandle:
    """The samples of one HTTP request and their output, which is read once, until `deadline` by `time.monotonic`.

    `names` has the client's names of fields, by the library's, where they differ.
    """

    def __init__(self, service: Service, deadline: float | None = None, names: Mapping[str, str] | None = None) -> None:
        self.streams: list[Stream] = []
        self._names = names or {}
        self._service = service
        self._deadline = deadline
        self._updates: deque[StreamUpdate] = deque()
        self._there = asyncio.Event()
        self._failure: ApiError | None = None

    def start(
        self, requests: Sequence[Request], client: Client, *, shows_steps: bool = False, late: bool = False
    ) -> None:
        """Queue the requests, as `Service.open` does, with its errors."""
        for number, each in enumerate(requests):
            decisions = Decisions(self._service.forward_s, each.id)
            self.streams.append(Stream(each, client, number, self, decisions, shows_steps))
        self._service.open(self.streams, late=late)

    def take(self, update: StreamUpdate) -> None:
        """Add new output; called in the event loop."""
        self._updates.append(update)
        self._there.set()

    def fail(self, error: ApiError) -> None:
        """End with an error; called in the event loop."""
        self._failure = error
        self._there.set()

    async def news(self) -> AsyncIterator[StreamUpdate]:
        """New output until all samples are finished, or an `ApiError`; a slow reader gets several steps at once."""
        left = len(self.streams)
        try:
            while left:
                async with asyncio.timeout(seconds_left(self._deadline)):
                    await self._there.wait()
                for each in self._next():
                    if each.answer is not None:
                        left -= 1
                        if each.stream.request.error is not None:
                            raise self._service.api_error(each.stream.request.error, self._names)
                        if each.answer.finish_reason == "cancelled":  # not by the reader
                            message = "the server failed in the middle of an answer; ask again"
                            raise self._failure or ApiError(500, message)
                    yield each
                if self._failure is not None and left and not self._updates:
                    raise self._failure
        except TimeoutError:
            raise ApiError(504, "the answer took longer than this server allows; request fewer tokens") from None
        finally:
            self.close()

    def _next(self) -> list[StreamUpdate]:
        """The queued output, at most `_MOST_OUTPUTS` entries, merged by sample."""
        found: dict[int, StreamUpdate] = {}
        for _ in range(min(len(self._updates), _MOST_OUTPUTS)):
            each = self._updates.popleft()
            before = found.setdefault(each.stream.number, each)
            if before is not each:
                before.pieces.extend(each.pieces)
                before.steps.extend(each.steps)
        if not self._updates:
            self._there.clear()
        return list(found.values())

    async def finished(self) -> None:
        """Wait for all answers; raises as `news`."""
        async for _ in self.news():
            pass

    def close(self) -> None:
        for stream in self.streams:
            if stream.answer is None:
                self._service.cancel(stream)


class Service:
    """Runs an engine in its own thread for requests from an event loop.

    Requests wait here in one queue per client; the engine gets at most `max_batch` of them. The next request is taken
    from the client with the fewest running ones, and among these from the one that was served longest ago. A client
    with no running request preempts one of the client with the most, if that client runs two or more: the preempted
    request waits again and later continues exactly where it was. The choice is made between steps, and all noise after
    it is new, so the distribution of answers does not depend on it.

    `listeners` are called in the event loop with every finished stream.

    Args:
        engine: only this service may step it.
        max_waiting_bytes: limit of what waiting requests hold in addition to their tokens, such as pixels.
        forward_s: V of the target, for estimated speedups.
        shown_names: names that clients see, by the internal names that errors may hold.
        hung_after_s: seconds after which a step counts as hung (see `trouble`).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int = 256,
        max_per_client: int | None = None,
        max_waiting_bytes: int = 1 << 30,
        forward_s: ForwardSeconds | None = None,
        shown_names: Mapping[str, str] | None = None,
        hung_after_s: float = 300.0,
    ) -> None:
        self.engine = engine
        self.forms = FormQueue(engine.forms)
        self.forward_s = forward_s
        self.listeners: list[Callable[[Stream], None]] = []
        self.draining = False
        self._ending = False  # whether open requests are aborted, too
        self._max_queue = max_queue
        self._max_per_client = max_per_client
        self._max_waiting_bytes = max_waiting_bytes
        self._shown_names = shown_names
        self._hung_after_s = hung_after_s
        self._step_began: float | None = None  # None between steps
        self._device_lost: str | None = None  # the error
        self._guard = threading.Lock()  # guards the fields below
        self._waiting: dict[Client, deque[Stream]] = {}
        self._open: dict[Client, int] = {}
        self._reserved = 0  # places of requests that are still being made
        self._served: dict[Client, int] = {}  # number of the client's latest admission
        self._admitted = 0
        self._running: list[Stream] = []
        self._work = threading.Event()
        self._stopped = self._ended = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mean_s = 1.0  # running time of a request, moving average
        self._following = 1.0  # share of answers that another request followed at once, moving average
        self._unawaited = 0  # finished answers since the last wait

    def start(self) -> None:
        """Start the engine thread; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.listeners.append(self._note)
        run = contextvars.copy_context().run  # the thread inherits the caller's number of torch threads
        self._thread = threading.Thread(target=run, args=(self._drive,), name="truedraft-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort open requests and join the engine thread."""
        self.abort()
        self._stopped = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    def api_error(self, error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
        return ApiError.of(error, fields, self._shown_names)

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered until the process is restarted; None if the service works or drains."""
        if self._thread is None or not self._thread.is_alive() or self._ended:
            return "the thread that steps the engine has ended"
        if self._device_lost is not None:
            return f"the device computes no more ({self._device_lost})"
        if (failure := self.engine.target.failure) is not None:
            return failure
        began = self._step_began
        took = 0.0 if began is None else time.monotonic() - began
        return None if took <= self._hung_after_s else f"a step has not ended after {took:.0f} s"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def reserve(self, client: Client, count: int) -> None:
        """Reserve places for requests that take long to prepare, until `give_back`; raises as `open`."""
        with self._guard:
            self._refuse_where_full(client, count)
            self._reserved += count
            self._open[client] = self._open.get(client, 0) + count

    def give_back(self, client: Client, count: int) -> None:
        """Release reserved places; the caller then calls `open` at once if the requests are ready."""
        with self._guard:
            self._reserved -= count
            self._leave(client, count)

    def open(self, streams: Sequence[Stream], *, late: bool = False) -> None:
        """Queue the samples of one HTTP request, all or none; an `ApiError` if there is no room for them.

        Samples that had reserved places come `late`, and are accepted while the server drains.
        """
        client = streams[0].client
        with self._guard:
            self._refuse_where_full(client, len(streams), late=late)
            self._refuse_what_is_large(streams)
            self._waiting.setdefault(client, deque()).extend(streams)
            self._open[client] = self._open.get(client, 0) + len(streams)
        self._work.set()

    def _refuse_where_full(self, client: Client, count: int, *, late: bool = False) -> None:
        later, most, opened = self._free_in_s(), self._max_per_client, self._open.get(client, 0)
        if self.draining and (not late or self._ending):
            raise stopping(later)
        ever = min(self._max_queue + self.engine.max_batch, count if most is None else most)
        if count > ever:
            raise ApiError(400, f"asks for {count} answers at once, and this server takes {ever}; request fewer")
        waiting, room = self.waiting + self._reserved, self.engine.max_batch - self.running
        if waiting + count > self._max_queue + max(room, 0):
            raise ApiError(429, f"{waiting} requests wait already; ask again in {later} s", retry_s=later)
        if most is not None and opened + count > most:
            raise ApiError(429, f"this API key has {opened} requests open, of at most {most}", retry_s=later)

    def _refuse_what_is_large(self, streams: Sequence[Stream]) -> None:
        """Limit the pixels that waiting requests hold; a request above the limit is accepted if no other holds any."""
        held = _input_bytes(self._queued())
        new = _input_bytes(streams)
        if held and new and held + new > self._max_waiting_bytes:
            later = self._free_in_s()
            message = f"pictures of {held} bytes wait already, of at most {self._max_waiting_bytes}, and these have"
            raise ApiError(429, f"{message} {new}; ask again in {later} s", retry_s=later)

    def _free_in_s(self) -> int:
        """Whole seconds until there may be room, estimated from the recent running time of requests."""
        ahead = (self.waiting + 1) / self.engine.max_batch
        return min(max(math.ceil(ahead * self._mean_s), 1), _LONGEST_WAIT_S)

    def cancel(self, stream: Stream) -> None:
        """End a stream at its current token; any thread may call it."""
        with self._guard:
            queue = self._waiting.get(stream.client)
            if stream.waits and queue is not None and stream in queue:
                queue.remove(stream)
                if not stream.turn:
                    self._leave(stream.client, 1)
                    return
                stream.waits = False  # it has tokens, so the engine ends it
                self._running.append(stream)
            if not stream.waits:  # guarded, so that it is not preempted at the same time
                self.engine.cancel(stream.request)
        self._work.set()

    def abort(self) -> None:
        """Refuse new requests, and end open ones with an error that says they may be sent again."""
        self.draining = self._ending = True
        self.forms.abort()
        for stream in self._all():
            stream.answering.fail(stopping())
            self.cancel(stream)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs or is being prepared."""
        return not self.running and not self.waiting and not self._reserved

    def _leave(self, client: Client, count: int) -> None:
        """Decrease a client's number of open requests; the caller holds the guard."""
        self._open[client] = self._open.get(client, 0) - count
        if self._open[client] <= 0:
            del self._open[client]
            if not self._waiting.get(client):
                self._waiting.pop(client, None)

    def _drive(self) -> None:
        try:
            while not self._stopped:
                self._admit()
                self._step_began = began = time.monotonic()
                try:
                    busy = self.engine.step()
                except Exception as error:  # of a listener, or a bug; an error of one request does not raise here
                    _log.exception("a step failed")
                    self._look_at_device()
                    self._fail(self._running, self.api_error(error))
                    for stream in self._running:
                        self.engine.cancel(stream.request)
                    busy = False
                ended = self._hand_over()
                self._step_began = None
                if ended and busy:
                    self._wait_for_followups(ended, _FOLLOWUP_SHARE * (time.monotonic() - began))
                if not busy and not self.waiting:
                    while not self._work.is_set() and self.engine.measure_ahead():
                        pass
                    if not self._work.wait(_IDLE_S):
                        self.engine.give_back()
                        self._work.wait()
                    self._work.clear()
        finally:  # if the thread ends by a bug, no request may wait for it
            self.draining = self._ended = True  # before clients are notified, because they may query /health at once
            self._fail(self._all(), stopping())

    def _all(self) -> list[Stream]:
        with self._guard:
            return [*self._queued(), *self._running]

    def _queued(self) -> Iterator[Stream]:
        return itertools.chain.from_iterable(self._waiting.values())

    def _look_at_device(self) -> None:
        """After an error: check whether the device still computes, because some CUDA errors are permanent."""
        try:
            torch.ones(1, device=self.engine.target.device).item()
        except torch.OutOfMemoryError:  # not permanent
            pass
        except Exception as error:
            self._device_lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _log.exception("the device computes no more")

    def _wait_for_followups(self, ended: int, most_s: float) -> None:
        """Wait briefly for the requests that clients send after finished answers, so that they join the next step."""
        self._unawaited += 1
        if self._following < _LEAST_FOLLOWING and self._unawaited < _TRIED_AGAIN:
            return
        self._unawaited = 0
        end = time.monotonic() + min(most_s, _MOST_FOLLOWUP_S)
        self._work.clear()
        while self.waiting < ended and not self._stopped and (left := end - time.monotonic()) > 0.0:
            self._work.wait(left)
            self._work.clear()
        self._following = _averaged(self._following, min(self.waiting / ended, 1.0))

    def _admit(self) -> None:
        self._make_room()
        while len(self._running) < self.engine.max_batch:
            with self._guard:
                stream = self._next()
                if stream is None:
                    return
                stream.waits, stream.held_steps = False, 0
                stream.began_s = stream.began_s or time.monotonic()
                self._running.append(stream)
                self.engine.enqueue(stream.request)  # guarded, so that `cancel` finds it here or in the engine

    def _make_room(self) -> None:
        running: dict[Client, list[Stream]] = {}
        short: list[Stream] = []  # requests that wait in the engine for cache memory
        for stream in self._running:
            if stream.request.closed:
                continue
            if stream.request.cache is None:
                short.append(stream)
            else:
                running.setdefault(stream.client, []).append(stream)
        with self._guard:
            waiting = {client for client, queue in self._waiting.items() if queue}
        waiting.update(stream.client for stream in short)
        if waiting <= running.keys() or not (short or len(self._running) >= self.engine.max_batch):
            return
        most = max(running.values(), key=len, default=[])
        may = [each for each in most if not each.request.preemptions or each.held_steps >= _LEAST_STEPS]
        if len(most) < 2 or not may:
            return
        out = min(may, key=lambda each: (each.request.preemptions, -each.turn))
        # That client's requests that wait in the engine would be served before those of others.
        for stream in (*(each for each in reversed(short) if each.client == out.client), out):
            self._pause(stream)

    def _pause(self, stream: Stream) -> None:
        """Put a request at the front of its client's queue, unless it is finished."""
        self.engine.pause(stream.request)
        with self._guard:
            if not stream.request.closed:  # also because its client disconnected
                self._running.remove(stream)
                stream.waits = True
                self._waiting.setdefault(stream.client, deque()).appendleft(stream)

    def _next(self) -> Stream | None:
        queues = [queue for queue in self._waiting.values() if queue]
        if not queues:
            return None
        runs, served = Counter(stream.client for stream in self._running), self._served
        chosen = min(queues, key=lambda queue: (runs[queue[0].client], served.get(queue[0].client, 0))).popleft()
        self._admitted += 1
        served[chosen.client] = chosen.turn = self._admitted
        return chosen

    def _note(self, record: StepRecord) -> None:
        for stream in self._running:
            stream.count(record)

    def _hand_over(self) -> int:
        """Pass the pieces of the last step to the event loop, in one call; returns the number of finished answers."""
        handed: list[StreamUpdate] = []
        for stream in self._running:
            new = StreamUpdate(stream, [], [])
            while stream.request.pieces:  # a cancelling thread may append the last one at the same time
                new.pieces.append(stream.request.pieces.pop(0))
            last = stream.request.last_step
            if stream.shows_steps and last is not None and last is not stream.last_item:
                stream.last_item = last
                new.steps.append(last)
            if new.pieces or new.steps:
                handed.append(new)
                stream.answer = new.answer
        over = [each.stream for each in handed if each.answer is not None]
        if over:
            with self._guard:
                self._running = [stream for stream in self._running if stream.answer is None]
                for stream in over:
                    self._leave(stream.client, 1)
            if any(stream.request.error is not None for stream in over):
                self._look_at_device()
            for stream in over:
                self._mean_s = _averaged(self._mean_s, time.monotonic() - stream.began_s)
        if handed and self._loop is not None:
            self._loop.call_soon_threadsafe(self._take, handed)
        return len(over)

    def _take(self, handed: Sequence[StreamUpdate]) -> None:
        """Deliver output and call the listeners; called in the event loop."""
        for each in handed:
            each.stream.answering.take(each)
            if each.answer is not None:
                for listener in self.listeners:
                    listener(each.stream)

    def _fail(self, streams: Sequence[Stream], error: ApiError) -> None:
        for stream in streams:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(stream.answering.fail, error)


def _averaged(mean: float, new: float) -> float:
    """An exponential moving average with a new value."""
    return 0.9 * mean + 0.1 * new


def _input_bytes(streams: Iterable[Stream]) -> int:
    """Bytes that requests hold in addition to their tokens; samples of one prompt share them."""
    held = {id(value): value.nbytes for stream in streams for value in (stream.request.inputs or {}).values()}
    return sum(held.values())
