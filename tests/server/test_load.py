"""Load, faults and clients that misbehave: no other request suffers, and nothing is left over."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from server.conftest import Running, serving
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.core.stats import StepRecord
from truedraft.drafters import Drafter, DraftRequest, PromptLookup
from truedraft.drafters.prediction import with_own_drafts
from truedraft.engine import Request
from truedraft.engine.policy.decisions import Decisions
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.server.access import Client
from truedraft.server.errors import ApiError
from truedraft.server.service import ResponseHandle, Service, Stream

PROMPT = "def f("


def exchange(method: str, url: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read().decode()
    finally:
        connection.close()


def post(url: str, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and body of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, told, text = exchange("POST", url, path, data, {"Content-Type": "application/json", **headers})
    return status, told, json.loads(text)


def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    status, _, text = exchange("GET", url, path, None, headers)
    return status, text


def open_stream(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection over which an answer streams; nobody has read any of it."""
    return open_request(url, body | {"stream": True})


def open_request(url: str, body: dict[str, Any]) -> socket.socket:
    at, data = urlsplit(url), json.dumps(body).encode()
    connection = socket.create_connection((at.hostname or "", at.port or 80), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def wait_for(done: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def queued(service: Service, client: str, *prompts: Any, **params: Any) -> ResponseHandle:
    """The handle of a client's request that waits, for one answer of each prompt."""
    options = SamplingParams(**{"ignore_eos": True} | params)
    answering = ResponseHandle(service)
    answering.start([service.engine.prepare(prompt, options) for prompt in prompts or (PROMPT,)], Client(client))
    return answering


LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def test_many_clients_get_what_each_gets_alone(running: Running) -> None:
    plain = Engine(running.engine.target)
    prompts = [f"def f{number}(" for number in range(24)]
    expected = [plain.generate(prompt, SamplingParams(max_tokens=12)).text for prompt in prompts]
    bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda body: post(running.url, body)[2]["choices"][0]["text"], bodies)) == expected


def test_disconnects_free_their_slots(running: Running) -> None:
    for _ in range(100):
        connection = open_stream(running.url, LONG)
        connection.recv(100)
        connection.close()
    for _ in range(10):
        wait_for(lambda: running.service.is_idle)
        connection = open_request(running.url, LONG)
        wait_for(lambda: running.service.running > 0)
        connection.close()
    wait_for(lambda: running.service.is_idle)
    assert running.engine.check_idle() == []


def test_a_client_that_leaves_while_the_engine_gets_its_request(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = running.engine.enqueue
    ended: list[Stream] = []

    def slow(request: Request) -> None:
        time.sleep(0.2)
        enqueue(request)

    monkeypatch.setattr(running.engine, "enqueue", slow)
    listener = ended.append
    running.service.listeners.append(listener)
    try:
        connection = open_stream(running.url, LONG)
        wait_for(lambda: running.service.running > 0)
        connection.close()
        wait_for(lambda: len(ended) == 1)
    finally:
        running.service.listeners.remove(listener)
    assert ended[0].answer is not None and ended[0].answer.finish_reason == "cancelled"
    wait_for(lambda: running.service.is_idle)
    assert running.engine.check_idle() == []


def test_a_slow_reader_holds_nobody_up(running: Running) -> None:
    slow = open_stream(running.url, LONG | {"max_tokens": 400})
    began = time.monotonic()
    status, _, found = post(running.url, {"prompt": PROMPT, "max_tokens": 20, "temperature": 0})
    assert status == 200 and found["choices"][0]["text"]
    wait_for(lambda: running.service.is_idle)
    assert time.monotonic() - began < 60
    text = b""
    for _ in range(20):
        text += slow.recv(1)
    while not text.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        part = slow.recv(4096)
        assert part, "the stream ended early"
        text += part
    slow.close()


class Raising(PromptLookup):
    """Fails for requests that begin with one token."""

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        if any(request.tokens[0] == 7 for request in batch):
            raise RuntimeError("no idea")
        return super().propose(batch, budgets, noise)


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_drafter_that_raises_costs_no_answer(target: LanguageModel) -> None:
    plain = Engine(target)
    with serving(Engine(target, Raising(), controller="fixed")) as running, ThreadPoolExecutor(4) as pool:
        prompts = [[7, 8, 9], [8, 9, 10], [7, 1, 2], [9, 9, 9]]
        bodies = [{"prompt": prompt, "max_tokens": 10, "temperature": 0} for prompt in prompts]
        found = list(pool.map(lambda body: post(running.url, body)[2]["choices"][0]["text"], bodies))
        assert found == [plain.generate(prompt, SamplingParams(max_tokens=10)).text for prompt in prompts]


class Broken(LanguageModel):
    """A model whose logits are NaN behind one token; `model` answers otherwise."""

    BAD = 5

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        for name in ("name", "tokenizer", "vocab_size", "context_length", "eos_token_ids", "device", "dtype"):
            setattr(self, name, getattr(model, name))

    def new_cache(self) -> Any:
        return self._model.new_cache()

    def release_cache(self, cache: Any) -> None:
        self._model.release_cache(cache)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        found = self._model.forward(segments)
        logits, first = found.logits.clone(), 0
        for segment in segments:
            if int(segment.tokens[-1]) == self.BAD:
                logits[first : first + len(segment.rows)] = torch.nan
            first += len(segment.rows)
        return ForwardOutput(logits, found.hidden)


def test_nan_in_one_request_fails_that_one_alone(target: LanguageModel) -> None:
    with serving(Engine(Broken(target))) as running, ThreadPoolExecutor(2) as pool:
        bodies = [{"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in ([1, 2, 5], [1, 2, 3])]
        (bad, _, told), (good, _, found) = pool.map(lambda body: post(running.url, body), bodies)
        assert bad == 500 and "gave NaN or infinite logits" in told["error"]["message"]
        assert good == 200 and found["choices"][0]["text"]
        stream = open_stream(running.url, {"prompt": [1, 2, 5], "max_tokens": 8})
        text = b""
        while part := stream.recv(4096):
            text += part
            if b"0\r\n\r\n" in part:
                break
        assert b"gave NaN or infinite logits" in text and b"Traceback" not in text


def test_a_full_queue_says_when_to_come_again(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(max_batch=1), max_queue=2) as running:
        streams = []
        for _ in range(3):
            streams.append(open_stream(running.url, LONG))
            wait_for(lambda: running.service.running + running.service.waiting == len(streams))
        status, headers, told = post(running.url, {"prompt": PROMPT})
        assert status == 429 and int(headers["Retry-After"]) >= 1
        assert told["error"]["code"] == "rate_limit_exceeded" and "2 requests wait already" in told["error"]["message"]
        for stream in streams:
            stream.close()
        wait_for(lambda: running.service.is_idle)
        assert post(running.url, {"prompt": PROMPT, "max_tokens": 2})[0] == 200


def test_a_request_that_takes_too_long_is_ended(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(), request_timeout_s=0.3) as running:
        status, _, told = post(running.url, LONG)
        assert status == 504 and "longer than this server allows" in told["error"]["message"]
        wait_for(lambda: running.service.is_idle)
        assert post(running.url, {"prompt": PROMPT, "max_tokens": 1})[0] == 200


def test_a_request_that_follows_an_answer_joins_the_next_step(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon that step would begin by itself."""
    monkeypatch.setattr("truedraft.server.service._FOLLOWUP_SHARE", 1e6)
    monkeypatch.setattr("truedraft.server.service._MOST_FOLLOWUP_S", 10.0)
    service = Service(make_engine())
    steps = _steps_of(service.engine)

    async def run() -> None:
        long, first = (queued(service, "a", max_tokens=count) for count in (400, 3))
        service.start()
        await first.finished()
        before = len(steps)
        await queued(service, "a", max_tokens=1).finished()
        assert len(steps) == before + 1
        long.close()
        service.stop()

    asyncio.run(run())


def test_steps_are_counted_by_who_makes_them_and_long_answers_written_by_neither(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop walks through no steps, and makes no long answer."""
    where: dict[str, set[str]] = {}

    def noting(owner: type, name: str) -> None:
        made = getattr(owner, name)

        def noted(*given: Any) -> Any:
            where.setdefault(f"{owner.__name__}.{name}", set()).add(threading.current_thread().name)
            return made(*given)

        monkeypatch.setattr(owner, name, noted)

    noting(Decisions, "__call__")
    for module, owner in (("completions", "_Completion"), ("chat", "_Chat"), ("responses", "_Response")):
        noting(getattr(importlib.import_module(f"truedraft.server.{module}"), owner), "whole")
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300}
    for path, body in (
        ("completions", {"prompt": PROMPT, "max_tokens": 300}),
        ("chat/completions", chat),
        ("responses", {"input": PROMPT, "max_output_tokens": 300}),
    ):
        status, _, found = post(running.url, body | {"temperature": 0, "ignore_eos": True}, f"/v1/{path}")
        assert status == 200
        told = found["speculation"]
        assert sum(told["acceptance_histogram"]) == told["num_drafts"] > 0 and told["speedup"] is not None
    assert where.pop("Decisions.__call__") == {"truedraft-engine"}
    assert len(where) == 3 and all(each == {"truedraft-writes_0"} for each in where.values())


def test_of_a_step_nothing_is_kept_but_counts(make_engine: Callable[..., Engine]) -> None:
    service = Service(make_engine())
    alive: list[weakref.ref[StepRecord]] = []
    service.engine.listeners.append(lambda record: alive.append(weakref.ref(record)))

    async def run() -> Stream:
        answering = queued(service, "a", max_tokens=200)
        service.start()
        await answering.finished()
        service.stop()
        return answering.streams[0]

    stream = asyncio.run(run())
    assert len(alive) > 20 and sum(record() is not None for record in alive) <= 2
    assert stream.answer is not None
    counters = stream.answer.stats
    assert sum(place * count for place, count in enumerate(stream.accepted)) == counters.accepted_tokens
    assert sum(each.accepted for each in stream.decisions.tallies.values()) == counters.accepted_tokens


def test_a_reader_that_was_slow_gets_a_bounded_part_at_once(make_engine: Callable[..., Engine]) -> None:
    service = Service(make_engine())

    async def run() -> list[int]:
        answering = queued(service, "a", PROMPT, PROMPT, max_tokens=300)
        service.start()
        while any(stream.answer is None for stream in answering.streams):
            await asyncio.sleep(0.01)
        got = [len(news.pieces) async for news in answering.news()]
        service.stop()
        return got

    got = asyncio.run(run())
    assert max(got) <= 64 and len(got) >= 3


def test_who_never_sends_another_request_is_not_waited_for(make_engine: Callable[..., Engine]) -> None:
    service = Service(make_engine())
    for _ in range(40):
        service._wait_for_followups(1, 1e-6)
    waits = []
    for _ in range(32):
        before = service._following
        service._wait_for_followups(1, 1e-6)
        waits.append(service._following != before)
    assert sum(waits) == 2


def test_limits_of_a_client(make_engine: Callable[..., Engine]) -> None:
    service = Service(make_engine(), max_per_client=2)

    async def run() -> None:
        first = queued(service, "a", PROMPT, PROMPT, max_tokens=2)
        with pytest.raises(ApiError, match="this API key has 2 requests open, of at most 2"):
            queued(service, "a", max_tokens=2)
        other = queued(service, "b", max_tokens=2)
        service.start()
        for each in (first, other):
            await each.finished()
        await queued(service, "a", PROMPT, PROMPT, max_tokens=2).finished()
        service.stop()

    asyncio.run(run())


def test_a_server_that_is_stopped_ends_what_is_open(make_engine: Callable[..., Engine]) -> None:
    """What is open gets an answer or an error that says it may be asked again; nothing hangs."""
    with serving(make_engine(max_batch=2)) as running, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(post, running.url, LONG) for _ in range(4)]
        wait_for(lambda: running.service.running == 2 and running.service.waiting == 2)
        running.service._loop.call_soon_threadsafe(running.service.abort)  # type: ignore[union-attr]
        results = [each.result(30) for each in asked]
        assert get(running.url, "/ready")[0] == 503
        assert post(running.url, {"prompt": PROMPT})[0] == 503
    assert all(status == 503 and "ask again" in told["error"]["message"] for status, _, told in results)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.plants_failures
def test_a_step_that_fails_is_told_as_a_failure(
    make_engine: Callable[..., Engine], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_engine()) as running:
        step, fails = running.engine.step, threading.Event()

        def failing() -> bool:
            if fails.is_set():
                fails.clear()
                raise RuntimeError("planted")
            return step()

        monkeypatch.setattr(running.engine, "step", failing)
        body = LONG | {"stream": stream}
        with ThreadPoolExecutor(1) as pool:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            asked = pool.submit(exchange, "POST", running.url, "/v1/completions", data, headers)
            wait_for(lambda: running.service.running > 0)
            fails.set()
            text = asked.result(60)[2]
        assert "the server failed (RuntimeError)" in text and "planted" not in text
        assert '"finish_reason":"length"' not in text.replace(" ", "")
        assert post(running.url, {"prompt": PROMPT, "max_tokens": 2})[0] == 200


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_that_died(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_engine(max_batch=1)) as running:
        dies, hand_over = threading.Event(), Service._hand_over

        def dying(self: Service) -> int:
            if dies.is_set():
                raise RuntimeError("planted")
            return hand_over(self)

        monkeypatch.setattr(Service, "_hand_over", dying)
        body = LONG
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(post, running.url, body) for _ in range(3)]
            wait_for(lambda: running.service.running > 0 and running.service.waiting == 2)
            dies.set()
            assert [each.result(60)[0] for each in asked] == [503] * 3
        assert post(running.url, body)[0] == 503
        for path in ("/health", "/ready"):
            status, told = get(running.url, path)
            assert status == 503 and "the thread that steps the engine has ended" in told


def test_clients_that_come_back_do_not_pass_one_that_waits(make_engine: Callable[..., Engine]) -> None:
    service = Service(make_engine(max_batch=1))

    async def run() -> str:
        for name in "cccccab":
            queued(service, name, max_tokens=2)
        order = ""
        for _ in range(9):
            stream = service._next()
            assert stream is not None
            order += stream.client.name
            service._leave(stream.client, 1)
            if stream.client.name != "c":
                queued(service, stream.client.name, max_tokens=2)
        return order

    assert asyncio.run(run()) == "cabcabcab"


def test_more_samples_than_ever_fit_are_refused_for_good(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(), max_per_client=2) as running:
        status, headers, told = post(running.url, {"prompt": PROMPT, "max_tokens": 2, "n": 3})
        assert status == 400 and "asks for 3 answers at once, and this server takes 2" in told["error"]["message"]
        assert headers["Retry-After"] is None


def _steps_of(engine: Engine) -> list[StepRecord]:
    """The steps that an engine makes from now on."""
    steps: list[StepRecord] = []
    engine.listeners.append(steps.append)
    return steps


async def _begun(service: Service, answering: ResponseHandle) -> None:
    while any(stream.request.cache is None for stream in answering.streams):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("short", "options"),
    [("places", {"temperature": 1.0, "seed": 7}), ("memory", {"temperature": 0.0})],
    ids=["places-seeded", "memory-greedy"],
)
def test_a_client_of_whom_nothing_runs_takes_a_place(drafter: Drafter, short: str, options: dict[str, Any]) -> None:
    """Of another who has several, in turns, and whose answers stay what they are; also where memory is short."""
    target = load_model("embedded:target")  # whose pool keeps nothing of other tests
    prompts = [f"def f{number}(" for number in range(3)]
    params = SamplingParams(max_tokens=120, ignore_eos=True, **options)
    plain = Engine(target, prefix_cache_bytes=0)
    expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    limits: dict[str, Any] = (
        {"max_batch": 3} if short == "places" else {"max_batch": 8, "max_cache_bytes": int(1.3 * plain.cache_bytes)}
    )
    engine = Engine(target, with_own_drafts(drafter), controller="fixed", **limits)
    service = Service(engine)
    steps = _steps_of(engine)

    async def run() -> list[list[int]]:
        many = queued(service, "many", *prompts, max_tokens=120, **options)
        pieces: list[list[int]] = [[] for _ in prompts]
        service.start()

        async def read() -> None:
            async for news in many.news():
                pieces[news.stream.number] += [token for piece in news.pieces for token in piece.token_ids]

        reading = asyncio.create_task(read())
        for _ in range(2):
            if short == "places":
                await _begun(service, many)
            while len(steps) < 4:
                await asyncio.sleep(0.001)
            before = len(steps)
            await queued(service, "few", max_tokens=4).finished()
            assert len(steps) - before < 64 and all(stream.answer is None for stream in many.streams)
        await reading
        service.stop()
        assert pieces == [stream.answer.token_ids for stream in many.streams if stream.answer is not None]
        if short == "places":
            taken = sorted(stream.request.preemptions for stream in many.streams)
            assert taken == [0, 1, 1], "one for each, and by turns"
        return pieces

    assert asyncio.run(run()) == expected
    assert engine.preemptions > 0 and engine.check_idle() == [] and service.is_idle


def test_places_are_not_taken_at_each_step(make_engine: Callable[..., Engine]) -> None:
    """Of one who has a single one never, and of a request that gave its own only after some of its answer."""
    engine = make_engine(max_batch=2)
    service = Service(engine)
    steps = _steps_of(engine)

    async def run() -> None:
        own = queued(service, "many", PROMPT, PROMPT, max_tokens=200)
        service.start()
        await _begun(service, own)
        held = [stream.request for stream in own.streams]
        for number in range(5):
            await queued(service, f"few{number}", max_tokens=1).finished()
        assert 1 <= sum(request.preemptions for request in held) <= 2 + 2 * len(steps) // 32
        own.close()
        single, other = queued(service, "a", max_tokens=200), queued(service, "b", max_tokens=200)
        await _begun(service, single)
        await _begun(service, other)
        await queued(service, "c", max_tokens=1).finished()
        assert not single.streams[0].request.preemptions and not other.streams[0].request.preemptions
        single.close()
        other.close()
        service.stop()

    asyncio.run(run())
    assert engine.check_idle() == [] and service.is_idle


def test_who_gave_its_place_and_leaves_is_forgotten(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_batch=2)
    service = Service(engine)

    async def run() -> None:
        over = list[Stream]()
        service.listeners.append(over.append)
        many = queued(service, "many", PROMPT, PROMPT, max_tokens=1500)
        service.start()
        await _begun(service, many)
        few = queued(service, "few", max_tokens=1500)
        await _begun(service, few)
        assert sum(stream.waits for stream in many.streams) == 1
        many.close()
        while len(over) < 2:
            await asyncio.sleep(0.001)
        assert {stream.answer.finish_reason for stream in over if stream.answer is not None} == {"cancelled"}
        few.close()
        while not service.is_idle:
            await asyncio.sleep(0.001)
        service.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert engine.check_idle() == []


def test_one_key_does_not_lock_out_another(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("many secret-a\nfew secret-b\n")
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    bodies = [body | {"prompt": f"def f{number}("} for number in range(3)]
    with serving(make_engine(max_batch=3), api_key_file=keys) as running, ThreadPoolExecutor(4) as pool:
        own = {"Authorization": "Bearer secret-a"}
        alone = [post(running.url, each, **own)[2]["choices"][0]["text"] for each in bodies]
        asked = [pool.submit(post, running.url, each, **own) for each in bodies]
        wait_for(lambda: running.service.running == 3)
        answer = post(running.url, {"prompt": PROMPT, "max_tokens": 8}, Authorization="Bearer secret-b")
        assert answer[0] == 200 and not any(each.done() for each in asked)
        assert [each.result(60)[2]["choices"][0]["text"] for each in asked] == alone
        assert running.engine.preemptions == 1


def test_buffers_go_back_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the system, which the C library is told; and the next answer is the same."""
    engine = Engine(load_model("embedded:target"))
    steps, held_then = _steps_of(engine), list[int]()  # bytes, after the first step
    told = "truedraft.engine.memory.return_freed_memory"
    monkeypatch.setattr(told, lambda: held_then.extend([engine.cache_bytes] if steps else []))
    monkeypatch.setattr("truedraft.server.service._IDLE_S", 0.01)
    with serving(engine) as running:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        first = post(running.url, body)[2]["choices"][0]["text"]
        wait_for(lambda: 0 in held_then)
        assert engine.cache_bytes == 0
        assert post(running.url, body)[2]["choices"][0]["text"] == first
