"""Who is let in, what is kept out, and what nobody is told."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import http.client
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_load import Broken, Raising, get, open_stream, post, wait_for
from truedraft import Engine
from truedraft.errors import ModelError, OptionError, PromptError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.server import ServerOptions, application
from truedraft.server.access import ApiKeys, Hosts
from truedraft.server.errors import ApiError

BODY = {"prompt": "def f(", "max_tokens": 2}


def key_file(folder: Path, *lines: str) -> Path:
    file = folder / "keys.txt"
    file.write_text("\n".join(lines))
    return file


def test_keys_are_hashed_named_and_compared_whole(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret-b").hexdigest()
    keys = ApiKeys.read(key_file(tmp_path, "# clients", "", "alice secret-a", f"bob sha256:{digest}", "secret-c"))
    assert keys.client("Bearer secret-a").name == "alice" and keys.client("bearer secret-b ").name == "bob"
    assert keys.client("Bearer secret-c").name == "key-5"
    for wrong in (None, "", "Bearer", "Bearer secret", "Basic secret-a", f"Bearer sha256:{digest}", "Bearer ä"):
        with pytest.raises(ApiError) as refused:
            keys.client(wrong)
        assert refused.value.status == 401
    assert "secret" not in repr(keys.__dict__)


def test_files_of_keys_that_cannot_be_used(tmp_path: Path) -> None:
    for lines, message in (
        ("", "holds no key"),
        ("# none", "holds no key"),
        ("a b c", "has 3 words in line 1; write NAME KEY"),
        ("a sha256:xyz", "has a hash in line 1 that is not 64 hex digits"),
        ("a sha256:00", "has a hash in line 1 that is not 64 hex digits"),
    ):
        with pytest.raises(OptionError, match=message):
            ApiKeys.read(key_file(tmp_path, lines))
    with pytest.raises(OptionError, match="api_key_file cannot be read"):
        ApiKeys.read(tmp_path / "missing")


def test_only_clients_with_a_key_ask(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    file = key_file(tmp_path, "alice secret-a", "bob secret-b")
    with serving(make_engine(), api_key_file=file) as running:
        status, _, told = post(running.url, BODY)
        assert status == 401 and told["error"]["code"] == "invalid_api_key"
        assert post(running.url, BODY, Authorization="Bearer secret-a")[0] == 200
        assert post(running.url, BODY, "/tokenize")[0] == 401
        assert get(running.url, "/v1/models")[0] == 401
        assert [get(running.url, path)[0] for path in ("/health", "/ready", "/metrics", "/")] == [200] * 4


def test_prefixes_are_shared_within_a_key_alone(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    file = key_file(tmp_path, "alice secret-a", "bob secret-b")
    body = {"prompt": [number % 50 + 20 for number in range(200)], "max_tokens": 2}

    def copied(running: Running, key: str) -> int:
        _, _, found = post(running.url, body, Authorization=f"Bearer {key}")
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(make_engine(), api_key_file=file) as running:
        assert copied(running, "secret-a") == 0 and copied(running, "secret-b") == 0
        assert copied(running, "secret-a") == copied(running, "secret-b") == 192
    with serving(make_engine(), api_key_file=file, share_prefixes=True) as running:
        assert copied(running, "secret-a") == 0 and copied(running, "secret-b") == 192


def test_bodies_are_bounded(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(), max_body_bytes="1K") as running:
        status, _, told = post(running.url, BODY | {"prompt": "x" * 2000})
        assert status == 413 and "of at most 1024" in told["error"]["message"]
        assert post(running.url, BODY)[0] == 200


def test_logs_hold_no_text(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("truedraft.server.requests")
    log.propagate = True
    with caplog.at_level(logging.INFO, "truedraft.server.requests"):
        logging.getLogger("truedraft.server").propagate = True
        post(running.url, {"prompt": "a very private matter", "max_tokens": 3}, Authorization="Bearer sk-private")
        wait_for(lambda: any("/v1/completions" in record.getMessage() for record in caplog.records))
    line = next(record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage())
    assert "private" not in line and "POST /v1/completions 200" in line
    assert "tokens=3" in line and "finish=length" in line and "client=anyone" in line


def test_a_stream_that_is_broken_off_logs_what_it_had_written(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("truedraft.server").propagate = True
    with caplog.at_level(logging.INFO, "truedraft.server.requests"):
        connection = open_stream(running.url, {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True})
        read = b""
        while read.count(b"data: ") < 3:
            read += connection.recv(4096)
        connection.close()
        wait_for(lambda: any("finish=cancelled" in record.getMessage() for record in caplog.records))
    line = next(record.getMessage() for record in caplog.records if "finish=cancelled" in record.getMessage())
    counted = dict(part.split("=") for part in line.split() if "=" in part)
    assert 2 <= int(counted["tokens"]) < 2000 and float(counted["first_token_s"]) > 0.0, line
    assert float(counted["tokens_per_call"]) >= 1.0, line


def test_pages_of_other_origins_are_not_let_in_unless_named(
    make_engine: Callable[..., Engine], running: Running
) -> None:
    def allowed(url: str) -> Any:
        return post(url, BODY, Origin="https://other.example")[1].get("Access-Control-Allow-Origin")

    assert allowed(running.url) is None
    with serving(make_engine(), cors_origin=("https://other.example",)) as open_one:
        assert allowed(open_one.url) == "https://other.example"


def test_tokens_of_texts(running: Running) -> None:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    _, _, found = post(running.url, {"prompt": "def f():"}, "/tokenize")
    assert found["tokens"] == tokenizer.encode("def f():") and found["count"] == len(found["tokens"])
    assert post(running.url, {"tokens": found["tokens"]}, "/detokenize")[2]["prompt"] == "def f():"
    status, _, told = post(running.url, {"tokens": [-1]}, "/detokenize")
    assert status == 400 and "token id -1 is outside" in told["error"]["message"]


def test_numbers_for_prometheus(running: Running) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    post(running.url, {"prompt": "class Stack:\n    def push(", "max_tokens": 40, "temperature": 0})
    families = {family.name: family for family in text_string_to_metric_families(get(running.url, "/metrics")[1])}

    def value(name: str) -> float:
        return float(families[f"truedraft:{name}"].samples[0].value)

    assert value("spec_decode_num_draft_tokens") >= value("spec_decode_num_accepted_tokens") > 0
    places = [sample.value for sample in families["truedraft:spec_decode_num_accepted_tokens_per_pos"].samples]
    assert sum(places) == value("spec_decode_num_accepted_tokens")
    assert value("generation_tokens") >= 40 and value("num_requests_running") == 0
    parts = {sample.labels["part"]: sample.value for sample in families["truedraft:step_seconds"].samples}
    assert set(parts) == {"draft", "target", "verify", "decide", "other"} and parts["target"] > 0
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"truedraft:{name}" in families
    assert all(sample.labels["model_name"] == "tiny" for family in families.values() for sample in family.samples)


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_had_to_be_done_again_is_counted(target: LanguageModel) -> None:
    with serving(Engine(target, Raising(), controller="fixed")) as running:
        status, _, _ = post(running.url, {"prompt": [[7, 8, 9], [8, 9, 10]], "max_tokens": 10, "temperature": 0})
        assert status == 200
        lines = get(running.url, "/metrics")[1].splitlines()
    assert float(next(line for line in lines if line.startswith("truedraft:recoveries_total")).split()[-1]) > 0


def test_bodies_that_do_not_say_how_long_they_are(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(), max_body_bytes="10K") as running:
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
        parts = iter([b'{"prompt": "', *[b"x" * 1000] * 20, b'"}'])
        connection.request("POST", "/v1/completions", parts, {"Content-Type": "application/json"}, encode_chunked=True)
        reply = connection.getresponse()
        told = json.loads(reply.read())
        assert reply.status == 413 and told["error"]["code"] == "request_too_large"
        connection.close()


def test_paths_of_requests_write_nothing_of_their_own_to_the_log(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="truedraft.server.requests")
    get(running.url, "/%1b%5b2J%20200%20client=root%0aGET")
    wait_for(lambda: any(" 404 " in record.getMessage() for record in caplog.records))
    line = next(record.getMessage() for record in caplog.records if " 404 " in record.getMessage())
    assert "\x1b" not in line and "\n" not in line and " 200 client=root" not in line


def test_errors_name_no_folder(target: LanguageModel, tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "model"
    folder.mkdir(parents=True)
    named = copy.copy(target)
    named.name = str(folder)
    with serving(Engine(named, controller="fixed"), served_model_name=()) as running:
        told = post(running.url, {"prompt": [1] * 200_000})[2]["error"]["message"]
        assert "'tiny' has a context of" in told and "secret" not in told
        told = post(running.url, {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")[2]
        assert "'tiny' has no chat template" in told["error"]["message"]
        assert "secret" not in get(running.url, "/metrics")[1]
        assert named.name == str(folder), "the caller's model is called as before"


class Unreadable(Broken):
    """A model that fails over a file, or says which folder it lies in."""

    def __init__(self, model: LanguageModel, error: Exception) -> None:
        super().__init__(model)
        self._error = error

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        if any(Broken.BAD in segment.tokens for segment in segments):
            raise self._error
        return self._model.forward(segments)


@pytest.mark.plants_failures
@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/srv/secret/model.safetensors"),
        RuntimeError("cannot map /srv/secret/model.safetensors"),
        ModelError("a shard is missing: '/srv/secret/model.safetensors'"),
        ModelError("a shard is missing: 'runs/secret/shard'"),
        ModelError("a shard is missing in ../secret"),
        ModelError("a shard is missing: ~/secret"),
        ModelError("a shard is missing: runs\\secret\\shard"),
        ModelError("secret.safetensors is cut off"),
        PromptError("the tokenizer failed"),
    ],
    ids=str,
)
def test_errors_of_a_model_name_no_files(target: LanguageModel, error: Exception) -> None:
    if isinstance(error, PromptError):
        error.__cause__ = FileNotFoundError(2, "No such file or directory", "/srv/secret/tokenizer.json")
    with serving(Engine(Unreadable(target, error), controller="fixed")) as running:
        body = {"prompt": [Broken.BAD, 6], "max_tokens": 4, "temperature": 0}
        status, _, told = post(running.url, body)
        assert status == 500 and "secret" not in str(told) and "log of the server" in told["error"]["message"], told
        with open_stream(running.url, body) as stream:
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += stream.recv(4096)
        assert b"log of the server" in text and b"secret" not in text


def test_errors_of_a_model_that_name_no_files_are_told() -> None:
    for told in ("a KV cache of 5.0 GiB, and 3.5 are free", "see https://example.org/docs", "'org/model' is busy"):
        error = ApiError.of(ModelError(told), shown={"org/model": "org/model"})
        assert error.message == f"the model failed ({told})"


def test_no_answer_is_longer_than_the_server_allows(make_engine: Callable[..., Engine], template_file: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    longer = BODY | {"max_tokens": 9, "ignore_eos": True}
    with serving(make_engine(), max_new_tokens=5, chat_template=template_file) as running:
        for path, body in (("/v1/completions", longer), ("/v1/chat/completions", chat)):
            told = post(running.url, body, path)[2]
            assert told["usage"]["completion_tokens"] == 5 and told["choices"][0]["finish_reason"] == "length"
        status, _, told = post(running.url, BODY | {"max_tokens": 9, "min_tokens": 7})
        assert status == 400 and "min_tokens must be at most max_tokens, 5" in told["error"]["message"]


def test_a_lack_of_memory_outside_of_the_engine_is_an_error_to_retry() -> None:
    for told in ("can't start new thread", "DefaultCPUAllocator: can't allocate memory", None):
        answer = ApiError.of(MemoryError() if told is None else RuntimeError(told))
        assert answer.status == 503 and "ask again" in answer.message and answer.headers == {"Retry-After": "1"}
    assert ApiError.of(RuntimeError("other")).status == 500


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
