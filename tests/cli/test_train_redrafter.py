"""`truedraft train redrafter`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.kinds.redrafter import traced_beams as beam_trees
from truedraft.training import evaluate

SMALL = ("--tokens", "200", "--prompt-tokens", "16", "--answer-tokens", "12", "--length", "2", "--steps", "2")


def test_a_trained_head_drafts(
    run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_TOKENS", 8)
    monkeypatch.setattr(beam_trees, "_POSITIONS", 30)
    out = str(tmp_path / "head")
    words = ("train", "redrafter", "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL)
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, "")
    record = result.record
    assert record["steps"] == 2 and record["command"] == "train redrafter" and record["machine"]
    assert {(each["temperature"], each["nodes"]) for each in record["served"]} == {(0, 8), (0, 32), (1, 8), (1, 32)}
    for phrase in ("tokens per target call", "right at each place", f"--drafter redrafter:{out}"):
        assert phrase in result.out
    assert f"{record['served'][0]['mean_acceptance_length']:.2f}" in result.out
    drafter = f"redrafter:{out},beams=3,length=2,nodes=4"
    assert run("generate", "hello", "--model", target, "--drafter", drafter, "--max-tokens", "8").status == 0
    (listed, *_) = run("info", "--model", target, "--json").record["drafters"]
    assert (listed["folder"], listed["kind"], listed["found"]) == (out, "redrafter", "trained here")
    assert listed["belongs"] is True and listed["figures"]["served"] == record["served"]
    other = run("generate", "hello", "--model", target, "--drafter", f"medusa:{out}")
    assert other.status != 0 and "holds a recurrent drafter, not Medusa heads; use redrafter:" in other.err

    again = run(*words)
    assert again.status == 2 and "holds a training; add --resume" in again.err
    assert run(*words, "--resume").status == 0
    other = run(*words, "--resume", "--length", "3", "--free", "--loss", "tv", "--self-fed", "0.5", "--summed")
    assert other.status == 2 and other.complaint.count("\n") == 1
    for phrase in (
        "--length was 2 and is now 3", "--tied was True and is now False", "--loss was kl and is now tv",
        "--self-fed was 0.0 and is now 0.5", "--recurrent was True and is now False",
    ):  # fmt: skip
        assert phrase in other.err


def test_the_help_says_that_stage_2_is_medusas(run: Run) -> None:
    result = run("train", "redrafter", "--help")
    assert result.status == 0 and "--stage 2" in " ".join(result.out.split())
