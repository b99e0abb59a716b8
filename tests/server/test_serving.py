"""From an engine to a server that listens: what is done before it does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

import server.conftest  # noqa: F401 - skips without what serving needs
from truedraft import Engine
from truedraft.core.stats import StepRecord
from truedraft.errors import TruedraftError
from truedraft.server import ServerOptions, application, serve, serving
from truedraft.server.serving import bound_socket


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

    prepare = engine.prepare
    monkeypatch.setattr(
        engine,
        "prepare",
        lambda *a, **k: (greedy.append(a[1].temperature == 0.0), scopes.append(k["scope"]), prepare(*a, **k))[2],
    )
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
