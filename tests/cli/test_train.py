"""`truedraft train draft`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import Result
from truedraft.cli import train_draft as train
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
    assert result.status == 130
    assert result.err == (
        "truedraft: interrupted before the first checkpoint (after 20 steps); the same command begins again\n"
    )

    checkpoint = tmp_path / "out" / "work" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    words = ("train", "draft", "--model", target, "--data", text, "--out", str(tmp_path / "out"), *SMALL)
    result = run(*words, "--resume")
    assert result.err == "truedraft: interrupted; the same command goes on from the last checkpoint\n"


def test_where_an_interrupted_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "checkpoint.pt").touch()
    config = train._config({}, {"steps": 50, "tokens_per_step": 64, "length": 16, "decay_length": 16}, 1e-3, 0, "cpu")
    job = train.Job("m", [], [], tmp_path, resume=False)
    told = "interrupted; the same command with --resume goes on from step {} of 50"
    assert train._how_to_go_on(job, config, 39) == told.format(20)
    assert train._how_to_go_on(job, config, 50) == told.format(50)


def test_going_on_with_other_options_names_them(run: Run, target: str, text: str, tmp_path: Path) -> None:
    words = ("train", "draft", "--model", target, "--data", text, "--out", str(tmp_path / "draft"), *SMALL)
    first = run(*words)
    assert (first.status, first.err) == (0, "")
    result = run(*words, "--resume", "--width", "32", "--learning-rate", "0.1", "--length", "32")
    assert result.status == 2 and result.err.count("\n") == 1
    for phrase in ("--width was 16 and is now 32", "--learning-rate was 0.002 and is now 0.1", "--length was 16"):
        assert phrase in result.err


def test_a_short_step_takes_short_sequences(run: Run, target: str, text: str, tmp_path: Path) -> None:
    few = ("--steps", "2", "--tokens-per-step", "96", "--width", "16")
    result = run("train", "draft", "--model", target, "--data", text, "--out", str(tmp_path / "draft"), *few)
    assert (result.status, result.err) == (0, "")


def test_a_context_that_is_too_short_is_said(run: Run, target: str, text: str, tmp_path: Path) -> None:
    long = ("--steps", "2", "--tokens-per-step", "1024", "--length", "64", "--width", "16")
    result = run("train", "draft", "--model", target, "--data", text, "--out", str(tmp_path / "draft"), *long)
    assert result.status == 0
    assert result.err == (
        "truedraft: note: the context is 512 tokens, so training uses sequences of 64, "
        "and of 512 while the rate decays\n"
    )
