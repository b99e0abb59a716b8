"""`truedraft train draft`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import Result
from truedraft.training import distill

Run = Callable[..., Result]
SMALL = ("--steps", "4", "--length", "16", "--decay-length", "32", "--tokens-per-step", "64", "--width", "16")


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(100)))
    return str(file)


def test_a_trained_draft_drafts(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "draft")
    words = ("train", "draft", "--model", target, "--data", text, "--out", out, *SMALL)
    result = run(*words, "--json")
    assert result.status == 0
    record = result.record
    assert record["steps"] == 4 and record["tokens"] == 256 and 0 < record["held_out"]["alpha"] <= 1
    assert "alpha" in result.out and "greedy agreement" in result.out
    answer = run("generate", "hello", "--model", target, "--drafter", f"draft:{out}", "--max-tokens", "8")
    assert answer.status == 0

    again = run(*words)
    assert again.status == 2 and "holds a training; add --resume" in again.err
    assert run(*words, "--resume").status == 0


def test_a_model_is_not_overwritten(run: Run, target: str, text: str) -> None:
    result = run("train", "draft", "--model", target, "--data", text, "--out", target)
    assert result.status == 2 and "holds a model, which would be overwritten" in result.err


def test_a_model_that_does_not_exist(run: Run, text: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere" / "model")
    result = run("train", "draft", "--model", nowhere, "--data", text, "--out", str(tmp_path / "out"), *SMALL)
    assert result.status == 2 and "truedraft: error: " in result.err and "nowhere" in result.err


def test_ctrl_c_says_how_to_go_on(
    run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(distill, "train_draft", interrupted)
    result = run("train", "draft", "--model", target, "--data", text, "--out", str(tmp_path / "out"), *SMALL)
    assert result.status == 130 and "--resume" in result.err
