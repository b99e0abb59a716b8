"""`benchmarks/acceptance.py`: counts by set, of plain decoding and a drafter, which a second run repeats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acceptance
from support.embedded_models import share_embedded

QUESTIONS = {
    "mt_bench": {"question_id": 81, "turns": ["class Stack:"], "category": "coding"},
    "gsm8k": {"question": "import os", "answer": "4"},
}


@pytest.fixture
def lines_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Each question is there twice."""
    share_embedded(monkeypatch)
    for name, question in QUESTIONS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "questions.jsonl").write_text(2 * (json.dumps(question) + "\n"))
    out = tmp_path / "out.jsonl"

    def run(*words: str) -> list[dict[str, Any]]:
        common = ["embedded:target", *words, "--prompts", str(tmp_path), "--limit", "1"]
        common += ["--sets", *QUESTIONS, "--max-tokens", "12", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["acceptance.py", *common])
        acceptance.main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_what_is_foretold_on_the_same_questions_is_served(lines_of: Callable[..., list[dict[str, Any]]]) -> None:
    (line,) = lines_of("draft,num_speculative_tokens=3", "--foretell", "--temperatures", "0")
    assert line["foretold"]["value"] == line["over_all"]["value"] > 1.0


def test_pieces_of_a_text_are_sets_by_their_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_embedded(monkeypatch)
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text("import os\n\n\nclass Stack:\n    def __init__(self) -> None:\n        self.items = []\n" * 40)
    words = ["embedded:target", "draft", "draft,context=128", "--text", str(text), "--lengths", "64", "200", "--alone"]
    words += ["--limit", "2", "--max-tokens", "12", "--temperatures", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *words])
    acceptance.main()
    whole, bounded = (json.loads(line)["sets"] for line in out.read_text().splitlines())
    assert [*whole] == [*bounded] == ["64 tokens", "200 tokens"] and all(
        each["decode_s"] > 0 for each in whole.values()
    )
    assert {name: each for name, each in whole["64 tokens"].items() if name != "decode_s"}.items() <= bounded[
        "64 tokens"
    ].items(), "nothing is dropped of a short text"
    assert bounded["200 tokens"]["emitted_tokens"] == whole["200 tokens"]["emitted_tokens"]


def test_counts_are_told_by_set_and_come_again(lines_of: Callable[..., list[dict[str, Any]]]) -> None:
    words = ["none", "draft,num_speculative_tokens=3"]
    lines_of(*words)
    lines = lines_of(*words)
    assert lines[:4] == lines[4:], "noise is fixed"
    plain, drafted = lines[0], lines[2]
    assert [line["temperature"] for line in lines[:4]] == [0.0, 0.8] * 2 and drafted["drafter"] == words[1]
    assert plain["tokens_per_call"] == 1.0 < drafted["tokens_per_call"] <= 4.0
    found = [each["tokens_per_call"] for each in drafted["sets"].values()]
    assert [*drafted["sets"]] == [*QUESTIONS] and drafted["tokens_per_call"] == pytest.approx(sum(found) / 2)
    for name in QUESTIONS:
        assert drafted["sets"][name]["emitted_tokens"] == plain["sets"][name]["emitted_tokens"] > 0
        assert drafted["sets"][name]["accepted_tokens"] <= drafted["sets"][name]["draft_tokens"]
