"""`truedraft serve` and `truedraft chat` as they are typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
COMMAND = [sys.executable, "-m", "truedraft"]


@contextmanager
def served(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says it listens at."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--drafter", "prompt-lookup", "--controller", "fixed", "--json", *more],
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
    return urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})


def ask(address: str, **fields: Any) -> Any:
    with urllib.request.urlopen(asking(address, **fields), timeout=60) as reply:
        return json.loads(reply.read())


def test_it_serves_until_it_is_told_to_stop() -> None:
    with served() as (process, address):
        assert ask(address)["choices"][0]["text"]
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"<html" in page.read()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and time.monotonic() - began < 10
        log = process.stderr.read() if process.stderr is not None else ""
        assert "POST /v1/completions 200" in log and "Stack" not in log and "Traceback" not in log


def test_open_requests_end_when_it_is_told_twice() -> None:
    with served("--drain-s", "60") as (process, address):
        request = asking(address, max_tokens=1900, ignore_eos=True, stream=True)
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            rest = stream.read()
        assert b"ask again" in rest
        assert process.wait(30) == 0


def test_while_it_stops_new_requests_are_told_so_and_open_ones_go_on() -> None:
    with served("--drain-s", "60") as (process, address):
        request = asking(address, max_tokens=1500, ignore_eos=True, stream=True)
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            for asked in (f"{address}/health", request):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(asked, timeout=30)
                assert refused.value.code == 503
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "-1"], "--port must be 0 or more, got -1"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid' cannot be listened on"),
        (["--api-key-file", "missing"], "--api-key-file cannot be read"),
        (["--tls-key", "missing"], "tls-certificate"),
        (["--max-body-bytes", "many"], "--max-body-bytes must be a size"),
        (["--allow-rule", "nonsense"], "unknown rule 'nonsense'"),
        (["--chat-template", "missing"], "--chat-template cannot be read"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(words: list[str], message: str) -> None:
    command = [*COMMAND, "serve", "--drafter", "none", "--port", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def talk(lines: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "chat", "--max-tokens", "8", "--temperature", "0", *words]
    return subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_a_talk_with_a_model_here() -> None:
    done = talk("class Stack:\n/stats\n/nonsense\n/again\n/reset\n/quit\n", "--drafter", "prompt-lookup", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [turn["message"] for turn in record["turns"]] == ["class Stack:", "class Stack:"]
    assert record["turns"][0]["text"] == record["turns"][1]["text"] != ""
    assert "there is no /nonsense" in done.stderr and "tokens in" in done.stderr


def test_once_more_is_the_last_message_of_what_is_remembered() -> None:
    done = talk("a = 1\n/system be brief\n/reset\n/again\nb = 2\n/again\n/again\n", "--drafter", "none", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [turn["message"] for turn in record["turns"]] == ["a = 1", "b = 2", "b = 2", "b = 2"]
    assert len({turn["text"] for turn in record["turns"][1:]}) == 1
    assert "nothing was asked yet" in done.stderr


def test_a_talk_with_a_server() -> None:
    with served() as (_, address):
        done = talk("class Stack:\n", "--url", address, "--json")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout.splitlines()[-1])
        assert record["turns"][0]["text"] == ask(address)["choices"][0]["text"]
    done = talk("x\n", "--url", "http://127.0.0.1:9")
    assert done.returncode != 0 and "nothing answers at" in done.stderr and "Traceback" not in done.stderr


def test_a_key_for_the_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice secret\n")
    with served("--api-key-file", str(keys)) as (_, address):
        refused = talk("x\n", "--url", address)
        assert refused.returncode != 0 and "no API key was given" in refused.stderr
        assert talk("x\n", "--url", address, TRUEDRAFT_API_KEY="secret").returncode == 0
