"""`truedraft chat --url` with servers that are none, answer badly or send it on: what came is said, and what to do."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cli.tiny import Result, Run
from measure.peers.scripted_server import Asked, Made, ScriptedServer, models, scripted

EVENTS = {"Content-Type": "text/event-stream"}
HTML = Made(b"<html>\n<p>hello</p></html>", headers={"Content-Type": "text/html"})
Talk = Callable[..., Result]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as found:
        found.handlers["/v1/models"] = models("vllm", "m")
        yield found


@pytest.fixture
def talk(run: Run, monkeypatch: pytest.MonkeyPatch) -> Talk:
    def call(url: str, *words: str, key: str = "secret") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        monkeypatch.setenv("TRUEDRAFT_API_KEY", key)
        return run("chat", "--url", url, *words)

    return call


def events(*data: Any, end: bytes = b"data: [DONE]\n\n") -> Made:
    lines = [each if isinstance(each, bytes) else json.dumps(each, ensure_ascii=False).encode() for each in data]
    return Made(b"".join(b"data: " + line + b"\n\n" for line in lines) + end, headers=EVENTS)


def said(text: Any, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def answering(server: ScriptedServer, made: Made) -> None:
    server.handlers["/v1/chat/completions"] = lambda _: made


def test_an_answer_comes_whole_however_it_is_sent(server: ScriptedServer, talk: Talk) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7}, "speculation": {"mean_acceptance_length": 2.5}}
    odd = [{"choices": None}, {"choices": [5, {"delta": None}]}, {"choices": [], "usage": 3}, said(["x"]), said(None)]
    odd.append({"choices": [], "usage": {"completion_tokens": 10**400}})
    for made in (
        events(said("a\u2028b "), said("é"), said("", "stop"), usage),
        events(said("a\u2028b "), said("é", "length"), usage, end=b""),  # without [DONE]
        events(said("a\u2028b "), said("é"), usage, end=b"data: [DONE]\n"),  # without a reason
        events(*odd, said("a\u2028b "), said("é"), usage, *odd),
        Made(
            b": alive\r\n\r\nevent: x\r\nid: 1\r\nretry: 5\r\ndata:"
            + json.dumps(said("a\u2028b é", "stop")).encode().replace(b', "', b',\r\ndata: "')
            + b"\r\n\r\ndata: "
            + json.dumps(usage).encode()
            + b"\r\n\r\ndata: [DONE]\r\n\r\n",
            headers=EVENTS,
        ),
    ):
        answering(server, made)
        done = talk(server.url, "--json").ok
        (turn,) = done.record["turns"]
        assert (turn["text"], turn["tokens"], turn["tokens_per_call"]) == ("a\u2028b é", 7, 2.5)


BROKEN = [
    (Made({"error": {"message": "too long"}}, 400), "answered 400 ('too long')"),
    (Made(b"out of order", 500, {"Content-Type": "text/plain"}), "answered 500 ('out of order')"),
    (Made(b"busy", 429), "answered 429 ('busy')"),
    (Made(b"", 401), "the key was refused: 401; give one by the environment variable TRUEDRAFT_API_KEY"),
    (Made({"detail": "Not Found"}, 404), "has no /v1/chat/completions, or not this model: 404"),
    (HTML, "answered no stream of events but text/html ('<html>'); is this the address of an API?"),
    (Made({"choices": []}), "answered no stream of events but application/json ('{"),
    (Made({"choices": []}, headers=EVENTS), "answered no stream of events but text/event-stream ('{"),
    (Made({"error": {"message": "no room"}}), "answered no stream of events but application/json ('no room')"),
    (Made(b"\x00\xff\x1b[2J" * 50, headers=EVENTS), "answered no stream of events but text/event-stream ('\\x00"),
    (events({"error": {"message": "no room"}}), "answered an error ('no room')"),
    (events(said("a"), {"error": "no room"}), "answered an error ('no room')"),
    (events(b"{half"), "sent an event that is no JSON object ('{half')"),
    (events([1]), "sent an event that is no JSON object ('[1]')"),
    (events(b"[" * 100_000), "sent an event that is no JSON object ('[["),
    (events(said("a"), end=b""), "ended its answer in the middle; ask again"),
    (events(said("a"), end=b'data: {"choices": [{'), "ended its answer in the middle; ask again"),
    (Made(events(said("a"), said("b")).content, headers=EVENTS, cut=60), "ended its answer in the middle; ask again"),
    (events(), "answered nothing; is this the address of an API?"),
    (Made(b"", headers=EVENTS), "ended its answer in the middle; ask again"),
    (Made(b"", 302, {"Location": "/v1/other"}), "sends us on to '/v1/other'; give that address"),
]


def test_answers_that_are_none(server: ScriptedServer, talk: Talk) -> None:
    server.handlers["/v1/other"] = models("vllm", "m")
    for made, message in BROKEN:
        answering(server, made)
        done = talk(server.url, "--json")
        assert done.status == done.record["status"] == 1, message
        assert f"error: {server.url}" in done.err and message in done.err and "please report" not in done.err
        assert done.record["turns"] == [] and "\x1b" not in done.err


LISTS = [
    (Made({"data": []}), "lists no model at /v1/models; load one there, or correct the address"),
    (Made({"data": [None, {}, {"id": 5}]}), "lists no model at /v1/models"),
    (Made({"data": {"id": "m"}}), "lists no model at /v1/models"),
    (Made({}), "lists no model at /v1/models"),
    (HTML, "answered no JSON object but text/html ('<html> <p>hello</p></html>'); is this the address of an API?"),
    (Made(b"", 301, {"Location": "/v1/models"}), "cannot be asked"),
    (Made(b"", 301), "sends us on to 'nowhere'"),
    (Made(b"", 307, {"Location": "ftp://x/"}), "cannot be asked"),
]


def test_servers_that_serve_nothing(server: ScriptedServer, talk: Talk) -> None:
    for made, message in LISTS:
        server.handlers["/v1/models"] = lambda _, made=made: made
        done = talk(server.url)
        assert done.status == 2 and message in done.err and "please report" not in done.err
        assert len(done.err.strip().splitlines()) == 1


def test_addresses_that_are_none(talk: Talk) -> None:
    for url in ("localhost:8000", "127.0.0.1", "http://", "http://[::1", "ftp://x", "http://127.0.0.1:99999", "", "5"):
        done = talk(url)
        assert done.status == 2 and "please report" not in done.err and "such as http://127.0.0.1:8000" in done.err


def test_where_nobody_answers_and_keys_that_are_none(talk: Talk) -> None:
    done = talk("http://127.0.0.1:9")
    assert (
        done.status == 2 and "nothing answers at http://127.0.0.1:9" in done.err and "correct the address" in done.err
    )
    for url in ("http://a..b", f"http://{'x' * 100}", "http://a b", "http://no.such.host.invalid"):
        done = talk(url)
        assert done.status == 2 and "please report" not in done.err, done.err
    talk("http://127.0.0.1:9", key="ä").refused("TRUEDRAFT_API_KEY holds what no HTTP header can")


def test_a_host_that_we_are_sent_on_to_is_named(server: ScriptedServer, talk: Talk) -> None:
    server.handlers["/v1/models"] = lambda _: Made(b"", 307, {"Location": "http://127.0.0.1:9/v1/models"})
    talk(server.url).refused("nothing answers at http://127.0.0.1:9 (")


def test_a_model_of_the_servers_is_chosen_and_what_it_decides_is_refused(server: ScriptedServer, talk: Talk) -> None:
    server.handlers["/v1/models"] = models("vllm", "m", "n")
    answering(server, events(said("hi", "stop")))
    for words, name in (((), "m"), (("--model", "n"), "n")):
        done = talk(server.url, "--json", *words)
        assert done.status == 0 and done.record["model"] == name, done.err
        assert done.record["turns"][0]["tokens"] is None and " tokens " not in done.err
        assert [each.body["model"] for each in server.asked if each.path.endswith("completions")][-1] == name
    for words, message in (
        (("--model", "nope"), "--model 'nope' is none of the models that"),
        (("--drafter", "none"), "--drafter is for a model here, and --url talks to one that a server has"),
        (("--rule", "block"), "--rule is for a model here"),
        (("--show-drafts",), "--show-drafts is for a model here"),
    ):
        talk(server.url, *words).refused(message)


def test_another_host_gets_no_key(server: ScriptedServer, talk: Talk) -> None:
    with scripted() as other:
        for path in ("/v1/models", "/v1/chat/completions"):
            server.handlers[path] = lambda asked: Made(b"", 307, {"Location": f"/there{asked.path}"})
            server.handlers[f"/there{path}"] = lambda asked: Made(b"", 307, {"Location": f"{other.url}{asked.path}"})
        other.handlers["/there/v1/models"] = models("vllm", "m")
        other.handlers["/there/v1/chat/completions"] = lambda _: events(said("hi", "stop"))
        done = talk(server.url, "--json")
        assert done.status == 0 and done.record["turns"][0]["text"] == "hi", done.err

        def keys(asked: list[Asked]) -> set[str | None]:
            return {each.headers.get("Authorization") for each in asked}

        assert len(server.asked) == 4 and keys(server.asked) == {"Bearer secret"}
        assert len(other.asked) == 2 and keys(other.asked) == {None}
