"""Scripts that measure drafters and models on texts: what they ask, what they write, and that counts come again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import acceptance
import peers_ours
import real_prompts
from support.embedded_models import share_embedded
from support.tiny_models import build, llama
from truedraft.cli.main import main
from truedraft.models.huggingface import HuggingFaceModel

QUESTIONS = {
    "mt_bench": {"question_id": 81, "turns": ["class Stack:"], "category": "coding"},
    "gsm8k": {"question": "import os", "answer": "4"},
}
Run = Callable[..., list[dict[str, Any]]]


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`acceptance.py` on the embedded target."""
    share_embedded(monkeypatch)

    def run(*words: str) -> list[dict[str, Any]]:
        out = tmp_path / "out.jsonl"
        more = ["--max-tokens", "12", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["acceptance.py", "embedded:target", *words, *more])
        acceptance.main()
        return lines_in(out)

    return run


@pytest.fixture
def on_questions(tmp_path: Path, accepted: Run) -> Run:
    """On two sets, in which each question is twice."""
    for name, question in QUESTIONS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "questions.jsonl").write_text(2 * (json.dumps(question) + "\n"))
    return lambda *words: accepted(*words, "--prompts", str(tmp_path), "--limit", "1", "--sets", *QUESTIONS)


def test_counts_are_told_by_set_and_come_again(on_questions: Run) -> None:
    words = ["none", "draft,num_speculative_tokens=3"]
    on_questions(*words)
    lines = on_questions(*words)
    assert lines[:4] == lines[4:], "noise is fixed"
    plain, drafted = lines[0], lines[2]
    assert [line["temperature"] for line in lines[:4]] == [0.0, 0.8] * 2 and drafted["drafter"] == words[1]
    assert plain["tokens_per_call"] == 1.0 < drafted["tokens_per_call"] <= 4.0
    found = [each["tokens_per_call"] for each in drafted["sets"].values()]
    assert [*drafted["sets"]] == [*QUESTIONS] and drafted["tokens_per_call"] == pytest.approx(sum(found) / 2)
    for name in QUESTIONS:
        assert drafted["sets"][name]["emitted_tokens"] == plain["sets"][name]["emitted_tokens"] > 0
        assert drafted["sets"][name]["accepted_tokens"] <= drafted["sets"][name]["draft_tokens"]


def test_pieces_of_a_text_are_sets_by_their_lengths(tmp_path: Path, accepted: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n\n\nclass Stack:\n    def __init__(self) -> None:\n        self.items = []\n" * 40)
    drafters, lengths = ("draft", "draft,context=128"), ("--lengths", "64", "200")
    words = (*drafters, "--text", str(text), *lengths, "--alone", "--limit", "2", "--temperatures", "0")
    whole, bounded = (line["sets"] for line in accepted(*words))
    assert [*whole] == [*bounded] == ["64 tokens", "200 tokens"]
    seconds = [each.pop("decode_s") for sets in (whole, bounded) for each in sets.values()]
    assert min(seconds) > 0 and whole["64 tokens"] == bounded["64 tokens"], "nothing is dropped of a short text"
    assert bounded["200 tokens"]["emitted_tokens"] == whole["200 tokens"]["emitted_tokens"]


def test_sets_are_asked_in_turn_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([1.0, 2.0, 4.0, 8.0] * 2)
    asked: list[Sequence[str]] = []

    def run(words: Sequence[str], **_: Any) -> SimpleNamespace:
        asked.append(words)
        heat, ratio = float(words[words.index("--temperature") + 1]), next(ratios)
        systems = [{"name": "plain", "speedup": 1.0, "decisions": [1]}, {"name": "a", "speedup": ratio, "decisions": 0}]
        record = {"speedup": ratio, "model": "m", "sampling": {"temperature": heat}, "systems": systems}
        return SimpleNamespace(stdout="a table\n" + json.dumps(record) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "out.jsonl"
    words = ["--drafter", "a", "b", "--prompts", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["real_prompts.py", *words])
    real_prompts.main()
    lines = lines_in(out)
    assert all("--drafter a --drafter b" in " ".join(words) and "--chat" in words for words in asked)
    assert [Path(words[words.index("--prompts") + 1]).name for words in asked] == [*real_prompts.SETS] * 2
    assert lines[0]["systems"] == [{"name": "plain", "speedup": 1.0}, {"name": "a", "speedup": 1.0}]
    assert [line["speedup"] for line in lines[:4]] == [1.0, 2.0, 4.0, 8.0]
    expected = {"model": "m", "sets": 4, "geometric_mean_of_speedups": pytest.approx(64**0.25), "least": 1.0}
    expected["by_system"] = {"plain": 1.0, "a": pytest.approx(64**0.25)}
    assert lines[4] == expected | {"temperature": 0.0} and lines[9] == expected | {"temperature": 0.8}


def test_the_command_knows_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends where the prompts are looked for, behind all options."""
    words = ["bench", "--model", "embedded:target", "--prompts", str(tmp_path / "mt_bench"), "--chat", "--json"]
    assert main([*words, "--limit", "6", "--max-tokens", "128", "--temperature", "0.8"]) == 2
    assert "mt_bench" in capsys.readouterr().err


@torch.inference_mode()
def test_a_piece_of_text_surprises_by_its_log_probabilities() -> None:
    model, ids = build(llama(), seed=1), torch.arange(1, 24) * 37 % 97
    expected = model(ids[None], labels=ids[None]).loss.item()
    found = peers_ours.surprises(HuggingFaceModel(model, None, "small"), ids)
    assert len(found) == 22 and found.mean().item() == pytest.approx(expected, rel=1e-4)
