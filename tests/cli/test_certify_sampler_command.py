"""`truedraft certify sampler` as a user runs it: tables, exit status, reports, and one sentence for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.tiny import Run

OURS = "truedraft.measure.peers.samplers:"


def test_a_lossy_sampler_is_named_in_every_form(run: Run, tmp_path: Path) -> None:
    """In minutes that it does not need: a deviation is over when it repeats."""
    out = tmp_path / "report"
    done = run("certify", "sampler", f"{OURS}medusa", "--minutes", "60", "--seed", "3", "--out", str(out), "--json")
    assert done.status == 1, done.err
    record = done.record
    assert (record["command"], record["certified"]) == ("certify sampler", False)
    assert record["faults"] == ["typical acceptance"]
    assert record["seed"] == 3
    assert len(record["runs"]) == 2
    assert "checks failed (typical acceptance): tokens have the target's joint distribution" in done.out
    assert "smallest detectable" in done.out and "its worst world" in done.out
    assert "run 2: e-value" in done.err and "1e6 after" in done.err
    assert json.loads((out / "certificate.json").read_text()) == record
    page = (out / "certificate.md").read_text()
    assert page.startswith("# Certificate of a sampler\n\n**NO CERTIFICATE: 1 of ")
    assert "| parameters | draft_tokens, target_probs |" in page


def test_too_little_time_is_not_enough_evidence(run: Run) -> None:
    done = run("certify", "sampler", f"{OURS}eagle", "--minutes", "0.000001", "--json")
    assert done.status == 3, done.err
    assert done.record["undecided"] == ["tokens have the target's joint distribution"]
    assert "give more --minutes" in " ".join(done.out.split())


def test_a_function_of_ones_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keeps_everything.py").write_text(
        "import torch\n\ndef f(draft_tokens, target_probs):\n"
        "    return torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = run("certify", "sampler", "keeps_everything:f", "--minutes", "60", "--json")
    assert done.status == 1, done.err
    assert done.record["faults"] == ["keeps every drafted token"]


def test_a_crash_of_ours_is_no_deviation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr("truedraft.certify.samplers.certify_sampler", crash)
    done = run("certify", "sampler", f"{OURS}eagle", "--json")
    assert (done.status, done.record["status"]) == (3, 3)
    assert "ZeroDivisionError: in the middle" in done.record["error"]


def test_a_report_that_cannot_be_written_is_told_last(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was over in no time: 3 it stays."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    done = run("certify", "sampler", f"{OURS}eagle", "--minutes", "0.000001", "--out", str(tmp_path), "--json")
    assert done.status == 3
    assert done.record["undecided"]
    assert "No space left on device" in done.err
