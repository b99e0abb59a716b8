"""Unusable arguments: one line on standard error that says which and why, and exit status 2."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import Result
from truedraft.cli import generate
from truedraft.cli.main import main

Run = Callable[..., Result]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "void.jsonl").write_text('{"prompt": ""}\n')
    (tmp_path / "good.txt").write_text("a\n")
    (tmp_path / "prompts.csv").write_text("a\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


BAD = [
    (["x", "--tempreture", "1"], "unknown option '--tempreture'; did you mean '--temperature'?"),
    (["x", "--max-tokens", "many"], "--max-tokens"),
    (["x", "--max-tokens", "0"], "--max-tokens must be a whole number of 1 or more, got 0"),
    (["x", "--temperature", "-1"], "--temperature must be"),
    (["x", "--temperature", "nan"], "--temperature must be"),
    (["x", "--top-p", "0"], "--top-p must be"),
    (["x", "--top-k", "-1"], "--top-k"),
    (["x", "--min-p", "2"], "--min-p"),
    (["x", "--seed", "-1"], "--seed"),
    (["x", "--seed"], "'--seed' requires an argument"),
    (["x", "--stop", ""], "stop holds an empty text"),
    (["x", "--threads", "0"], "--threads must be 1 or more, got 0"),
    (["x", "--dtype", "bfloat"], "unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
    (["x", "--device", "gpu"], "unknown device 'gpu'"),
    (["x", "--device", "cuda:99"], "is not on this machine"),
    (["x", "--rule", "speculativ"], "unknown rule 'speculativ'; did you mean 'speculative'?"),
    (["x", "--rule", "speculative,lenience=0"], "lenience must be above 0 and at most 1, got 0"),
    (["x", "--drafter", "prompt-lokup"], "unknown drafter 'prompt-lokup'; did you mean 'prompt-lookup'?"),
    (["x", "--drafter", "prompt-lookup,max_ngrams=3"], "did you mean 'max_ngram'?"),
    (["x", "--drafter", "draft:./nowhere"], "there is no folder './nowhere'"),
    (["x", "--chat"], "has no chat template"),
    (["x", "y"], "unexpected extra argument"),
    ([""], "the prompt is empty"),
    (["\udcff"], "the prompt is not UTF-8 text"),
    (["too long " * 100], "the prompt has 900 tokens"),
    (["x", "--prompts", "good.txt"], "either a PROMPT or --prompts FILE, not both"),
    (["--prompts", "absent.txt"], "there is no prompts file 'absent.txt'"),
    (["--prompts", "folder"], "must be .jsonl"),
    (["--prompts", "prompts.csv"], "must be .jsonl"),
    (["--prompts", "empty.txt"], "holds no prompt"),
    (["--prompts", "latin.txt"], "is not UTF-8 text (byte 3)"),
    (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: not JSON"),
    (["--prompts", "list.jsonl"], "list.jsonl, line 1: a list, not an object"),
    (["--prompts", "other.jsonl"], 'other.jsonl, line 1: the object needs "prompt" or "text"'),
    (["--prompts", "void.jsonl"], "void.jsonl, line 1: the prompt is empty"),
    (["x", "--model", "./nowhere"], "there is no folder './nowhere'"),
    (["x", "--model", "folder"], "is a folder without config.json"),
    (["x", "--model", "good.txt"], "is a file"),
    (["x", "--model", "~nobody-of-that-name/model"], "'~nobody-of-that-name/model' names the home folder of nobody"),
    (["x", "--model", "embedded:targt"], "did you mean 'target'?"),
    (["x", "--drafters-dir", "absent"], "--drafters-dir must be a folder of drafters, and 'absent' is no folder"),
    (["x", "--drafter", "portfolio(prompt-lookup;auto)"], "has 'auto' as a member; name single drafters"),
    (["x", "--drafter", "portfolio(prompt-lookup"], "has a parenthesis without its second"),
]


@pytest.mark.parametrize(("arguments", "phrase"), BAD, ids=lambda value: " ".join(value)[:40] if value else "")
def test_generate(
    run: Run, target: str, files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], phrase: str
) -> None:
    monkeypatch.chdir(files)
    model = [] if "--model" in arguments else ["--model", target]
    result = run("generate", *model, *arguments)
    assert (result.status, result.out) == (2, "")
    assert_one_line(result.err, phrase)


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["generat"], "no such command 'generat'. Did you mean 'generate'?"),
        (["--jsn"], "unknown option '--jsn'"),
        (["info", "--jsn"], "unknown option '--jsn'; did you mean '--json'?"),
        (["train"], "missing command"),
        (["train", "draft"], "missing option '--out'"),
        (["train", "draft", "--out", "new"], "nothing to train on"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--steps", "0"], "--steps must be 1 or more, got 0"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--length", "100"], "a multiple of --length"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--learning-rate", "0"], "--learning-rate must be"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--heads", "3"], "a multiple of twice the heads"),
        (["train", "draft", "--out", "good.txt", "--data", "good.txt"], "is a file"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--resume"], "holds no training"),
        (["train", "draft", "--out", "new", "--data", "good.txt", "--model", "folder"], "without config.json"),
    ],
    ids=lambda value: " ".join(value)[-40:],
)
def test_other_commands(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], phrase: str
) -> None:
    monkeypatch.chdir(files)
    result = run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert_one_line(result.err, phrase)


def assert_one_line(err: str, phrase: str) -> None:
    assert phrase in err
    assert err.startswith("truedraft: error: ") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(("terminal", "phrase"), [(True, "give a PROMPT"), (False, "standard input is empty")])
def test_nobody_gives_a_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, terminal: bool, phrase: str) -> None:
    stdin = io.StringIO("")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    result = run("generate")
    assert result.status == 2
    assert_one_line(result.err, phrase)


def test_standard_input_that_is_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    result = run("generate", "-")
    assert result.status == 2
    assert_one_line(result.err, "standard input is not utf-8 text (byte 3)")


def test_a_fault_of_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(generate, "_run", broken)
    monkeypatch.delenv("TRUEDRAFT_DEBUG", raising=False)
    assert main(["generate", "x"]) == 1
    assert_one_line(capsys.readouterr().err, "internal error: RuntimeError: first line second line; please report it")
    monkeypatch.setenv("TRUEDRAFT_DEBUG", "1")
    assert main(["generate", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_disk_that_is_full_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.md")

    monkeypatch.setattr(generate, "_run", full)
    assert main(["generate", "x"]) == 1
    assert_one_line(capsys.readouterr().err, "error: cannot read or write report.md (No space left on device)")


def test_an_interruption_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_run", interrupted)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "truedraft: interrupted\n"
