"""Closed, full and odd standard streams: one sentence and an exit status, never a traceback, and UTF-8 throughout.

Also text as it is shown and as it is typed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import truedraft
from truedraft.cli.terminal import from_escapes, json_line, visible
from truedraft.errors import OptionError

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
        ("certify stack --minutes 0 >&-", 3, "standard output is closed"),  # 1 is a check that failed
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


def test_a_certificate_that_nobody_could_read_is_no_failed_check() -> None:
    assert shell("certify stack --minutes 0 --json >/dev/full").returncode == 3


def test_utf8_in_and_out_under_a_locale_without_it(target: str, tmp_path: Path) -> None:
    """From standard input with a byte order mark; the prompt is echoed."""
    (tmp_path / "prompt").write_bytes("\ufeffnaïve €".encode())
    words = f"generate - --model {target} --max-tokens 2 --drafter none --compare --json <{tmp_path / 'prompt'}"
    done = shell(words, **NO_UTF8)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("naïve €")
    assert json.loads(done.stdout.decode().splitlines()[-1])["prompts"][0]["prompt_tokens"] == len("naïve €".encode())


def test_control_characters_are_written_out() -> None:
    every = "".join(map(chr, range(0x100)))
    shown = visible(every)
    assert not [char for char in shown if (ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0) and char not in "\n\t"]
    assert visible("\x1b[2J\x9b1m\r\x7f") == "\\x1b[2J\\x9b1m\\x0d\\x7f"
    assert visible("a\tb\nüñ€") == "a\tb\nüñ€"


def test_json_is_one_line_that_steers_no_terminal_and_means_the_same() -> None:
    record = {"text": "".join(map(chr, range(0x100))) + "\u2028\u2029€\udcff"}
    line = json_line(record)
    assert len(line.splitlines()) == 1 and "€" in line
    assert not [char for char in line[:-1] if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0]
    assert json.loads(line) == record


def test_escapes_that_are_typed() -> None:
    meant = {"END": "END", r"\n\n": "\n\n", r"\t\r": "\t\r", r"\\n": "\\n", r"\u20ac": "€", r"\ud83d\ude00!": "😀!"}
    assert {typed: from_escapes(typed, "--stop") for typed in meant} == meant
    wrong = {r"\d": r"the escape \d, which means nothing", "end\\": "the escape \\,", r"\u12": r"\u, which"}
    for typed, phrase in (wrong | {r"\ud83d": "half a"}).items():
        with pytest.raises(OptionError) as refused:
            from_escapes(typed, "--stop")
        assert phrase in str(refused.value) and str(refused.value).startswith("--stop ")
