"""With --json every exit ends standard output with a JSON object, and nothing a model writes steers a terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Run
from truedraft.cli import export, generate, info
from truedraft.cli.failures import warn, warnings_as_lines
from truedraft.errors import ModelError
from truedraft.measure.bench import runs
from truedraft.text.tokenizer import Tokenizer


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
    (tmp_path / "a.txt").write_text(f"{'long' * 200}\n{'longer' * 200}\n")
    result = run("generate", "--prompts", str(tmp_path / "a.txt"), "--model", target, "--compare", "--json")
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
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"id": "\x1b]0;title\x07", "prompt": "x"}) for _ in range(2)))
    words = ("--model", target, "--max-tokens", "3", "--ignore-eos", "--json", *more)
    for result in (run("generate", "x\x1b[2J", *words), run("generate", "--prompts", str(file), *words)):
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
