"""Standard streams that are closed, full or odd, text as it is shown and typed, and JSON whatever happens."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import truedraft
from cli.tiny import Run, prompts_in
from truedraft.cli import export, generate, info
from truedraft.cli.failures import warn, warnings_as_lines
from truedraft.cli.terminal import from_escapes, json_line, visible
from truedraft.errors import ModelError, OptionError
from truedraft.measure.bench import runs
from truedraft.text.tokenizer import Tokenizer

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


@pytest.mark.slow
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


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (["info"], info, "_rows"),
        (["generate", "x", "--compare"], runs, "_warm_up"),
        (["generate", "x", "--compare"], generate, "stream_answer"),
    ],
)
def test_an_interruption(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch, words: list[str], module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, interrupt)
    model = ["--model", target, "--max-tokens", "4"] if words[0] == "generate" else []
    result = run(*words, *model, "--json")
    assert (result.status, result.record["status"], result.record["error"]) == (130, 130, "interrupted")
    assert "interrupted" in result.err and "Traceback" not in result.err


def test_a_failure_in_the_middle_of_an_answer(run: Run, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: object, prompt: object, params: object, show: Callable[[Any], None]) -> None:
        from truedraft.engine import Piece

        show(Piece("half an answer", [], []))
        raise ModelError("the target broke")

    monkeypatch.setattr(generate, "stream_answer", broken)
    result = run("generate", "x", "--model", target, "--json")
    assert result.status == 1 == result.record["status"]
    assert result.out.startswith("half an answer\n{") and result.record["error"] == "the target broke"


def test_no_prompt_that_could_be_compared(run: Run, target: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, "long" * 200, "longer" * 200)
    result = run("generate", "--prompts", file, "--model", target, "--compare", "--json")
    assert (result.status, result.record["error"]) == (1, "no prompt could be answered")
    assert len(result.record["errors"]) == 2


def test_the_status_stands_beside_an_answer(run: Run, target: str) -> None:
    assert run("generate", "x", "--model", target, "--max-tokens", "2", "--json").record["status"] == 0


@pytest.mark.parametrize("more", [[], ["--show-drafts"]])
def test_an_answer_does_not_steer_the_terminal(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str]
) -> None:
    """Every token of this model is a piece of an escape sequence, and so is the prompt's name."""
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "\x1b[31m\x9b" * len(ids))
    file = prompts_in(tmp_path, *[{"id": "\x1b]0;title\x07", "prompt": "x"}] * 2)
    words = ("--model", target, "--max-tokens", "3", "--ignore-eos", "--json", *more)
    for result in (run("generate", "x\x1b[2J", *words), run("generate", "--prompts", file, *words)):
        assert result.status == 0
        assert "\x1b" not in result.out + result.err and "\x9b" not in result.out
        assert "\\x1b[31m\\x9b" in result.out
        assert result.record["prompts"][0]["text"] == "\x1b[31m\x9b" * 3
    compared = run("generate", "x\x1b[2J", *words, "--compare")
    assert "\x1b" not in compared.out and compared.out.startswith("x\\x1b[2J")


def test_many_threads_are_refused(run: Run) -> None:
    result = run("export", "--model", "nothing", "--out", "nowhere", "--threads", "100000", "--json")
    assert result.status == 2 and "--threads must be at most" in result.record["error"]
    assert export.DONE == 0 and not Path("nowhere").exists()


def test_a_warning_is_said_once_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_lines():
        for _ in range(2):
            warn("the disk\nis full")
            logging.getLogger("truedraft.models.anything").warning("the disk\nis full")
        try:
            raise ValueError("with a traceback")
        except ValueError:
            logging.getLogger("truedraft.engine").exception("another")
            logging.getLogger("truedraft.engine").warning("a drafter failed", exc_info=True)
            warn("a drafter failed, and plain decoding went on")
    said = "warning: the disk is full", "warning: a drafter failed, and plain decoding went on", "error: another"
    assert capsys.readouterr().err == "".join(f"truedraft: {line}\n" for line in said)
