"""Closed, full and odd standard streams: one sentence and an exit status, never a traceback, and UTF-8 throughout."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import truedraft

SOURCE = str(Path(truedraft.__file__).parent.parent)
NO_UTF8 = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a shell, which redirects its streams, and in an environment of its own."""
    line = f"exec {shlex.quote(sys.executable)} -m truedraft {words}"
    environment = {"PYTHONPATH": SOURCE, "PATH": os.defpath} | environment
    return subprocess.run(["/bin/bash", "-c", line], env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("words", "status", "err"),
    [
        ("generate - --json <&-", 2, "standard input is closed"),
        ("generate --json <&-", 2, "give a PROMPT, - to read it"),
        ("generate - --json 0>/dev/null", 2, "standard input cannot be read"),
        ("--version >&-", 1, "standard output is closed"),
        ("--version >/dev/full", 1, "standard output cannot be written (No space left on device)"),
        ("generate x --top-k -1 2>&-", 2, ""),
        ("generate ü€ --stop 'ü\\d' --json", 2, "--stop 'ü\\\\d' holds the escape"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_streams(words: str, status: int, err: str) -> None:
    done = shell(words, **NO_UTF8)
    said = done.stderr.decode()
    assert done.returncode == status, said
    assert err in said and said.count("\n") == (1 if err else 0)
    if "--json" in words and "full" not in words:
        record = json.loads(done.stdout.decode().splitlines()[-1])
        assert (record["command"], record["status"]) == ("generate", status) and err in record["error"]


def test_an_error_that_cannot_be_written_as_json_either() -> None:
    done = shell("generate x --top-k -1 --json >/dev/full")
    first, second = done.stderr.decode().splitlines()
    assert done.returncode == 1 and "--top-k must be" in first and "standard output cannot be written" in second


def test_utf8_in_and_out_under_a_locale_without_it(target: str, tmp_path: Path) -> None:
    """From standard input with a byte order mark; the prompt is echoed."""
    (tmp_path / "prompt").write_bytes("\ufeffnaïve €".encode())
    words = f"generate - --model {target} --max-tokens 2 --drafter none --compare --json <{tmp_path / 'prompt'}"
    done = shell(words, **NO_UTF8)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("naïve €")
    assert json.loads(done.stdout.decode().splitlines()[-1])["prompts"][0]["prompt_tokens"] == len("naïve €".encode())
