"""One thread that steps the engine, and the requests of all clients: queued fairly, handed over, cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from truedraft.core.stats import StepRecord
from truedraft.engine import Answer, Engine, Piece, Request
from truedraft.engine.batch import StepItem
from truedraft.engine.policy.decisions import Decisions, ForwardSeconds
from truedraft.server.errors import ApiError
from truedraft.server.keys import Client
from truedraft.server.preparing import FormQueue, stopping

_log = logging.getLogger("truedraft.server")

_LONGEST_WAIT_S = 60
_IDLE_S = 10.0  # without a request, and buffers go back to the system
_RECENT = 0.9  # of what was so far, beside the newest
_LINGERING = 0.05  # of the last step's time, at most, is waited for requests that follow its answers
_MOST_LINGERING_S = 0.02
_WORTH_WAITING = 0.25  # of these waits must bring a request
_TRIED_AGAIN = 16  # ends of answers later
_LEAST_STEPS = 32  # of its answer, that a request makes before its place is taken again
_MOST_NEWS = 64  # that a reader gets at once, so that one that was slow holds nobody up


@dataclass(eq=False, slots=True)
class Stream:
    """One request on its way, and who waits for it.

    Attributes:
        request: that `Engine.prepare` made.
        client: who asks.
        number: which of the samples of an `Answering` it is.
        answering: is handed the pieces.
        decisions: counts its steps as they come.
        shows_steps: whether the drafted trees are handed over, too.
        waits: whether the engine has not got it yet.
        accepted: how many of its drafts had 0, 1, 2, ... tokens accepted.
        answer: once it is over.
        last_item: whose step was handed over.
        began_s: when the engine got it first, by `time.monotonic`.
        turn: which of all requests that the engine got it was, the last time.
        held_steps: of its answer, that it made since.
        shown_tokens: of the answer, that a trace told of.
        forced_tokens: places in the answer of tokens that a form left no choice in, of steps that a trace told of.
    """

    request: Request
    client: Client
    number: int
    answering: Answering
    decisions: Decisions
    shows_steps: bool = False
    waits: bool = True
    accepted: list[int] = field(default_factory=list)
    answer: Answer | None = None
    last_item: StepItem | None = None
    began_s: float = 0.0
    turn: int = 0
    held_steps: int = 0
    shown_tokens: int = 0
    forced_tokens: set[int] = field(default_factory=set)

    def count(self, record: StepRecord) -> None:
        """A step of the engine is over; called by the thread that steps."""
        number = record.numbers.get(self.request.id)
        if number is None:
            return
        self.decisions(record)
        step = record.requests[number]
        self.held_steps += not step.prefill
        if step.nodes and not step.prefill:
            self.accepted += [0] * (step.accepted + 1 - len(self.accepted))
            self.accepted[step.accepted] += 1

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return list(self.request.tokens[: self.request.prompt_tokens])


@dataclass(frozen=True, slots=True)
class News:
    """What one or several steps brought to a stream.

    Attributes:
        number: of the stream.
        pieces: of its answer.
        steps: that it took part in since, where they are shown, and what came of them.
    """

    number: int
    pieces: list[Piece]
    steps: list[StepItem]

    @classmethod
    def of(cls, stream: Stream) -> News:
        """All that came of a stream that is over, without its steps."""
        answer = stream.answer
        assert answer is not None
        return cls(stream.number, [Piece(answer.text or "", answer.token_ids, [], answer, answer.logprobs or [])], [])

    @property
    def answer(self) -> Answer | None:
        """The whole one, where this is the last news of it."""
        return self.pieces[-1].answer if self.pieces else None


class Answering:
    """The samples that one HTTP request asks for, and what has come of them.

    Args:
        service: that answers.
        deadline: by `time.monotonic`, when it gives up; None never.
        names: what the client calls fields, where these are not the library's words.
    """

    def __init__(self, service: Service, deadline: float | None = None, names: Mapping[str, str] | None = None) -> None:
        self.streams: list[Stream] = []
        self._names = names or {}
        self._service = service
        self._deadline = deadline
        self._news: deque[News] = deque()
        self._there = asyncio.Event()
        self._failure: ApiError | None = None

    def start(
        self, requests: Sequence[Request], client: Client, *, shows_steps: bool = False, late: bool = False
    ) -> None:
        """Queue the requests; late ones had a place before, and come also where the server takes no new ones.

        Raises:
            ApiError: there is no room for them, or the server is being stopped.
        """
        forward_s = self._service.forward_s
        self.streams = [
            Stream(each, client, number, self, Decisions(forward_s, each.id), shows_steps)
            for number, each in enumerate(requests)
        ]
        self._service.open(self.streams, late=late)

    def take(self, news: News) -> None:
        """Something has come; called in the event loop."""
        self._news.append(news)
        self._there.set()

    def fail(self, error: ApiError) -> None:
        """Nothing more comes; called in the event loop."""
        self._failure = error
        self._there.set()

    async def news(self) -> AsyncIterator[News]:
        """What comes, until all samples are over; a reader that is slow gets several steps at once.

        Raises:
            ApiError: a sample failed, the deadline has passed, or the server is being stopped.
        """
        left = len(self.streams)
        try:
            while left:
                async with asyncio.timeout(self._left_s):
                    await self._there.wait()
                for each in self._next():
                    left -= each.answer is not None
                    error = self.streams[each.number].request.error
                    if each.answer is not None and error is not None:
                        raise self._service.api_error(error, self._names)
                    if each.answer is not None and each.answer.finish_reason == "cancelled":  # by nobody who reads this
                        raise self._failure or ApiError(500, "the server failed in the middle of an answer; ask again")
                    yield each
                if self._failure is not None and left and not self._news:
                    raise self._failure
        except TimeoutError:
            raise ApiError(504, "the answer took longer than this server allows; ask for fewer tokens") from None
        finally:
            self.close()

    @property
    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _next(self) -> list[News]:
        """What waits, as far as it is handled at once, one for each stream."""
        found: dict[int, News] = {}
        for _ in range(min(len(self._news), _MOST_NEWS)):
            each = self._news.popleft()
            before = found.setdefault(each.number, each)
            if before is not each:
                before.pieces.extend(each.pieces)
                before.steps.extend(each.steps)
        if not self._news:
            self._there.clear()
        return list(found.values())

    async def answers(self) -> list[Answer]:
        """The whole answers.

        Raises:
            ApiError: as for `news`.
        """
        async for _ in self.news():
            pass
        return [each.answer for each in self.streams if each.answer is not None]

    def close(self) -> None:
        """Cancel what is not over."""
        for stream in self.streams:
            if stream.answer is None:
                self._service.cancel(stream)


class Service:
    """Steps an engine in a thread of its own for requests that come from an event loop.

    Requests wait here, by client, and the engine gets as many as it runs together: of the clients with the fewest that
    run, one of that whose last turn was longest ago. A client of whom none runs takes a place, or memory, from the one
    who has most, if these are two or more: a request of that one waits again, and goes on exactly where it was. Which
    one follows from how often that happened to it, when it came and how many steps it made, and is chosen between
    steps, behind which all noise is new; so no answer's distribution depends on it.

    Args:
        engine: that answers; nobody else steps it.
        max_queue: most requests that wait.
        max_per_client: most open requests of a client; None is no limit.
        max_waiting_bytes: of what waiting requests hold beside their tokens, as pixels.
        forward_s: V of the target, for estimated speed-ups.
        shown_names: by what clients know names that errors may hold.
        hung_after_s: a step that takes longer hangs, as `trouble` says.

    Attributes:
        engine: as given.
        forms: prepares those of structured answers.
        forward_s: as given.
        listeners: each is called in the event loop with every stream that is over.
        draining: whether no more requests are taken.
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
        self._ending = False  # whether what is open is broken off, too
        self._max_queue = max_queue
        self._max_per_client = max_per_client
        self._max_waiting_bytes = max_waiting_bytes
        self._shown_names = shown_names
        self._hung_after_s = hung_after_s
        self._step_began: float | None = None  # None between steps
        self._device_lost: str | None = None  # by which error
        self._guard = threading.Lock()  # of what follows
        self._waiting: dict[Client, deque[Stream]] = {}
        self._open: dict[Client, int] = {}
        self._reserved = 0  # places of requests that are still being made
        self._served: dict[Client, int] = {}  # which of all requests that the engine got was its last
        self._admitted = 0
        self._running: list[Stream] = []
        self._work = threading.Event()
        self._stopped = self._ended = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mean_s = 1.0  # that a request runs
        self._following = 1.0  # share of answers behind whose end another request came at once, lately
        self._unawaited = 0  # ends of answers since one was waited behind

    def start(self) -> None:
        """Start the thread; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.listeners.append(self._note)
        run = contextvars.copy_context().run  # the caller's choice of threads for torch is the thread's
        self._thread = threading.Thread(target=run, args=(self._drive,), name="truedraft-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End what is open, and the thread."""
        self.abort()
        self._stopped = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    def api_error(self, error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
        """An error as clients are told of it, who know fields by some other names."""
        return ApiError.of(error, fields, self._shown_names)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive() and not self._ended

    @property
    def trouble(self) -> str | None:
        """Why no request would be answered until the process is started anew, in a few words; None where all is well.

        That the service drains is no trouble.
        """
        if not self.alive:
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
        """Requests that the engine has."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that it has not."""
        return sum(map(len, self._waiting.values()))

    def reserve(self, client: Client, count: int) -> None:
        """Keep places for requests that take long to make, until `give_back`.

        Raises:
            ApiError: as for `open`.
        """
        with self._guard:
            self._refuse_where_full(client, count)
            self._reserved += count
            self._open[client] = self._open.get(client, 0) + count

    def give_back(self, client: Client, count: int) -> None:
        """No longer keep places; who opens the requests then does so at once."""
        with self._guard:
            self._reserved -= count
            self._leave(client, count)

    def open(self, streams: Sequence[Stream], *, late: bool = False) -> None:
        """Queue the samples of one HTTP request, all or none; late ones also where the server takes no new ones.

        Raises:
            ApiError: the queue is full or holds too much, the client has too many open requests, or the server is being
                stopped.
        """
        client = streams[0].client
        with self._guard:
            self._refuse_where_full(client, len(streams), late=late)
            self._refuse_what_is_large(streams)
            self._waiting.setdefault(client, deque()).extend(streams)
            self._open[client] = self._open.get(client, 0) + len(streams)
        self._work.set()

    def _refuse_where_full(self, client: Client, count: int, *, late: bool = False) -> None:
        later = {"Retry-After": str(self._free_in_s())}
        if self.draining and (not late or self._ending):
            raise stopping(self._free_in_s())
        most = self._max_per_client
        ever = min(self._max_queue + self.engine.max_batch, count if most is None else most)
        if count > ever:
            raise ApiError(400, f"asks for {count} answers at once, and this server takes {ever}; ask for fewer")
        waiting, room = self.waiting + self._reserved, self.engine.max_batch - self.running
        if waiting + count > self._max_queue + max(room, 0):
            raise ApiError(
                429, f"{waiting} requests wait already; ask again in {later['Retry-After']} s", headers=later
            )
        if most is not None and self._open.get(client, 0) + count > most:
            raise ApiError(
                429, f"this API key has {self._open.get(client, 0)} requests open, of at most {most}", headers=later
            )

    def _refuse_what_is_large(self, streams: Sequence[Stream]) -> None:
        """Requests hold their pixels while they wait; what alone is too large waits where nothing else does."""
        held = _bytes_beside(stream for queue in self._waiting.values() for stream in queue)
        new = _bytes_beside(streams)
        if held and new and held + new > self._max_waiting_bytes:
            seconds = str(self._free_in_s())
            raise ApiError(
                429,
                f"pictures of {held} bytes wait already, of at most {self._max_waiting_bytes}, and these have {new}; "
                f"ask again in {seconds} s",
                headers={"Retry-After": seconds},
            )

    def _free_in_s(self) -> int:
        """Whole seconds until there may be room, by what requests took lately."""
        ahead = (self.waiting + 1) / self.engine.max_batch
        return min(max(math.ceil(ahead * self._mean_s), 1), _LONGEST_WAIT_S)

    def cancel(self, stream: Stream) -> None:
        """End a stream where it stands; any thread may call it."""
        with self._guard:
            queue = self._waiting.get(stream.client)
            if stream.waits and queue is not None and stream in queue:
                queue.remove(stream)
                if not stream.turn:
                    self._leave(stream.client, 1)
                    return
                stream.waits = False  # it had begun, so the engine ends it
                self._running.append(stream)
            if not stream.waits:  # guarded: it must not be made to wait again meanwhile
                self.engine.cancel(stream.request)
        self._work.set()

    def abort(self) -> None:
        """Take no more requests, and end those that are open with an error that says they may be asked again."""
        self.draining = self._ending = True
        self.forms.abort()
        with self._guard:
            streams = [stream for queue in self._waiting.values() for stream in queue] + list(self._running)
        for stream in streams:
            stream.answering.fail(stopping())
            self.cancel(stream)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is being made."""
        return not self.running and not self.waiting and not self._reserved

    def _leave(self, client: Client, count: int) -> None:
        """A client has fewer requests open; the guard is held."""
        left = self._open.get(client, 0) - count
        if left > 0:
            self._open[client] = left
        else:
            self._open.pop(client, None)
            if not self._waiting.get(client):
                self._waiting.pop(client, None)

    def _drive(self) -> None:
        try:
            while not self._stopped:
                self._admit()
                self._step_began = began = time.monotonic()
                try:
                    busy = self.engine.step()
                except Exception as error:  # a listener's, or a mistake of ours; requests fail on their own
                    _log.exception("a step failed")
                    self._look_at_device()
                    self._fail_all(self.api_error(error))
                    busy = False
                ended = self._hand_over()
                self._step_began = None
                if ended and busy:
                    self._linger(ended, _LINGERING * (time.monotonic() - began))
                if not busy and not self.waiting:
                    while not self._work.is_set() and self.engine.measure_ahead():
                        pass
                    if not self._work.wait(_IDLE_S):
                        self.engine.give_back()
                        self._work.wait()
                    self._work.clear()
        finally:  # where the thread ends by a mistake of ours nobody may wait for it
            self.draining = self._ended = True  # before anybody is told, who may ask for the health at once
            with self._guard:
                left = [stream for queue in self._waiting.values() for stream in queue] + self._running
            self._tell_all(left, stopping())

    def _look_at_device(self) -> None:
        """Something failed: see whether the device still computes, for after some errors of CUDA it never does."""
        try:
            torch.ones(1, device=self.engine.target.device).item()
        except torch.OutOfMemoryError:  # which passes
            return
        except Exception as error:
            self._device_lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _log.exception("the device computes no more")

    def _linger(self, ended: int, most_s: float) -> None:
        """Wait a moment for the requests that the clients of ended answers send next.

        They join the step that comes, and not the one behind it. Where such clients do not send any at once, the next
        step begins at once; now and then this is tried again.
        """
        self._unawaited += 1
        if self._following < _WORTH_WAITING and self._unawaited < _TRIED_AGAIN:
            return
        self._unawaited = 0
        end = time.monotonic() + min(most_s, _MOST_LINGERING_S)
        self._work.clear()
        while self.waiting < ended and not self._stopped and (left := end - time.monotonic()) > 0.0:
            self._work.wait(left)
            self._work.clear()
        self._following = _RECENT * self._following + (1.0 - _RECENT) * min(self.waiting / ended, 1.0)

    def _admit(self) -> None:
        """Give the engine as many requests as it runs together."""
        self._make_room()
        while len(self._running) < self.engine.max_batch:
            with self._guard:
                stream = self._next()
                if stream is None:
                    return
                stream.waits, stream.held_steps = False, 0
                stream.began_s = stream.began_s or time.monotonic()
                self._running.append(stream)
                self.engine.enqueue(stream.request)  # guarded: who cancels finds it waiting or the engine's

    def _make_room(self) -> None:
        """Where clients wait of whom nothing runs, one request of the client with most gives its place back."""
        running: dict[Client, list[Stream]] = {}
        short: list[Stream] = []  # those that the engine has no memory for
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
        # What of that client waits in the engine would go before those of others.
        for stream in (*(each for each in reversed(short) if each.client == out.client), out):
            self._pause(stream)

    def _pause(self, stream: Stream) -> None:
        """A request waits again, before the others of its client, unless it is over."""
        self.engine.pause(stream.request)
        with self._guard:
            if not stream.request.closed:  # by a client that left, too
                self._running.remove(stream)
                stream.waits = True
                self._waiting.setdefault(stream.client, deque()).appendleft(stream)

    def _next(self) -> Stream | None:
        """Whose turn it is; the guard is held."""
        queues = [queue for queue in self._waiting.values() if queue]
        if not queues:
            return None
        runs: dict[Client, int] = {}
        for stream in self._running:
            runs[stream.client] = runs.get(stream.client, 0) + 1
        served = self._served
        chosen = min(queues, key=lambda queue: (runs.get(queue[0].client, 0), served.get(queue[0].client, 0))).popleft()
        self._admitted += 1
        served[chosen.client] = chosen.turn = self._admitted
        return chosen

    def _note(self, record: StepRecord) -> None:
        for stream in self._running:
            stream.count(record)

    def _hand_over(self) -> int:
        """Hand the pieces of the last step to the event loop, in one call for all; returns how many answers ended."""
        handed: list[tuple[Stream, News]] = []
        over: list[Stream] = []
        for stream in self._running:
            request = stream.request
            pieces: list[Piece] = []
            while request.pieces:  # a thread that cancels may add the last one meanwhile
                pieces.append(request.pieces.pop(0))
            steps: list[StepItem] = []
            last = request.last_step
            if stream.shows_steps and last is not None and last is not stream.last_item:
                stream.last_item = last
                steps.append(last)
            if not pieces and not steps:
                continue
            news = News(stream.number, pieces, steps)
            if news.answer is not None:
                stream.answer = news.answer
                over.append(stream)
            handed.append((stream, news))
        if over:
            with self._guard:
                self._running = [stream for stream in self._running if stream.answer is None]
                for stream in over:
                    self._leave(stream.client, 1)
            if any(stream.request.error is not None for stream in over):
                self._look_at_device()
            for stream in over:
                self._mean_s = _RECENT * self._mean_s + (1.0 - _RECENT) * (time.monotonic() - stream.began_s)
        if handed and self._loop is not None:
            self._loop.call_soon_threadsafe(self._take, handed)
        return len(over)

    def _take(self, handed: Sequence[tuple[Stream, News]]) -> None:
        """In the event loop."""
        for stream, news in handed:
            stream.answering.take(news)
            if news.answer is not None:
                for listener in self.listeners:
                    listener(stream)

    def _fail_all(self, error: ApiError) -> None:
        streams = list(self._running)
        self._tell_all(streams, error)
        for stream in streams:
            self.engine.cancel(stream.request)

    def _tell_all(self, streams: Sequence[Stream], error: ApiError) -> None:
        """Nothing more comes of these."""
        for stream in streams:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(stream.answering.fail, error)


def _bytes_beside(streams: Iterable[Stream]) -> int:
    """What requests hold beside their tokens; samples of one prompt share it."""
    held = {id(value): value.nbytes for stream in streams for value in (stream.request.inputs or {}).values()}
    return sum(held.values())
