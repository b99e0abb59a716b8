"""From an engine to a server that listens: what is done before it does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

import server.conftest  # noqa: F401 - skips without what serving needs
from truedraft import Engine
from truedraft.core.stats import StepRecord
from truedraft.errors import TruedraftError
from truedraft.server import ServerOptions, application, serve, serving
from truedraft.server.options import bound_socket
from truedraft.server.serving import Connections


def test_a_server_has_answered_before_anybody_can_ask(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = bound_socket("127.0.0.1", 0)
    address = free.getsockname()
    free.close()
    engine, order, greedy, scopes = make_engine(), [], [], []

    def step(record: StepRecord) -> None:
        order.append("answers")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5).close()

    def run(listener: Any, sockets: list[socket.socket]) -> None:
        order.append("listens")
        listener._ready()
        sockets[0].close()

    def noted(prompt: Any, params: Any, **how: Any) -> Any:
        greedy.append(params.temperature == 0.0)
        scopes.append(how["scope"])
        return prepare(prompt, params, **how)

    prepare = engine.prepare
    monkeypatch.setattr(engine, "prepare", noted)
    monkeypatch.setattr(serving._Server, "run", run)
    engine.listeners.append(step)
    options = ServerOptions(port=address[1])
    app, service = application(engine, options, "tiny")
    serve(app, service, options, lambda _: order.append("ready"))
    assert order[-2:] == ["listens", "ready"] and order.count("answers") > 2, order
    assert greedy == [True, False], "both ways of drawing are warm"
    assert scopes == [engine, engine], "drafters that keep texts draft for no client by them"
    assert engine.check_idle() == []


def test_a_model_that_cannot_answer_is_not_served(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fail(*_: Any, **__: Any) -> Any:
        raise TruedraftError("no room")

    monkeypatch.setattr(engine, "stream", fail)
    monkeypatch.setattr(serving._Server, "run", lambda *_, **__: pytest.fail("it listens"))
    options = ServerOptions(port=0)
    app, service = application(engine, options, "tiny")
    with pytest.raises(TruedraftError, match="no room"):
        serve(app, service, options, lambda _: None)


def test_the_log_says_how_far_it_is_with_getting_ready(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine, "make_ready", lambda progress: progress(0.25, "tiny"))
    caplog.set_level("INFO", "truedraft.server")
    serving.warm_up(engine)
    assert "making ready" not in caplog.text
    monkeypatch.setattr(serving, "_LOG_PROGRESS_S", 0.0)
    serving.warm_up(engine)
    assert "making ready: 25 %, tiny" in caplog.text


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Half:"


@contextlib.contextmanager
def listening(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, **asked: Any
) -> Iterator[tuple[str, int]]:
    """A server as the command starts it, and its address."""
    monkeypatch.setattr(serving, "warm_up", lambda _: None)
    made: list[serving._Server] = []
    run = serving._Server.run
    monkeypatch.setattr(serving._Server, "run", lambda server, **given: (made.append(server), run(server, **given)))
    options, there = ServerOptions(port=0, **asked), threading.Event()
    address: list[str] = []
    app, service = application(make_engine(), options, "tiny")
    thread = threading.Thread(
        target=serve, args=(app, service, options, lambda told: (address.append(told), there.set())), daemon=True
    )
    thread.start()
    try:
        assert there.wait(60)
        at = urlsplit(address[0])
        assert at.hostname is not None and at.port is not None
        yield at.hostname, at.port
    finally:
        made[0].should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    ("begun", "told"),
    [
        (b"", b""),
        (HALF, b""),
        (HALF + b" 1\r\nContent-Length: 99\r\n\r\n{", b"408 Request Timeout"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b"200 OK"),
        (b"GET /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1", b"404 Not Found"),
    ],
    ids=["nothing", "half a head", "half a body", "half a second head", "a body that nobody reads"],
)
def test_requests_that_do_not_come_in_time_are_closed(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, begun: bytes, told: bytes
) -> None:
    with (
        listening(make_engine, monkeypatch, head_timeout_s=0.3, body_timeout_s=0.3) as address,
        socket.create_connection(address, timeout=30) as half,
    ):
        half.sendall(begun)
        answer = all_of(half)
    assert told in answer and bool(told) == bool(answer)


def test_the_oldest_that_has_not_asked_makes_room(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whose answers are being written stay; where all are, a further one is refused."""
    body = b'{"prompt": "def f(", "max_tokens": 1900, "ignore_eos": true, "stream": true}'
    whole = HALF + b" 1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with listening(make_engine, monkeypatch, max_connections=2) as address, contextlib.ExitStack() as held:

        def connect(begun: bytes) -> socket.socket:
            made = held.enter_context(socket.create_connection(address, timeout=30))
            made.sendall(begun)
            return made

        first, half = connect(whole), connect(HALF)
        assert first.recv(12) == b"HTTP/1.1 200"
        second = connect(whole)
        assert all_of(half) == b"" and second.recv(12) == b"HTTP/1.1 200"
        assert b"503 Service Unavailable" in all_of(connect(HALF))


def test_errors_of_accepting_are_told_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    connections, loop = Connections(2, 1.0), asyncio.new_event_loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for _ in range(1000):
        connections.failed(loop, context)
    assert len(caplog.records) == 1 and "Too many open files" in caplog.text
    connections.failed(loop, {"message": "something else"})
    assert len(caplog.records) == 2
    loop.close()
