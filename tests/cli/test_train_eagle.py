"""`truedraft train eagle`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.training import evaluate
from truedraft.training.report import HeadReport

SMALL = (
    "--tokens", "200", "--prompt-tokens", "16", "--answer-tokens", "12", "--length", "2", "--steps", "2",
    "--draft-vocab", "40",
)  # fmt: skip


def test_a_trained_head_drafts(
    run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_TOKENS", 8)
    out = str(tmp_path / "head")
    words = ("train", "eagle", "--model", target, "--data", text, "--out", out, *SMALL)
    refused = run(*words)
    assert refused.status == 2 and "--layer" in refused.err and "there are no 3 that are usual" in refused.err
    words = (*words, "--layer", "0", "--layer", "1")
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, "")
    record = result.record
    assert record["steps"] == 2 and record["command"] == "train eagle"
    sizes = {(each["temperature"], each.get("num_speculative_tokens", 0)) for each in record["served"]}
    assert sizes == {(0, 2), (0, 0), (1, 2), (1, 0)} and record["departures"] == []
    for phrase in ("tokens per target call", "right at each step", "promised"):
        assert phrase in result.out
    drafter = f"eagle:{out},nodes=4,beams=2"
    shown = run("generate", "hello", "--model", target, "--drafter", drafter, "--max-tokens", "8", "--compare")
    assert shown.status == 0 and "identical: yes" in shown.out
    (listed, *_) = run("info", "--model", target, "--json").record["drafters"]
    assert (listed["folder"], listed["kind"], listed["found"]) == (out, "eagle", "trained here")
    other = run("generate", "hello", "--model", target, "--drafter", f"medusa:{out}")
    assert other.status != 0 and "holds an EAGLE-3 head, not Medusa heads; use eagle:" in other.err
    assert run(*words, "--resume").status == 0
    monkeypatch.setattr(HeadReport, "departures", ["3 were promised and 2 served"])
    parted = run(*words, "--resume")
    assert parted.status == 1 and "promise not kept: 3 were promised and 2 served" in parted.out
    assert f"truedraft doctor --drafter eagle:{out} --model {target}" in parted.out
    changed = run(*words, "--resume", "--loss", "tv", "--no-fc-norm")
    assert changed.status == 2
    for phrase in ("--loss was kl and is now tv", "--fc-norm was True and is now False"):
        assert phrase in changed.err
