"""`benchmarks/real_prompts.py`: what it asks `truedraft bench`, and what it keeps of the answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import real_prompts
from truedraft.cli.main import main


def test_sets_are_asked_in_turn_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([1.0, 2.0, 4.0, 8.0] * 2)
    asked: list[Sequence[str]] = []

    def run(words: Sequence[str], **_: Any) -> SimpleNamespace:
        asked.append(words)
        heat = float(words[words.index("--temperature") + 1])
        record = {"speedup": next(ratios), "model": "m", "sampling": {"temperature": heat}}
        record["systems"] = [
            {"name": "plain", "speedup": 1.0, "decisions": [1, 2]},
            {"name": "auto", "speedup": record["speedup"], "decisions": None},
        ]
        return SimpleNamespace(stdout="a table\n" + json.dumps(record) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "out.jsonl"
    words = ["--drafter", "a", "b", "--prompts", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["real_prompts.py", *words])
    real_prompts.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all("--drafter a --drafter b" in " ".join(words) and "--chat" in words for words in asked)
    assert [Path(words[words.index("--prompts") + 1]).name for words in asked] == [*real_prompts.SETS] * 2
    assert lines[0]["systems"] == [{"name": "plain", "speedup": 1.0}, {"name": "auto", "speedup": 1.0}]
    assert [line["speedup"] for line in lines[:4]] == [1.0, 2.0, 4.0, 8.0]
    expected = {"model": "m", "sets": 4, "geometric_mean_of_speedups": pytest.approx(64**0.25), "least": 1.0}
    expected["by_system"] = {"plain": 1.0, "auto": pytest.approx(64**0.25)}
    assert lines[4] == expected | {"temperature": 0.0} and lines[9] == expected | {"temperature": 0.8}


def test_the_command_knows_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends where the prompts are looked for, behind all options."""
    words = ["bench", "--model", "embedded:target", "--prompts", str(tmp_path / "mt_bench"), "--chat", "--json"]
    assert main([*words, "--limit", "6", "--max-tokens", "128", "--temperature", "0.8"]) == 2
    assert "mt_bench" in capsys.readouterr().err
