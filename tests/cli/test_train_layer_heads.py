"""`truedraft train eagle`, `p-eagle`, `dflash`, `dflash2` and `dspark`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from cli.tiny import Run
from truedraft.training import evaluate
from truedraft.training.report import HeadReport


class Kind(NamedTuple):
    """Words for its training and its drafter, what it is not, and options that a training cannot go on with."""

    words: tuple[str, ...]
    options: str
    usual: str
    other: tuple[str, str]
    changes: tuple[str, ...]
    said: tuple[str, ...]


SMALL = (
    "--tokens", "200", "--prompt-tokens", "16", "--answer-tokens", "12", "--length", "2", "--steps", "2",
    "--draft-vocab", "40",
)  # fmt: skip
_BLOCK = ("--depth", "1", "--anchors", "4")
_CHANGED = ("--loss", "tv=2", "--anchors", "5"), ("--loss was", "and is now tv=2", "--anchors was 4 and is now 5")
KINDS = {
    "eagle": Kind(
        (), "", "no 3", ("medusa", "holds an EAGLE-3 head, not Medusa heads; use eagle:"),
        ("--loss", "tv", "--no-fc-norm"), ("--loss was kl and is now tv", "--fc-norm was True and is now False"),
    ),
    "p-eagle": Kind(
        ("--depth", "1"), "", "no 3", ("eagle", "holds a P-EAGLE head, not an EAGLE-3 head; use p-eagle:"),
        ("--loss", "tv", "--kept", "0.5"), ("--loss was kl and is now tv", "--kept was 0.7 and is now 0.5"),
    ),
    "dflash": Kind(_BLOCK, "", "no 5", ("eagle", "not an EAGLE-3 head; use dflash:"), *_CHANGED),
    "dflash2": Kind(
        (*_BLOCK, "--draft-vocab", "0", "--group", "8", "--rank", "4", "--selector-only"), "", "no 5",
        ("dflash", "holds a DFlash 2 head, not a DFlash head; use dflash2:"),
        (*_CHANGED[0], "--rank", "5"), (*_CHANGED[1], "--rank was 4 and is now 5"),
    ),
    "dspark": Kind(
        (*_BLOCK, "--markov", "8"), ",min_acceptance=0.1", "no 5", ("eagle", "not an EAGLE-3 head; use dspark:"),
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
    out, own = str(tmp_path / "head"), KINDS[kind]
    words = ("train", kind, "--model", target, "--data", text, "--out", out, "--keep-work", *SMALL, *own.words)
    refused = run(*words)
    assert refused.status == 2 and "--layer" in refused.err and f"there are {own.usual} that are usual" in refused.err
    for layer, said in (("99", "--layer must be 0 to 1 for this target, got 99"), ("-1", "-1")):
        beyond = run(*words, "--layer", "0", "--layer", layer)
        assert beyond.status == 2 and said in beyond.err
    words = (*words, "--layer", "0", "--layer", "1")
    result = run(*words, "--json")
    assert (result.status, result.complaint) == (0, ""), result.out
    record = result.record
    assert record["steps"] == 2 and record["command"] == f"train {kind}" and record["departures"] == []
    sizes = {(each["temperature"], each.get("num_speculative_tokens", 0)) for each in record["served"]}
    assert sizes == {(0, 2), (0, 0), (1, 2), (1, 0)}
    for phrase in ("tokens per target call", "right at each step", "promised"):
        assert phrase in result.out
    drafter = f"{kind}:{out},nodes=4,beams=2{own.options}"
    shown = run("generate", "hello", "--model", target, "--drafter", drafter, "--max-tokens", "8", "--compare")
    assert shown.status == 0 and "identical: yes" in shown.out
    (listed, *_) = run("info", "--model", target, "--json").record["drafters"]
    assert (listed["folder"], listed["kind"], listed["found"]) == (out, kind, "trained here")
    other, said = own.other
    mistaken = run("generate", "hello", "--model", target, "--drafter", f"{other}:{out}")
    assert mistaken.status != 0 and said in mistaken.err
    if kind == "eagle":
        assert run(*words, "--resume").status == 0
        monkeypatch.setattr(HeadReport, "departures", ["3 were promised and 2 served"])
        parted = run(*words, "--resume")
        assert parted.status == 1 and "promise not kept: 3 were promised and 2 served" in parted.out
        assert f"truedraft doctor --drafter eagle:{out} --model {target}" in parted.out
    changed = run(*words, "--resume", *own.changes)
    assert changed.status == 2 and all(phrase in changed.err for phrase in own.said)
