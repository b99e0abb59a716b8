"""`truedraft train` of each kind of heads but Medusa's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from cli.tiny import Run
from truedraft.kinds.redrafter import traced_beams
from truedraft.training import evaluate
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
    monkeypatch.setattr(evaluate, "_TOKENS", 8)
    if kind != "eagle":  # a few answers may all have no accepted token, and no spread
        monkeypatch.setattr(HeadReport, "departures", [])
    monkeypatch.setattr(traced_beams, "_POSITIONS", 30)
    out, own = str(tmp_path / "head"), KINDS[kind]
    words = ["train", kind, "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL.split()]
    words += own.words.split()
    if own.usual:
        refused = run(*words)
        assert refused.status == 2 and "--layer" in refused.err
        assert f"there are {own.usual} that are usual" in refused.err
        for layer, said in (("99", "--layer must be 0 to 1 for this target, got 99"), ("-1", "-1")):
            beyond = run(*words, "--layer", "0", "--layer", layer)
            assert beyond.status == 2 and said in beyond.err
        words += ["--layer", "0", "--layer", "1"]
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, ""), result.out
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
    again = run(*words)
    assert again.status == 2 and "holds a training; add --resume" in again.err
    changed = run(*words, "--resume", *own.changes.split())
    assert changed.status == 2 and changed.complaint.count("\n") == 1
    assert all(phrase in changed.err for phrase in own.said)


def test_the_help_says_that_stage_2_is_medusas(run: Run) -> None:
    result = run("train", "redrafter", "--help")
    assert result.status == 0 and "--stage 2" in " ".join(result.out.split())
