"""`truedraft serve` and `truedraft chat`: what signals end in processes of its own, the rest in this one."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from cli.tiny import Result, Run
from truedraft.cli import serve
from truedraft.cli.parameters import read_words

pytest.importorskip("fastapi")
Talk = Callable[..., Result]


@pytest.fixture
def talk(run: Run, monkeypatch: pytest.MonkeyPatch) -> Talk:
    def call(lines: str, *words: str, key: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        monkeypatch.setenv("TRUEDRAFT_API_KEY", key)
        return run("chat", "--max-tokens", "8", "--temperature", "0", "--json", *words)

    return call


@contextmanager
def served(
    *more: str, start: Sequence[str] = (sys.executable, "-m", "truedraft")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says it listens at."""
    process = subprocess.Popen(
        [
            *(*start, "serve", "embedded:target", "--port", "0", "--json"),
            *("--drafter", "prompt-lookup", "--controller", "fixed", *more),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr is not None else ""
        yield process, str(json.loads(line)["address"])
    finally:
        process.kill()
        process.wait()


def asking(address: str, **fields: Any) -> urllib.request.Request:
    body = json.dumps({"prompt": "class Stack:", "max_tokens": 8, "temperature": 0} | fields).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    return urllib.request.Request(f"{address}/v1/completions", body, headers)


def test_it_serves_and_is_talked_with_until_it_is_told_to_stop(talk: Talk, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("alice secret\n")
    with served("--api-key-file", str(keys)) as (process, address):
        with urllib.request.urlopen(asking(address), timeout=60) as reply:
            answer = json.loads(reply.read())["choices"][0]["text"]
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"<html" in page.read()
        done = talk("class Stack:\n", "--url", address, key="secret")
        assert done.status == 0 and done.record["turns"][0]["text"] == answer != "", done.err
        refused = talk("x\n", "--url", address)
        assert refused.status != 0 and "no API key was given" in refused.err
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and time.monotonic() - began < 10
        log = process.stderr.read() if process.stderr is not None else ""
        assert "serving embedded:target with prompt-lookup at" in log
        assert "POST /v1/completions 200" in log and "Stack" not in log and "Traceback" not in log


@pytest.mark.slow
def test_open_requests_go_on_while_it_stops_and_end_when_it_is_told_twice() -> None:
    with served("--drain-s", "60") as (process, address):
        request, longer = (asking(address, max_tokens=each, ignore_eos=True, stream=True) for each in (500, 1900))
        with (
            urllib.request.urlopen(request, timeout=60) as stream,
            urllib.request.urlopen(longer, timeout=60) as cut,
        ):
            assert stream.readline().startswith(b"data: ") and cut.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with urllib.request.urlopen(f"{address}/health", timeout=30) as health:
                assert health.status == 200, "a server that drains is not to be killed"
            for asked in (f"{address}/ready", request):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(asked, timeout=30)
                assert refused.value.code == 503
            assert stream.read().endswith(b"data: [DONE]\n\n")
            process.send_signal(signal.SIGTERM)
            assert b"ask again" in cut.read()
        assert process.wait(30) == 0


def test_what_cannot_be_served_is_said_in_a_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    for words, message in (
        (("--learn",), "can learn while it serves: heads that were trained, and draft models"),
        (("--learn-keep-s", "9"), "--learn-keep-s has no effect without --learn"),
        (("--learn", "--learn-share", "2"), "--learn-share must lie in (0, 1], got 2.0"),
        (("--learn", "--learn-per-tenant", "--share-prefixes"), "needs clients that can be distinguished"),
        (("--learn", "--learn-per-tenant"), "distinguished; give them keys by --api-key-file"),
    ):
        done = run("serve", "--model", "embedded:target", "--drafter", "none", "--port", "0", *words)
        assert done.status == 2 and message in done.err and "Traceback" not in done.err
        assert len(done.err.strip().splitlines()) == 1, words


def test_what_cannot_be_served_is_said_before_the_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "loaded", lambda *_: pytest.fail("the model was loaded"))
    (file := tmp_path / "tls").write_text("none")
    nothing = str(file)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, message in (
            (("--port", "99999"), "--port"),
            (("--port", "-1"), "--port must be 0 or more, got -1"),
            (("--host", "no.such.host.invalid"), "--host 'no.such.host.invalid' cannot be listened on"),
            (("--api-key-file", "missing"), "--api-key-file cannot be read"),
            (("--tls-key", "missing"), "--tls-key cannot be read"),
            (("--chat-template", "missing"), "--chat-template cannot be read"),
            (("--allow-rule", "nonsense"), "unknown rule 'nonsense'"),
            (("--max-body-bytes", "many"), "--max-body-bytes must be a size"),
            (("--prefix-cache-bytes", "many"), "--prefix-cache-bytes must be a size"),
            (("--tls-certificate", "missing"), "--tls-certificate cannot be read"),
            (("--tls-certificate", nothing), "--tls-certificate needs --tls-key"),
            (("--tls-certificate", nothing, "--tls-key", "missing"), "--tls-key cannot be read"),
            (("--tls-certificate", nothing, "--tls-key", nothing), "--tls-certificate cannot be used"),
            (("--max-connections", "999999999"), "open files leaves"),
            (("--port", str(taken.getsockname()[1])), "cannot be listened on"),
        ):
            done = run("serve", "--model", "embedded:target", *words)
            assert done.status == 2 and message in done.err and len(done.err.strip().splitlines()) == 1, words


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Half:"


@pytest.mark.slow
def test_half_requests_take_nobodys_place() -> None:
    """More of them than there are descriptors: others are answered, and the log does not grow by it."""
    limit = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); "
    start = (sys.executable, "-c", limit + "runpy.run_module('truedraft', run_name='__main__', alter_sys=True)")
    with served(start=start) as (process, address), contextlib.ExitStack() as held:
        at = urlsplit(address)
        for _ in range(260):
            half = held.enter_context(socket.create_connection((at.hostname, at.port), timeout=30))
            half.sendall(HALF)
        for _ in range(2):
            with urllib.request.urlopen(f"{address}/health", timeout=30) as health:
                assert health.status == 200
        with urllib.request.urlopen(asking(address), timeout=60) as reply:
            assert json.loads(reply.read())["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = process.stderr.read() if process.stderr is not None else ""
        assert len(log) < 20_000, log[:2000]


def test_a_talk_with_a_model_here(talk: Talk) -> None:
    lines = "class Stack:\n/stats\n/nonsense\n/again\n/reset\n/exit\nnothing is asked behind it\n"
    done = talk(lines, "embedded:target", "--drafter", "prompt-lookup").ok
    assert [turn["message"] for turn in done.record["turns"]] == ["class Stack:", "class Stack:"]
    assert done.record["turns"][0]["text"] == done.record["turns"][1]["text"] != ""
    assert "there is no /nonsense" in done.err and "tokens in" in done.err


def test_once_more_is_the_last_message_of_what_is_remembered(talk: Talk) -> None:
    lines = "a = 1\n/system be brief\n/reset\n/again\nb = 2\n/again\n/again\n"
    done = talk(lines, "--model", "embedded:target", "--drafter", "none").ok
    assert [turn["message"] for turn in done.record["turns"]] == ["a = 1", "b = 2", "b = 2", "b = 2"]
    assert len({turn["text"] for turn in done.record["turns"][1:]}) == 1
    assert "there is no message yet" in done.err


def test_keys_and_values_may_take_three_quarters_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.machine.free_memory", lambda device: 1 << 30)
    options = read_words(serve.ServeOptions, {"model": "embedded:target", "drafter": "none"})
    share = min(1.0, torch.get_num_threads() / (os.cpu_count() or 1))
    for number, most in ((None, 3 << 28), (1, int(share * (3 << 28)))):
        _, service = serve.loaded(options, number)
        assert service.engine.max_cache_bytes == most, "a replica has as much as it has of the processors"
    limited = replace(options, stack=replace(options.stack, max_cache_bytes="64M"))
    assert serve.loaded(limited)[1].engine.max_cache_bytes == 64 << 20
