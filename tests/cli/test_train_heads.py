"""`truedraft train` of each kind of heads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.tiny import Run
from truedraft.cli.train import how_to_go_on
from truedraft.cli.train_options import JobOptions
from truedraft.kinds.redrafter import traced_beams
from truedraft.training import evaluate, heads
from truedraft.training.report import HeadReport


class Kind(NamedTuple):
    """Words for its training and its drafter, what it is not, and options that a training cannot go on with."""

    words: str
    options: str
    usual: str  # number of layers that it reads; "" for one that reads none
    other: tuple[str, str]
    changes: str
    said: tuple[str, ...]


SMALL = "--tokens 200 --prompt-tokens 16 --answer-tokens 12 --length 2 --steps 2"
_LAYERS = "--draft-vocab 40"
_BLOCK = "--depth 1 --anchors 4 --window 8"
_CHANGED = "--loss tv=2 --anchors 5", ("--loss was", "and is now tv=2", "--anchors was 4 and is now 5")
KINDS = {
    "redrafter": Kind(
        "", ",length=2", "", ("medusa", "holds a recurrent drafter, not Medusa heads; use redrafter:"),
        "--length 3 --free --loss tv --self-fed 0.5 --summed",
        (
            "--length was 2 and is now 3", "--tied was True and is now False", "--loss was kl and is now tv",
            "--self-fed was 0.0 and is now 0.5", "--recurrent was True and is now False",
        ),
    ),
    "eagle": Kind(
        f"{_LAYERS} --window 8 --sink 2", ",context=128", "no 3",
        ("medusa", "holds an EAGLE-3 head, not Medusa heads; use eagle:"),
        "--loss tv --no-fc-norm", ("--loss was kl and is now tv", "--fc-norm was True and is now False"),
    ),
    "p-eagle": Kind(
        f"{_LAYERS} --depth 1", "", "no 3", ("eagle", "holds a P-EAGLE head, not an EAGLE-3 head; use p-eagle:"),
        "--loss tv --kept 0.5", ("--loss was kl and is now tv", "--kept was 0.7 and is now 0.5"),
    ),
    "dflash": Kind(f"{_LAYERS} {_BLOCK}", "", "no 5", ("eagle", "not an EAGLE-3 head; use dflash:"), *_CHANGED),
    "dflash2": Kind(
        f"{_BLOCK} --draft-vocab 0 --group 8 --rank 4 --selector-only", "", "no 5",
        ("dflash", "holds a DFlash 2 head, not a DFlash head; use dflash2:"),
        f"{_CHANGED[0]} --rank 5", (*_CHANGED[1], "--rank was 4 and is now 5"),
    ),
    "dspark": Kind(
        f"{_LAYERS} {_BLOCK} --markov 8", ",min_acceptance=0.1", "no 5", ("eagle", "not an EAGLE-3 head; use dspark:"),
        *_CHANGED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_drafts(
    kind: str, run: Run, target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "eagle":  # a few answers may all have no accepted token, and no spread
        monkeypatch.setattr(HeadReport, "departures", [])
    monkeypatch.setattr(traced_beams, "_POSITIONS", 30)
    out, own = str(tmp_path / "head"), KINDS[kind]
    words = ["train", kind, "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL.split()]
    words += own.words.split()
    if own.usual:
        refused = run(*words).refused("--layer")
        assert f"there are {own.usual} that are usual" in refused.err
        for layer, said in (("99", "--layer must be 0 to 1 for this target, got 99"), ("-1", "-1")):
            run(*words, "--layer", "0", "--layer", layer).refused(said)
        words += ["--layer", "0", "--layer", "1"]
    result = run(*words, "--json").silent
    record = result.record
    assert record["steps"] == 2 and record["command"] == f"train {kind}" and record["departures"] == []
    size, sizes = ("num_speculative_tokens", (0, 2)) if own.usual else ("nodes", (8, 32))
    served = {(each["temperature"], each.get(size, 0)) for each in record["served"]}
    assert served == {(temperature, each) for temperature in (0, 1) for each in sizes}
    place = "right at each step" if own.usual else "right at each place"
    for phrase in ("tokens per target call", place, "promised", f"--drafter {kind}:{out}"):
        assert phrase in result.out
    assert f"{record['served'][0]['mean_acceptance_length']:.2f}" in result.out
    drafter = f"{kind}:{out},nodes=4,beams=2{own.options}"
    shown = run("generate", "hello", "--model", target, "--drafter", drafter, "--max-tokens", "8", "--compare")
    assert shown.status == 0 and "identical: yes" in shown.out
    (listed, *_) = run("info", "--model", target, "--json").record["drafters"]
    assert (listed["folder"], listed["kind"], listed["found"]) == (out, kind, "trained here")
    assert listed["belongs"] is True and listed["figures"]["served"] == record["served"]
    other, said = own.other
    mistaken = run("generate", "hello", "--model", target, "--drafter", f"{other}:{out}")
    assert mistaken.status != 0 and said in mistaken.err
    if kind == "eagle":
        assert run(*words, "--resume").status == 0
        monkeypatch.setattr(HeadReport, "departures", ["3 were promised and 2 served"])
        parted = run(*words, "--resume")
        assert parted.status == 1 and "promise not kept: 3 were promised and 2 served" in parted.out
        assert f"truedraft doctor --drafter eagle:{out} --model {target}" in parted.out
    run(*words).refused("holds a training; add --resume")
    changed = run(*words, "--resume", *own.changes.split())
    assert changed.status == 2 and changed.complaint.count("\n") == 1
    assert all(phrase in changed.err for phrase in own.said)


def test_the_help_says_that_stage_2_is_medusas(run: Run) -> None:
    result = run("train", "redrafter", "--help")
    assert result.status == 0 and "--stage 2" in " ".join(result.out.split())


MEDUSA = ("--tokens", "300", "--prompt-tokens", "16", "--answer-tokens", "12", "--heads", "2", "--steps", "3")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the end takes most of the time of these tests."""
    monkeypatch.setattr(evaluate, "_TOKENS", 8)


def test_trained_heads_draft(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "heads")
    words = ("train", "medusa", "--model", target, "--data", text, "--out", out, "--keep-work", *MEDUSA)
    result = run(*words, "--json").silent
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
    assert (
        run("generate", "hello", "--model", target, "--drafter", f"medusa:{out},nodes=4", "--max-tokens", "8").status
        == 0
    )

    run(*words).refused("holds a training; add --resume")
    other = run(*words, "--resume", "--heads", "3", "--free", "--learning-rate", "0.5")
    assert other.status == 2 and other.complaint.count("\n") == 1
    for phrase in ("--heads was 2 and is now 3", "--tied was True and is now False", "--learning-rate was"):
        assert phrase in other.err
    other = run(*words, "--resume", "--answer-tokens", "13", "--temperature", "1")
    assert "--answer-tokens was 12 and is now 13; --temperature was (0.0, 1.0) and is now (1.0,)" in other.err
    run(*words, "--resume", "--stage", "2").refused("finished heads of stage 1", f"--start-from {out}")
    other = run(*words, "--resume", "--prompt-tokens", "15")
    said = "the prompts (--data, --held-out, --tokens, --prompt-tokens, --minutes) was"
    assert other.status == 2 and said in other.err

    words = tuple(word for word in words if word != "--keep-work")
    assert run(*words, "--resume").status == 0
    kept = sorted(path.name for path in Path(out).iterdir())
    assert kept == ["README.md", "config.json", "heads.safetensors", "log.jsonl", "trees.json"]
    run(*words).refused("holds a model, which would be overwritten")
    card = (Path(out) / "README.md").read_text()
    assert "license: other\n" in card and "is under the licence of that: which its files do not name" in card


@pytest.mark.slow
def test_stage_2_reports_the_targets_own_loss(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "heads")
    few = ("--stage", "2", "--joint-steps", "1", "--lora-rank", "0")
    result = run("train", "medusa", "--model", target, "--data", text, "--out", out, *MEDUSA, *few, "--json").silent
    joint = result.record["joint"]
    assert f"{joint['loss_before']:.4f} nats per token, and is {joint['loss_after']:.4f}" in result.out
    assert f"--model {out}/target --drafter medusa:{out}" in result.out
    assert run("generate", "x", "--model", f"{out}/target", "--drafter", f"medusa:{out},nodes=2").status == 0
    belongs = {
        name: [each["belongs"] for each in run("info", "--model", name, "--json").record["drafters"][:1]]
        for name in (target, f"{out}/target")
    }
    assert belongs == {target: [False], f"{out}/target": [True]}, "these heads are for the new target"
    first = run("train", "medusa", "--model", target, "--data", text, "--out", out, *MEDUSA, "--resume")
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
