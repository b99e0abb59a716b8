"""Servers that are down, slow, busy or broken: each is one sentence, and its neighbours are answered."""

from __future__ import annotations

import email.utils
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx2
import pytest

from measure.peers.scripted_server import Asked, Made, ScriptedServer, StillClock, completion, models
from truedraft import SamplingParams
from truedraft.errors import PeerError
from truedraft.measure.peers import Endpoint, Patience, Question, Reply, calling
from truedraft.measure.peers.calling import Caller
from truedraft.measure.peers.recovery import ReceivedAnswer, Recovery
from truedraft.text import Tokenizer

GOOD, BAD = (5, 6), (7, 8)  # prompts
ANSWER = (9, 10)


def patience(clock: StillClock, **more: Any) -> Patience:
    return Patience(clock=clock, jitter=lambda: 1.0, **more)


def script(server: ScriptedServer, bad: Callable[[Asked, int], Made]) -> None:
    """A server of vLLM's kind that answers well, but for one prompt: what is made of its n-th request."""
    counted = [0]

    def answer(asked: Asked) -> Made:
        if tuple(asked.body["prompt"]) == BAD:
            counted[0] += 1
            return bad(asked, counted[0])
        return good(asked)

    server.handlers["/v1/models"] = models("vllm", "m")
    server.handlers["/v1/completions"] = answer


def good(asked: Asked, **choice: Any) -> Made:
    told = {"text": "", "token_ids": list(ANSWER), "prompt_token_ids": asked.body["prompt"]} | choice
    return Made(completion(asked.body, **told))


def ask(server: ScriptedServer, *prompts: tuple[int, ...], **options: Any) -> list[Reply | PeerError]:
    params = options.pop("params", SamplingParams(max_tokens=4))
    with Endpoint.open(server.url, vocab_size=100, **options) as endpoint:
        return endpoint.ask([Question(prompt, params) for prompt in prompts])


def only_error(found: list[Reply | PeerError]) -> str:
    """The error of the bad one, whose neighbours on both sides were answered."""
    before, bad, after = found
    assert before == after == Reply(ANSWER, "")
    assert isinstance(bad, PeerError)
    assert "\n" not in str(bad) and len(str(bad)) < 500
    return str(bad)


def fails(server: ScriptedServer, made: Made, **options: Any) -> str:
    script(server, lambda asked, count: made)
    return only_error(ask(server, GOOD, BAD, GOOD, **options))


def test_a_server_that_is_down() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(PeerError, match=rf"nothing answers at {url} \(.*refused.*\); start the server"):
            Endpoint.open(url)


def test_a_name_that_nobody_knows() -> None:
    def unknown(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("[Errno -2] Name or service not known", request=request)

    with pytest.raises(PeerError, match=r"nothing answers at http://no.such.host \(.*Name or service not known\)"):
        Endpoint.open("http://user:word@no.such.host/v1", transport=httpx2.MockTransport(unknown))


def test_a_server_that_says_nothing(server: ScriptedServer) -> None:
    going = threading.Event()

    def waits(asked: Asked, count: int) -> Made:
        going.wait(60)
        return good(asked)

    script(server, waits)
    (found,) = ask(server, BAD, timeout_s=0.2)
    going.set()
    assert "did not answer within 0.2 s" in str(found)


def test_a_server_that_drips(server: ScriptedServer) -> None:
    clock = StillClock()

    def drips(asked: Asked, count: int) -> Made:
        made = good(asked)
        return Made(made.content, before_end=lambda: setattr(clock, "now", clock.now + 500.0))

    script(server, drips)
    (found,) = ask(server, BAD, timeout_s=30, patience=patience(clock))
    assert "did not answer within 30 s; give it more time" in str(found)


def test_an_answer_without_an_end(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(calling, "_MOST_EVENT_BYTES", 1 << 19)
    sent = []

    def endless() -> Iterator[bytes]:
        while True:
            sent.append(1 << 16)
            yield b"x" * (1 << 16) if body != b"events" else b": alive\n\n" * 6000

    caller = Caller("http://x", transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=endless())))
    for body in (b"whole", b"line", b"events"):
        sent.clear()
        with pytest.raises(PeerError, match=r"answers more than [01] MiB at once|answered no stream of events"):
            if body == b"whole":
                caller.get("/v1/models")
            else:
                list(caller.events("/v1/completions", {}))
        assert sum(sent) <= 3 << 20


def test_who_is_sent_on_keeps_the_key_on_the_same_host_alone() -> None:
    hops = {
        "https://a/v1/models": "https://a/v1/x",
        "https://a/v1/x": "http://a/v1/y",
        "https://b/v1/models": "https://b:444/v1/y",
        "http://c/v1/models": "https://c/v1/y",
        "http://d/v1/models": "http://e/v1/y",
    }
    keys: dict[str, str | None] = {}

    def answer(request: httpx2.Request) -> httpx2.Response:
        url = str(request.url)
        keys[url] = request.headers.get("authorization")
        return httpx2.Response(307, headers={"Location": hops[url]}) if url in hops else httpx2.Response(200, json={})

    for url in hops:
        if url.endswith("/models"):
            transport = httpx2.MockTransport(answer)
            Caller(url.removesuffix("/models"), api_key="k", transport=transport, follows=True).get("/v1/models")
    sent = {url for url, key in keys.items() if key == "Bearer k"}
    assert set(keys) - sent == {"http://a/v1/y", "https://b:444/v1/y", "http://e/v1/y"}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_busy_server_is_asked_again_when_it_says(server: ScriptedServer, status: int, form: str) -> None:
    clock = StillClock()
    told: list[str] = []
    # Dates have whole seconds, as the clock has here.
    after = "7" if form == "seconds" else email.utils.formatdate(clock.time() + 7.0, usegmt=True)

    def busy(asked: Asked, count: int) -> Made:
        return good(asked) if count > 2 else Made({"error": {"message": "busy"}}, status, {"Retry-After": after})

    script(server, busy)
    found = ask(server, BAD, patience=patience(clock), tell=told.append)
    assert found == [Reply(ANSWER, "")]
    assert sum(clock.slept) == (14.0 if form == "seconds" else 7.0)
    assert told == [f"{server.url} is busy ({status} {'too many requests' if status == 429 else 'unavailable'}); "
                    "it is asked again when it says so"]  # fmt: skip


def test_without_a_word_waits_double_up_to_the_longest(server: ScriptedServer) -> None:
    clock = StillClock()
    script(server, lambda asked, count: good(asked) if count > 5 else Made(b"", 429))
    assert ask(server, BAD, patience=patience(clock, first_s=1.0, longest_s=6.0)) == [Reply(ANSWER, "")]
    assert clock.slept == [1.0, 2.0, 4.0, 6.0, 6.0]
    half = Patience(jitter=lambda: 0.0)
    assert [half.wait_s(attempt) for attempt in (0, 1, 50)] == [0.5, 1.0, 30.0]


def test_patience_ends(server: ScriptedServer) -> None:
    clock = StillClock()
    script(server, lambda asked, count: Made(b"", 429, {"Retry-After": "40"}))
    (found,) = ask(server, BAD, patience=patience(clock, total_s=100.0))
    assert "is busy (429 too many requests) and would be waited for 120 s, of at most 100 s" in str(found)
    assert sum(clock.slept) == 80.0
    script(server, lambda asked, count: Made(b"", 429, {"Retry-After": "0"}))  # at once, which is not for ever
    clock = StillClock()
    (found,) = ask(server, BAD, patience=patience(clock, total_s=60.0))
    assert "is busy" in str(found) and sum(clock.slept) <= 60.0


def test_while_one_waits_all_wait(server: ScriptedServer) -> None:
    clock = StillClock()
    seen: list[tuple[float, bool]] = []  # when a request came, and whether it was the first bad one

    def answer(asked: Asked) -> Made:
        first = not seen
        seen.append((clock.now, first))
        return Made(b"", 429, {"Retry-After": "50"}) if first else good(asked)

    script(server, lambda asked, count: good(asked))
    server.handlers["/v1/completions"] = answer
    with Endpoint.open(server.url, vocab_size=100, patience=patience(clock)) as endpoint:
        assert endpoint.ask([Question(BAD, SamplingParams())]) == [Reply(ANSWER, "")]
        clock.now = 1_020.0  # as if it were in the middle of that wait
        assert endpoint.ask([Question(GOOD, SamplingParams())]) == [Reply(ANSWER, "")]
    assert seen == [(1_000.0, True), (1_050.0, False), (1_050.0, False)]


def test_a_closed_connection_is_tried_again(server: ScriptedServer) -> None:
    clock = StillClock()
    script(server, lambda asked, count: good(asked) if count > 3 else Made(good(asked).content, cut=20))
    assert ask(server, GOOD, BAD, GOOD, patience=patience(clock)) == [Reply(ANSWER, "")] * 3
    script(server, lambda asked, count: Made(good(asked).content, cut=20))
    found = only_error(ask(server, GOOD, BAD, GOOD, patience=patience(clock)))
    assert "closed the connection in the middle of an answer 4 times" in found
    assert len([body for body in server.posted() if tuple(body["prompt"]) == BAD]) == 4 + 4


def test_answers_that_are_none(server: ScriptedServer) -> None:
    for made, message in (
        (Made(b"<html>hello</html>", headers={"Content-Type": "text/html"}),
         "answered no JSON object but text/html ('<html>hello</html>'); is this the address of an API?"),
        (Made(b"{half", headers={"Content-Type": "application/json"}), "no JSON object but application/json ('{half')"),
        (Made([1, 2]), "answered no JSON object"),
        (Made({"error": {"message": "out of memory", "code": 500}}), "answered an error ('out of memory')"),
        (Made({"error": "out of luck"}, 500), "answered 500 ('out of luck')"),
        (Made({"object": "error", "message": "bad"}, 400), "answered 400 ('bad')"),
        (Made({"error": {"message": "x" * 999}}, 400), f"answered 400 ('{'x' * 197}...')"),
        (Made({"error": {"message": "two\n lines"}}, 422), "answered 422 ('two lines')"),
        (Made({"error": {"message": "bad key"}}, 401),
         "the key was refused: 401 ('bad key'); give one by --api-key-env NAME"),
        (Made(b"", 403), "the key was refused: 403; give one by --api-key-env NAME"),
        (Made({"detail": "Not Found"}, 404), "has no /v1/completions, or not this model: 404 ('Not Found')"),
        (Made(b"", 302, {"Location": "https://elsewhere/"}), "sends us on to 'https://elsewhere/'; give that address"),
        (Made({"choices": []}), "answered JSON that is no completion (no choices)"),
        (Made({"choices": None}), "answered JSON that is no completion (no choices)"),
        (Made({"choices": 3}), "answered JSON that is no completion (no choices)"),
        *((Made(b'{"choices": [{"text": "", "token_ids": [%s]}]}' % wrong.encode()),
           f"answered JSON that is no completion (a token id is {read!r}, and no whole number)")
          for wrong, read in (("1e999", "inf"), ("5.5", "5.5"), ("true", "True"), ('"5"', "5"), ("NaN", "nan"))),
        (Made({"choices": [{"text": 5}]}), "answered JSON that is no completion (a text is a int)"),
        (Made({"choices": [{"text": ""}], "model": 5}), "answered JSON that is no completion (a text is a int)"),
        (Made(b'{"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [1%s]}}]}' % (b"0" * 400)),
         "answered JSON that is no completion (OverflowError"),
        (Made({"id": "x"}), "answered JSON that is no completion (KeyError: 'choices')"),
    ):  # fmt: skip
        assert message in fails(server, made, api_key="key")


def test_a_key_that_is_missing(server: ScriptedServer) -> None:
    assert "it wants a key, and none was given: 401; give one" in fails(server, Made(b"", 401))
    server.handlers["/v1/models"] = lambda _: Made(b"", 401)
    with pytest.raises(PeerError, match="it wants a key"):
        Endpoint.open(server.url)


@pytest.mark.parametrize("info", [None, [], "1", {}])
def test_a_server_that_hardly_says_what_it_is(server: ScriptedServer, info: Any) -> None:
    script(server, lambda asked, count: good(asked))
    server.handlers["/v1/models"] = lambda _: Made({"data": [{"id": [1], "owned_by": "truedraft"}, {}]})
    server.handlers["/openapi.json"] = lambda _: Made({"info": info})
    with Endpoint.open(server.url, vocab_size=100) as endpoint:
        assert (endpoint.facts.name, endpoint.facts.version, endpoint.model) == ("truedraft", "", None)
        assert endpoint.ask([Question(GOOD, SamplingParams())]) == [Reply(ANSWER, "")]


def test_answers_of_another_model(server: ScriptedServer) -> None:
    for told, message in (
        ({"model": "other"}, "was asked for model 'm', and 'other' answered"),
        ({"prompt_token_ids": [7, 9]}, "it read 2 token ids that are not the 2 of the prompt"),
        ({"token_ids": [9, 100]}, "answered token id 100, outside a vocabulary of 100"),
        ({"token_ids": [-1]}, "answered token id -1"),
        ({"token_ids": None}, "hides the token ids of its answer, and there is no tokenizer"),
        ({"prompt_tokens": 3}, "counts 3 tokens in a prompt of 2"),
    ):
        script(server, lambda asked, count, told=told: good(asked, **told))
        assert message in only_error(ask(server, GOOD, BAD, GOOD))


def test_a_tokenizer_that_changes_under_way(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(" return x")

    def answer(asked: Asked, count: int) -> Made:
        return good(asked, token_ids=list(ids), text=" return x" if count == 1 else " retrun x")

    script(server, answer)
    with Endpoint.open(server.url, tokenizer=tokenizer) as endpoint:
        question = Question(BAD, SamplingParams())
        assert endpoint.ask([question]) == [Reply(ids, " return x")]
        (found,) = endpoint.ask([question])
    assert "do not mean the text that it wrote, ' retrun x': its tokenizer differs" in str(found)


def test_an_interrupt_gives_what_was_answered_first(server: ScriptedServer, request: pytest.FixtureRequest) -> None:
    waiting, going = threading.Event(), threading.Event()

    def interrupts(asked: Asked, count: int) -> Made:
        waiting.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        going.wait(60)
        return good(asked)

    script(server, interrupts)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a program in the background starts without
    found: dict[int, Reply | PeerError] = {}
    with Endpoint.open(server.url, vocab_size=100) as endpoint:
        answers = endpoint.answers([Question(prompt, SamplingParams()) for prompt in (GOOD, BAD, GOOD)])
        found.update([next(answers)])
        with pytest.raises(KeyboardInterrupt):  # the second may have come or not, and is given all the same
            while server.asked:
                waiting.set()
                found.update([next(answers)])
        going.set()
    assert set(found) <= {0, 2} and all(each == Reply(ANSWER, "") for each in found.values())


def test_a_mistake_of_ours_is_raised(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    script(server, lambda asked, count: good(asked))
    with Endpoint.open(server.url) as endpoint:
        monkeypatch.setattr(endpoint, "_recovery", None)
        with pytest.raises(AttributeError):
            endpoint.ask([Question(GOOD, SamplingParams())])


ASKED = Question((1, 2), SamplingParams(max_tokens=2))


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_log_probabilities_that_are_no_numbers_are_as_good_as_none(broken: float) -> None:
    recovery = Recovery(None, vocab_size=8)
    for values, read in ((-1.0, -2.0), (-1.0, -2.0)), ((-1.0, broken), None):
        assert recovery.reply(ReceivedAnswer(None, "length", (3, 4), (3, 4), values), ASKED).logprobs == read
