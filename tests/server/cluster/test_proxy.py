"""What a request is told in Ray's proxy when its replica ends; Ray's proxy is played by a few lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from truedraft.server.cluster.proxy import middlewares


def asked(path: str, messages: Sequence[Message]) -> Any:
    """The answer of a proxy that sends these messages and says nothing more."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    (middleware,) = middlewares()
    return TestClient(middleware.cls(proxy)).post(path, json={})


def start(status: int, kind: str, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode()), *headers]}


def body(text: str, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def test_whole_answers_pass_as_they_are() -> None:
    for status in (200, 503):
        reply = asked("/v1/completions", [start(status, "application/json"), body('{"a":', more=True), body("1}")])
        assert (reply.status_code, reply.text) == (status, '{"a":1}')


def test_a_request_without_an_answer_is_told_to_ask_again() -> None:
    for path, reads in (("/v1/completions", ("error", "code")), ("/v1/messages", ("error", "type"))):
        reply = asked(path, [])
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()[reads[0]][reads[1]] in ("server_unavailable", "overloaded_error")


@pytest.mark.parametrize(
    ("path", "event", "read"),
    [
        ("/v1/chat/completions", None, lambda told: told["error"]["code"] == "server_unavailable"),
        ("/v1/messages", "error", lambda told: told["error"]["type"] == "overloaded_error"),
        ("/v1/responses", "error", lambda told: told["type"] == "error" and told["code"] == "server_unavailable"),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error(path: str, event: str | None, read: Any) -> None:
    reply = asked(path, [start(200, "text/event-stream; charset=utf-8"), body('data: {"cut', more=True)])
    first, last = [each for each in reply.text.split("\n\n") if each]
    assert first == 'data: {"cut'  # an event of its own, which no JSON is
    named = {} if event is None else {"event": event}
    lines = dict(line.split(": ", 1) for line in last.split("\n"))
    told = json.loads(lines.pop("data"))
    assert lines == named and read(told) and "ask again" in json.dumps(told)


def test_errors_of_rays_have_the_form_of_ours() -> None:
    for status, headers in ((429, [(b"retry-after", b"7")]), (503, [])):
        reply = asked(
            "/v1/completions", [start(status, "text/plain; charset=utf-8", *headers), body("Request dropped")]
        )
        assert reply.status_code == status and "ask again" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == ("7" if headers else "1")
