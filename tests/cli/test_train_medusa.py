"""`truedraft train medusa`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.cli.train import how_to_go_on
from truedraft.cli.train_options import JobOptions
from truedraft.training import evaluate, heads

SMALL = ("--tokens", "300", "--prompt-tokens", "16", "--answer-tokens", "12", "--heads", "2", "--steps", "3")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the end takes most of the time of these tests."""
    monkeypatch.setattr(evaluate, "_TOKENS", 8)


def test_trained_heads_draft(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "heads")
    words = ("train", "medusa", "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL)
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, "")
    record = result.record
    assert record["steps"] == 3 and record["command"] == "train medusa" and record["machine"]
    assert [each["temperature"] for each in record["served"]] == sorted(e["temperature"] for e in record["served"])
    for phrase in ("tokens per target call", "promised by the tree", "heads right at temperature 0"):
        assert phrase in result.out
    assert f"{record['served'][0]['mean_acceptance_length']:.2f}" in result.out
    plan, saved = (line for line in result.err.splitlines() if "steps of training" in line or ": step " in line)
    assert "204 tokens to train on" in plan and "then come 3 steps of training" in plan
    assert re.fullmatch(
        rf"truedraft: step 3 of 3, loss [0-9.]+, 3,840 tokens; saved in {out}/work/checkpoint.pt", saved
    )
    answer = run("generate", "hello", "--model", target, "--drafter", f"medusa:{out},nodes=4", "--max-tokens", "8")
    assert answer.status == 0

    again = run(*words)
    assert again.status == 2 and "holds a training; add --resume" in again.err
    other = run(*words, "--resume", "--heads", "3", "--free", "--learning-rate", "0.5")
    assert other.status == 2 and other.complaint.count("\n") == 1
    for phrase in ("--heads was 2 and is now 3", "--tied was True and is now False", "--learning-rate was"):
        assert phrase in other.err
    other = run(*words, "--resume", "--answer-tokens", "13", "--temperature", "1")
    assert "--answer-tokens was 12 and is now 13; --temperature was (0.0, 1.0) and is now (1.0,)" in other.err
    other = run(*words, "--resume", "--stage", "2")
    assert other.status == 2 and "finished heads of stage 1" in other.err and f"--start-from {out}" in other.err
    other = run(*words, "--resume", "--prompt-tokens", "15")
    said = "the prompts (--data, --held-out, --tokens, --prompt-tokens, --minutes) was"
    assert other.status == 2 and said in other.err

    words = tuple(word for word in words if word != "--keep-work")
    assert run(*words, "--resume").status == 0
    kept = sorted(path.name for path in Path(out).iterdir())
    assert kept == ["README.md", "config.json", "heads.safetensors", "log.jsonl", "trees.json"]
    again = run(*words)
    assert again.status == 2 and "holds a model, which would be overwritten" in again.err
    card = (Path(out) / "README.md").read_text()
    assert "license: other\n" in card and "is under the licence of that: which its files do not name" in card


def test_stage_2_reports_the_targets_own_loss(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "heads")
    few = ("--stage", "2", "--joint-steps", "1", "--lora-rank", "0")
    result = run("train", "medusa", "--model", target, "--data", text, "--out", out, *SMALL, *few, "--json")
    assert (result.status, result.complaint) == (0, "")
    joint = result.record["joint"]
    assert f"{joint['loss_before']:.4f} nats per token, and is {joint['loss_after']:.4f}" in result.out
    assert f"--model {out}/target --drafter medusa:{out}" in result.out
    assert run("generate", "x", "--model", f"{out}/target", "--drafter", f"medusa:{out},nodes=2").status == 0
    belongs = {
        name: [each["belongs"] for each in run("info", "--model", name, "--json").record["drafters"][:1]]
        for name in (target, f"{out}/target")
    }
    assert belongs == {target: [False], f"{out}/target": [True]}, "these heads are for the new target"
    first = run("train", "medusa", "--model", target, "--data", text, "--out", out, *SMALL, "--resume")
    assert first.status == 2 and "holds a training of stage 2" in first.err


def test_ctrl_c_while_answers_are_written_says_that_they_are_kept(
    run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(heads, "train_heads", interrupted)
    (tmp_path / "out" / "work").mkdir(parents=True)
    result = run("train", "medusa", "--model", target, "--data", text, "--out", str(tmp_path / "out"), "--resume")
    assert result.status == 130 and "interrupted; the same command goes on" in result.err
    job = JobOptions(out=tmp_path / "out")
    told = "interrupted; the same command with --resume goes on, with the answers that are written"
    assert how_to_go_on(job, keeps_answers=True) == told
    (tmp_path / "out" / "work" / "checkpoint.pt").write_bytes(b"torn")
    assert "cannot read the checkpoint" in how_to_go_on(job, keeps_answers=True)
