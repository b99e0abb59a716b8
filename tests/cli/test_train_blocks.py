"""`truedraft train dflash` and `truedraft train dspark`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.training import evaluate
from truedraft.training.report import HeadReport

SMALL = (
    "--tokens", "200", "--prompt-tokens", "16", "--answer-tokens", "12", "--length", "2", "--steps", "2",
    "--draft-vocab", "40", "--depth", "1", "--anchors", "4",
)  # fmt: skip
KINDS = {"dflash": ((), ""), "dspark": (("--markov", "8"), ",min_acceptance=0.1")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_drafts(
    kind: str, run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_TOKENS", 8)
    monkeypatch.setattr(HeadReport, "departures", [])  # a few answers may all have no accepted token, and no spread
    out, (more, options) = str(tmp_path / "head"), KINDS[kind]
    words = ("train", kind, "--model", target, "--data", text, "--out", out, *SMALL, *more)
    refused = run(*words)
    assert refused.status == 2 and "--layer" in refused.err and "there are no 5 that are usual" in refused.err
    words = (*words, "--layer", "0", "--layer", "1")
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, ""), result.out
    record = result.record
    assert record["steps"] == 2 and record["command"] == f"train {kind}"
    sizes = {(each["temperature"], each.get("num_speculative_tokens", 0)) for each in record["served"]}
    assert sizes == {(0, 2), (0, 0), (1, 2), (1, 0)}
    for phrase in ("tokens per target call", "right at each step", "promised"):
        assert phrase in result.out
    drafter = f"{kind}:{out},nodes=4,beams=2{options}"
    shown = run("generate", "hello", "--model", target, "--drafter", drafter, "--max-tokens", "8", "--compare")
    assert shown.status == 0 and "identical: yes" in shown.out
    (listed, *_) = run("info", "--model", target, "--json").record["drafters"]
    assert (listed["folder"], listed["kind"], listed["found"]) == (out, kind, "trained here")
    other = run("generate", "hello", "--model", target, "--drafter", f"eagle:{out}")
    assert other.status != 0 and f"not an EAGLE-3 head; use {kind}:" in other.err
    changed = run(*words, "--resume", "--loss", "tv=2", "--anchors", "5")
    assert changed.status == 2
    for phrase in ("--loss was", "and is now tv=2", "--anchors was 4 and is now 5"):
        assert phrase in changed.err
