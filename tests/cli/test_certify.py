"""`truedraft certify stack` as a user runs it: table, Markdown, JSON, exit status, and one sentence for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.tiny import Run
from support.virtual_time import VirtualTime
from truedraft.errors import ModelError


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nab\nthe quick brown fox\n")
    return str(file)


def test_a_greedy_certificate_in_every_form(run: Run, target: str, prompts: str, tmp_path: Path) -> None:
    """In minutes that it does not need: a greedy certificate is over when all prompts are compared."""
    out = tmp_path / "report" / "deep"
    done = run(
        *("certify", "stack", "--model", target, "--drafter", "prompt-lookup", "--temperature", "0"),
        *("--prompts", prompts, "--minutes", "10", "--max-tokens", "16", "--batch", "2", "--out", str(out), "--json"),
    )
    assert done.status == 0, done.err
    record = done.record
    assert record["command"] == "certify stack"
    assert record["certified"] is True
    assert record["failures"] == []
    assert {finding["part"] for finding in record["findings"]} >= {"exact", "greedy and seeded", "negative controls"}
    assert record["sampling"]["temperature"] == 0.0
    assert record["batch"] == 2
    assert (
        "CERTIFIED: the rule is lossless in exact sums, answers are plain decoding's (temperature 0, batch 2)"
        in done.out
    )
    page = (out / "certificate.md").read_text()
    assert page.startswith("# Certificate\n\n**CERTIFIED")
    assert "| greedy, batch 2, float32 |" in page
    written = json.loads((out / "certificate.json").read_text())
    assert written == record


def test_no_time_is_no_certificate_but_says_what_is_missing(
    run: Run, target: str, draft: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly any token is sampled in so little time, so no fault is large enough to count: exit status 3."""
    VirtualTime(monkeypatch, step_s=0.02)
    done = run(
        *("certify", "stack", "--model", target, "--drafter", f"draft:{draft}", "--prompts", prompts),
        *("--minutes", "0.001", "--max-tokens", "8"),
    )
    assert done.status == 3
    assert " tokens a second are answered and tested, so in " in done.err
    assert "which is too little for a verdict: that takes 0.06, and about --minutes " in done.err
    assert "NO CERTIFICATE: not enough evidence" in done.out
    assert "give more minutes" in " ".join(done.out.replace("│", " ").split())


def test_a_lossy_rule_is_measured_and_that_is_done(
    run: Run, target: str, draft: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    VirtualTime(monkeypatch, step_s=0.02)
    done = run(
        *("certify", "stack", "--model", target, "--drafter", f"draft:{draft}", "--prompts", prompts, "--json"),
        *("--minutes", "0.05", "--max-tokens", "8", "--rule", "speculative,lenience=0.5"),
    )
    assert done.status == (3 if done.record["undecided"] else 0), done.err
    assert done.record["failures"] == []
    assert done.record["certified"] is False
    assert done.record["lossless"] is False
    assert "no certificate: the rule is lossy" in done.out
    divergence = next(f for f in done.record["findings"] if f["part"] == "divergence")
    low, high = divergence["total_variation_ci95"]
    assert low <= divergence["total_variation"] <= high


def crash(*_: object, **__: object) -> None:
    raise ModelError("the target broke")


def test_a_target_that_breaks_is_no_check_that_failed(
    run: Run, target: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.certify.certify", crash)
    done = run("certify", "stack", "--model", target, "--drafter", "prompt-lookup", "--prompts", prompts, "--json")
    assert (done.status, done.record["status"]) == (3, 3)
    again = "nothing was decided; run the same command again"
    assert done.record["error"] == f"the target broke; {again}"
    assert done.err == f"truedraft: error: {done.record['error']}\n"


@pytest.mark.parametrize("name", ["certificate.md", "certificate.json"])
def test_an_earlier_report_is_kept(run: Run, name: str, tmp_path: Path) -> None:
    """Told before anything is loaded: there is no such model."""
    (tmp_path / name).write_text("of an earlier run")
    done = run("certify", "stack", "--model", "nobody/nothing", "--out", str(tmp_path))
    assert done.status == 2
    assert len(done.err.strip().splitlines()) == 1
    assert f"holds {name} of an earlier run; name another folder with --out" in done.err
    assert (tmp_path / name).read_text() == "of an earlier run"
