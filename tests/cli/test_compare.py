"""`truedraft generate --compare`, and what it computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Result
from truedraft import load_model
from truedraft.cli import compare
from truedraft.cli.differences import find_difference
from truedraft.cli.measure import Comparison, Pair, Side, repeated_ngrams
from truedraft.core.counters import Counters
from truedraft.engine import Answer
from truedraft.engine.answer import Timing

Run = Callable[..., Result]
WORDS = ("--compare", "--json", "--max-tokens", "20", "--dtype", "float32", "--ignore-eos")


def answer(tokens: list[int], seconds: float = 1.0) -> Answer:
    counters = Counters(target_calls=len(tokens) - 1, emitted_tokens=len(tokens) - 1, prefill_tokens=1)
    return Answer("", tokens, "length", counters, [], 0, 3, Timing(seconds / 10, seconds))


def pair(plain_s: float, speculative_s: float, tokens: list[int] | None = None) -> Pair:
    plain, speculative = answer([1, 2, 3, 4], plain_s), answer(tokens or [1, 2, 3, 4], speculative_s)
    return Pair("x", Side([plain]), Side([speculative]))


def test_one_prompt(run: Run, target: str) -> None:
    result = run("generate", "hello", "--model", target, "--drafter", f"draft:{target}", *WORDS)
    assert result.status == 0
    record = result.record
    assert record["identical"] is True and record["identical_prompts"] == 1 and record["runs"] == 3
    assert record["plain"]["target_calls"] == 19 and record["speculative"]["target_calls"] < 8
    assert record["speculative"]["draft_acceptance_rate"] == 1.0
    assert record["tokens_per_s"] == record["speculative"]["tokens_per_s"]
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["plain"]["tokens_per_s"])
    for words in ("hello", "plain", "speculative", "tokens per second", "target calls", "mean acceptance length"):
        assert words in result.out
    assert "identical: yes\n" in result.out and "repeated 8-grams" in result.out


def test_many_prompts(run: Run, target: str, draft: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": f"p{i}", "text": "abc" * (i + 1)}) for i in range(4)))
    result = run("generate", "--prompts", str(file), "--model", target, "--drafter", f"draft:{draft}", *WORDS)
    assert result.status == 0
    record = result.record
    assert [each["id"] for each in record["prompts"]] == ["p0", "p1", "p2", "p3"]
    assert all(each["identical"] and each["difference"] is None for each in record["prompts"])
    assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
    assert record["plain"]["target_calls"] == 4 * 19
    assert "identical: yes (4 of 4)" in result.out and "geometric mean" in result.out


@pytest.mark.parametrize(("extra", "identical"), [((), None), (("--coupled",), True)])
def test_temperature(run: Run, target: str, draft: str, extra: tuple[str, ...], identical: bool | None) -> None:
    words = ("--temperature", "0.8", "--drafter", f"draft:{draft}", *WORDS, *extra)
    result = run("generate", "hello", "--model", target, *words)
    assert result.status == 0
    assert result.record["identical"] is identical
    assert ("same distribution; tokens differ" in result.out) is (identical is None)


def test_different_tokens_fail_and_are_explained(run: Run, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(*arguments: Any) -> tuple[Side, Side]:
        plain, speculative = measure(*arguments)
        wrong = list(plain.token_ids)
        wrong[5] = 100 if wrong[5] != 100 else 101
        return plain, Side([dataclasses.replace(each, token_ids=wrong) for each in speculative.answers])

    measure = compare.measure
    monkeypatch.setattr(compare, "measure", tampered)
    result = run("generate", "hello", "--model", target, *WORDS)
    assert result.status == 1
    assert result.record["identical"] is False
    assert "identical: no" in result.out and "differs at token 5" in result.out
    difference = result.record["prompts"][0]["difference"]
    assert difference["position"] == 5 and difference["margin"] >= 0
    assert difference["best"][0]["id"] == difference["plain"]["id"]  # plain decoding took the argmax
    assert difference["plain"]["logit"] - difference["best"][1]["logit"] == pytest.approx(difference["margin"])


def test_a_failing_prompt_is_told_and_left_out(run: Run, target: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{'too long' * 100}\nfine\n")
    result = run("generate", "--prompts", str(file), "--model", target, *WORDS)
    assert result.status == 1
    assert result.record["failed_prompts"] == 1 and [each["id"] for each in result.record["prompts"]] == ["2"]
    assert "error: prompt 1: the prompt has 800 tokens" in result.err


def test_ctrl_c_keeps_what_was_measured(run: Run, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(*arguments: Any) -> tuple[Side, Side]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    measure = compare.measure
    monkeypatch.setattr(compare, "measure", interrupted)
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\n")
    result = run("generate", "--prompts", str(file), "--model", target, *WORDS)
    assert result.status == 130
    assert "interrupted after 1 of 3 prompts" in result.err and len(result.record["prompts"]) == 1


def test_an_answer_that_ends_early_differs_there(target: str) -> None:
    model = load_model(target, dtype="float32")
    difference = find_difference(model, "hello", [7, 8], [7, 8, 9])
    assert difference is not None
    assert difference.position == 2 and difference.plain.id is None and difference.speculative.id == 9
    assert "(end)" in difference.describe()
    assert find_difference(model, "hello", [7, 8], [7, 8]) is None


def test_figures_of_many_prompts() -> None:
    comparison = Comparison([pair(2.0, 1.0), pair(1.0, 2.0), pair(4.0, 1.0)], must_agree=True)
    assert comparison.speedups == pytest.approx([2.0, 0.5, 4.0])
    assert comparison.speedup == pytest.approx(4.0 ** (1 / 3))
    assert comparison.share_faster == pytest.approx(2 / 3)
    assert comparison.identical is True
    assert comparison.total(lambda each: each.plain)["tokens_per_s"] == pytest.approx(2.0)
    assert comparison.total(lambda each: each.plain)["target_calls"] == 9
    assert comparison.repeated_8grams is None


def test_one_odd_prompt_makes_it_not_identical() -> None:
    pairs = [pair(1.0, 1.0), pair(1.0, 1.0, [1, 2, 3, 5])]
    assert Comparison(pairs, must_agree=True).identical is False
    assert Comparison(pairs, must_agree=True).identical_prompts == 1
    assert Comparison(pairs, must_agree=False).identical is None


def test_repeated_ngrams() -> None:
    assert repeated_ngrams([1, 2, 3], size=8) is None
    assert repeated_ngrams(list(range(20)), size=8) == 0.0
    assert repeated_ngrams([5] * 10, size=8) == pytest.approx(2 / 3)
