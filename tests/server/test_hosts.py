"""By which names a server is asked, and lengths of bodies that are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_load import get, post
from truedraft import Engine
from truedraft.errors import OptionError
from truedraft.server import ServerOptions, application
from truedraft.server.access import Hosts
from truedraft.server.errors import ApiError

LOOPBACK = (
    "localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "localhost.:8000", "localhost:", "a.localhost:8000",
    "127.0.0.1", "127.0.0.1:8000", "127.9.8.7:80", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000",
    "[::ffff:127.0.0.1]",
    "::1",
)  # fmt: skip
OTHERS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example:80@localhost",
    "localhost@evil.example", "localhost:8000:9", "localhost:x", "[::1", "[localhost]", "[::1]x", "[::2]:8000",
    "128.0.0.1", "0.0.0.0:8000", "localhost/", "local host", "notlocalhost", "é.example", "x" * 5000,
)  # fmt: skip


def test_on_loopback_only_its_names_and_allowed_ones_are_answered() -> None:
    for bound in ("127.0.0.1", "localhost", "::1", "127.0.0.2", "127.1", "no.such.host.invalid"):
        closed, opened = Hosts(bound), Hosts(bound, ("Chat.Example.com:443", "10.1.2.3", "[fe80::1]", "::2"))
        for name in LOOPBACK:
            closed.check([name])
            opened.check([name])
        for name in OTHERS:
            with pytest.raises(ApiError) as refused:
                closed.check([name])
            assert refused.value.status == 421 and len(refused.value.message) < 400
        for name in ("chat.example.com", "CHAT.example.com.:8443", "10.1.2.3:8000", "[fe80::1]:8000", "[0::2]"):
            opened.check([name])
        for given in ([], [""], ["localhost", "evil.example"], ["localhost", "localhost"]):
            with pytest.raises(ApiError) as refused:
                opened.check(given)
            assert refused.value.status == 400


def test_elsewhere_any_name_is_answered_unless_some_are_allowed() -> None:
    for name in (*LOOPBACK, *OTHERS):
        Hosts("0.0.0.0").check([name])
        Hosts("127.0.0.1", ("*",)).check([name])
    Hosts("::").check([])
    some = Hosts("0.0.0.0", ("chat.example.com",))
    some.check(["chat.example.com:8000"])
    some.check(["localhost"])
    for name in ("evil.example", "192.168.1.2:8000"):
        with pytest.raises(ApiError):
            some.check([name])
    for wrong in ("", "http://chat.example.com", "a b", "[::1", "a:b"):
        with pytest.raises(OptionError, match="allowed_host is no name of a host"):
            Hosts("127.0.0.1", (wrong,))


def test_pages_that_rebind_their_name_reach_nothing(make_engine: Callable[..., Engine], running: Running) -> None:
    evil = {"Host": "evil.example"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        status, _, told = post(running.url, {"prompt": "x"}, path, **evil)
        assert status == 421 and told["error"]["code"] == "host_not_allowed"
        assert "--allowed-host evil.example" in told["error"]["message"]
    for path in ("/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
        assert get(running.url, path, **evil)[0] == 421
        assert get(running.url, path, Host="[::1]:8000")[0] == (404 if path == "/nothing" else 200)
    with serving(make_engine(), allowed_host=("evil.example",), cors_origin=("https://other.example",)) as opened:
        assert get(opened.url, "/v1/models", **evil)[0] == 200
        status, headers, _ = post(opened.url, {}, Host="x.example", Origin="https://other.example")
        assert status == 421 and headers["Access-Control-Allow-Origin"] == "https://other.example"


def asked(app: Any, *headers: tuple[bytes, bytes]) -> tuple[int, str]:
    """Status and message of an application's answer, for headers that no server of ours lets through."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "query_string": b""}
    asyncio.run(app(scope | {"headers": list(headers), "scheme": "http", "root_path": ""}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]


def test_lengths_that_are_none_and_hosts_that_are_missing(make_engine: Callable[..., Engine]) -> None:
    app, _ = application(make_engine(), ServerOptions(), "tiny")
    for length in ("-5", "+5", "x", "1_0", " 5", "5, 5", "", "0x10", "²", "5.0"):
        status, told = asked(app, (b"host", b"localhost"), (b"content-length", length.encode("latin-1")))
        assert status == 400 and told.startswith("Content-Length is no number of bytes"), length
    assert asked(app, (b"host", b"localhost"), (b"content-length", b"9" * 5000))[0] == 413
    assert asked(app)[0] == 400
    assert asked(app, (b"host", b"evil.example"))[0] == 421
