"""`truedraft train draft`; what no training does, and what all say when they are interrupted."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Result, Run
from truedraft import load_model
from truedraft.drafters import registry
from truedraft.training import drafts, evaluate, heads
from truedraft.training.drafts import StreamObjective
from truedraft.training.loop import checkpoint_of
from truedraft.training.workspace import exclusive_access

SMALL = ("--steps", "4", "--length", "16", "--decay-length", "32", "--tokens-per-step", "64", "--width", "16")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the end takes most of the time of these tests."""
    monkeypatch.setattr(evaluate, "_TOKENS", 4)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(100)))
    return str(file)


def test_a_trained_draft_drafts(
    run: Run, target: str, text: str, tmp_path: Path, registry_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "draft")
    words = ("train", "draft", "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL)
    result = run(*words, "--json").silent
    record = result.record
    assert record["steps"] == 4 and record["tokens"] == 256 and 0 < record["held_out"]["alpha"] <= 1
    assert "alpha" in result.out and "greedy agreement" in result.out
    assert run("generate", "hello", "--model", target, "--drafter", f"draft:{out}", "--max-tokens", "8").status == 0

    about = json.loads((Path(out) / "drafter.json").read_text())
    assert about["kind"] == "draft" and about["target"]["name"] == target
    assert about["target"]["fingerprint"] == load_model(target, dtype="float32").fingerprint
    assert about["figures"]["alpha"] == record["held_out"]["alpha"]
    assert about["figures"]["served"][0]["num_speculative_tokens"] == 4
    assert record["registered"] is True and f"noted in {registry_of_its_own}: --drafter auto" in result.out
    found = run("generate", "hello", "--model", target, "--max-tokens", "8", "--json")
    assert found.status == 0 and found.record["drafters"] == ["draft", "prompt-lookup"], found.err

    monkeypatch.setattr(registry, "_LEAST_TOKENS", 9.0)
    found = run("generate", "hello", "--model", target, "--max-tokens", "8", "--json")
    assert found.record["drafters"] == ["prompt-lookup"] and "is left out: it brought" in found.err
    assert "auto leaves it out, for that cannot pay" in " ".join(run("info").out.split())

    run(*words).refused("holds a training; add --resume")
    assert run(*words, "--resume").status == 0
    other = run(*words, "--resume", "--width", "32", "--learning-rate", "0.1", "--length", "32")
    assert other.status == 2 and other.err.count("\n") == 1
    for phrase in ("--width was 16 and is now 32", "--learning-rate was 0.002 and is now 0.1", "--length was 16"):
        assert phrase in other.err


def test_ctrl_c_saves_says_where_and_the_same_command_goes_on(
    run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate, calls = StreamObjective.accumulate, itertools.count()

    def interrupted(*arguments: Any) -> dict[str, float]:
        if next(calls) == 5:  # three steps are a trial
            signal.raise_signal(signal.SIGINT)
        return accumulate(*arguments)

    out, place = tmp_path / "out", tmp_path / "out" / "work" / "checkpoint.pt"
    words = ("train", "draft", "--model", target, "--data", text, "--out", str(out), "--keep-work", *SMALL)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    with monkeypatch.context() as patch:
        patch.setattr(StreamObjective, "accumulate", interrupted)
        result = run(*words)
    signal.signal(signal.SIGINT, handler)
    assert result.status == 130 and checkpoint_of(place.parent)[0] == 3
    saved, last = result.err.splitlines()[-2:]
    assert saved.startswith("truedraft: step 3 of 4, loss ") and saved.endswith(f" left; saved in {place}")
    assert ", 192 tokens, about " in saved
    assert last == (
        f"truedraft: interrupted; the training is saved in {place} as of step 3; the same command with --resume goes "
        "on from there"
    )
    result = run(*words, "--resume", "--json")
    assert result.status == 0 and result.record["steps"] == 4
    assert len((place.parent / "log.jsonl").read_text().splitlines()) == 4


def test_a_second_training_in_one_folder_is_refused(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    busy = f"truedraft: error: process {os.getpid()} is training in {str(out)!r}: wait until it ends, end it, or name"
    with exclusive_access(out / "work"):
        (out / "work" / "log.jsonl").touch()
        for more in ((), ("--resume",), ("--clean",)):
            result = run("train", "draft", "--model", target, "--data", text, "--out", str(out), *SMALL, *more)
            assert (result.status, result.err) == (2, f"{busy} a new folder\n")


def test_sequences_are_as_short_as_a_step_and_a_context_want(run: Run, target: str, text: str, tmp_path: Path) -> None:
    words = ("train", "draft", "--model", target, "--data", text, "--steps", "2", "--width", "16")
    result = run(*words, "--out", str(tmp_path / "short"), "--tokens-per-step", "96").silent
    result = run(*words, "--out", str(tmp_path / "long"), "--tokens-per-step", "1024", "--length", "64")
    said = "note: the context is 512 tokens, so training uses sequences of 64, and of 512 while the rate decays\n"
    assert result.status == 0 and f"truedraft: {said}" in result.err


ANSWERS = ("--tokens", "300", "--prompt-tokens", "16", "--answer-tokens", "12", "--steps", "3")
SIZES = {
    "draft": ("--steps", "4", "--width", "16"),
    "medusa": (*ANSWERS, "--heads", "2"),
    "redrafter": (*ANSWERS, "--length", "2"),
    "ngram": (),
}


def refused(result: Result, message: str) -> None:
    assert result.status == 2 and message in result.err, result.err
    assert result.complaint.count("\n") == 1


@pytest.mark.parametrize("kind", SIZES)
def test_a_model_is_not_overwritten_and_a_file_is_no_folder(run: Run, target: str, text: str, kind: str) -> None:
    words = ("train", kind, "--model", target, "--data", text)
    refused(run(*words, "--out", target), "holds a model, which would be overwritten")
    refused(run(*words, "--out", text), "is a file; name a folder")


@pytest.mark.parametrize("kind", ["medusa", "ngram"])
def test_another_target_than_the_embedded_one_needs_text(run: Run, target: str, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    refused(run("train", kind, "--model", target, "--out", str(out)), "with --data FILE")
    (empty := tmp_path / "empty.txt").write_text("\n")
    refused(run("train", kind, "--model", target, "--data", str(empty), "--out", str(out)), "holds no text")
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "function", "told"),
    [
        ("draft", (drafts, "train_draft"), "truedraft: interrupted before the first checkpoint; the same command"),
        ("medusa", (heads, "train_heads"), "before anything was written; the same command"),
        ("redrafter", (heads, "train_heads"), "before anything was written; the same command"),
    ],
    ids=["draft", "medusa", "redrafter"],
)
def test_ctrl_c_says_how_to_go_on(
    run: Run,
    target: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    function: Sequence[object],
    told: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*function, interrupted)
    words = ("train", kind, "--model", target, "--data", text, "--out", str(tmp_path / "out"), *SIZES[kind])
    result = run(*words, "--json")
    assert result.status == 130 and f"{told} begins again\n" in result.err
    assert result.record == {"command": f"train {kind}", "error": "interrupted", "status": 130, "field": None}
