"""What none of the commands under `truedraft train` does, and what all of them say when they are interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.tiny import Result, Run
from truedraft.training import drafts, heads

ANSWERS = ("--tokens", "300", "--prompt-tokens", "16", "--answer-tokens", "12", "--steps", "3")
SMALL = {
    "draft": ("--steps", "4", "--width", "16"),
    "medusa": (*ANSWERS, "--heads", "2"),
    "redrafter": (*ANSWERS, "--length", "2"),
    "ngram": (),
}


def refused(result: Result, message: str) -> None:
    assert result.status == 2 and message in result.err, result.err
    assert result.complaint.count("\n") == 1


@pytest.mark.parametrize("kind", SMALL)
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
    words = ("train", kind, "--model", target, "--data", text, "--out", str(tmp_path / "out"), *SMALL[kind])
    result = run(*words, "--json")
    assert result.status == 130 and f"{told} begins again\n" in result.err
    assert result.record == {"command": f"train {kind}", "error": "interrupted", "status": 130, "field": None}
