"""`truedraft generate --compare`, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import Run, prompts_in
from truedraft import SamplingParams, load_model
from truedraft.cli.compare import Comparison, Pair, little_gained, repeated_ngrams, summaries
from truedraft.core.stats import Counters
from truedraft.measure.bench import Group, Row, find_difference
from truedraft.measure.bench.runs import SystemOutput

WORDS = ("--compare", "--json", "--max-tokens", "20", "--dtype", "float32", "--ignore-eos")


def row(system: str, prompt: str, seconds: float, tokens: tuple[int, ...]) -> Row:
    counters = Counters(target_calls=len(tokens) - 1, emitted_tokens=len(tokens) - 1, prefill_tokens=1)
    outcome = SystemOutput(
        (tokens,), (seconds / 10,), seconds / 10, 3, 0, 9, 3, 1.0, counters=counters, finish_reasons=("length",)
    )
    return Row(system, (prompt,), 0, 0, seconds, seconds, outcome)


def comparison(*pairs: tuple[float, float, tuple[int, ...]], must_agree: bool = True) -> Comparison:
    """Of prompts by the seconds of both ways and the tokens of the second; plain decoding gives 1 2 3 4."""
    rows = [
        (row("plain", str(place), plain_s, (1, 2, 3, 4)), row("speculative", str(place), speculative_s, tokens))
        for place, (plain_s, speculative_s, tokens) in enumerate(pairs)
    ]
    found = [Pair(*summaries(both), Group(both[0].prompts, ((7,),), SamplingParams()), both) for both in rows]
    return Comparison(*summaries([each for both in rows for each in both]), found, 1, must_agree)


def test_one_prompt(run: Run, target: str) -> None:
    result = run(
        "generate", "hello", "--model", target, "--drafter", f"draft:{target}", "--controller", "fixed", *WORDS
    ).ok
    record = result.record
    assert record["identical"] is True and record["identical_prompts"] == 1 and record["runs"] == 3
    assert record["plain"]["target_calls"] == 19 and record["speculative"]["target_calls"] < 8
    assert record["speculative"]["draft_acceptance_rate"] == 1.0
    assert record["tokens_per_s"] == record["speculative"]["tokens_per_s"]
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["plain"]["tokens_per_s"])
    for words in ("hello", "plain", "speculative", "tokens per second", "target calls", "mean acceptance length"):
        assert words in result.out
    assert "identical: yes\n" in result.out and "repeated 8-grams" in result.out


def test_auto_and_a_portfolio_say_what_they_are(run: Run, target: str, draft: str) -> None:
    result = run("generate", "hello", "--model", target, *WORDS)
    assert result.status == 0 and "drafter auto: prompt-lookup, " in result.out
    assert (result.record["drafter_kind"], result.record["drafters"]) == ("portfolio", ["prompt-lookup"])
    words = f"portfolio(draft:{draft},num_speculative_tokens=2;prompt-lookup)"
    result = run("generate", "hello", "--model", target, "--drafter", words, *WORDS)
    assert result.status == 0 and f"drafter {words}, " in result.out
    assert result.record["drafters"] == ["draft", "prompt-lookup"] and result.record["identical"] is True


def test_many_prompts(run: Run, target: str, draft: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, *({"id": f"p{i}", "text": "abc" * (i + 1)} for i in range(4)))
    result = run("generate", "--prompts", file, "--model", target, "--drafter", f"draft:{draft}", *WORDS).ok
    record = result.record
    assert [each["id"] for each in record["prompts"]] == ["p0", "p1", "p2", "p3"]
    assert all(each["identical"] and each["difference"] is None for each in record["prompts"])
    assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
    assert record["plain"]["target_calls"] == 4 * 19
    assert "identical: yes (4 of 4)" in result.out and "geometric mean" in result.out


@pytest.mark.parametrize(("extra", "identical"), [((), None), (("--seed", "3"), True)])
def test_temperature(run: Run, target: str, draft: str, extra: tuple[str, ...], identical: bool | None) -> None:
    words = ("--temperature", "0.8", "--drafter", f"draft:{draft}", *WORDS, *extra)
    result = run("generate", "hello", "--model", target, *words).ok
    assert result.record["identical"] is identical
    assert ("same distribution; tokens differ" in result.out) is (identical is None)


@pytest.mark.usefixtures("tampered")
def test_different_tokens_fail_and_are_explained(run: Run, target: str) -> None:
    result = run("generate", "hello", "--model", target, *WORDS)
    assert result.status == 1
    assert result.record["identical"] is False
    assert "identical: no" in result.out and "differs at token 5" in result.out
    difference = result.record["prompts"][0]["difference"]
    assert difference["position"] == 5 and difference["margin"] >= 0
    assert difference["best"][0]["id"] == difference["plain"]["id"]  # plain decoding took the argmax
    assert difference["plain"]["logit"] - difference["best"][1]["logit"] == pytest.approx(difference["margin"])


def test_a_failing_prompt_is_told_and_left_out(run: Run, target: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, "too long" * 100, "fine")
    result = run("generate", "--prompts", file, "--model", target, *WORDS)
    assert result.status == 1
    assert result.record["failed_prompts"] == 1 and [each["id"] for each in result.record["prompts"]] == ["2"]
    assert "error: prompt 1: the prompt has 800 tokens" in result.err


def test_ctrl_c_keeps_what_was_measured(
    run: Run, target: str, tmp_path: Path, interrupted_at: Callable[[int], None]
) -> None:
    interrupted_at(2 + 4)  # after the warm-up of both ways and three turns
    file = prompts_in(tmp_path, "one", "two", "three")
    result = run("generate", "--prompts", file, "--model", target, *WORDS)
    assert result.status == 130
    assert "interrupted after 1 of 3 prompts" in result.err and len(result.record["prompts"]) == 1


def test_an_answer_that_ends_early_differs_there(target: str) -> None:
    model = load_model(target, dtype="float32")
    ids = list(b"hello")
    difference = find_difference(model, ids, [7, 8], [7, 8, 9])
    assert difference is not None
    assert difference.position == 2 and difference.plain.id is None and difference.speculative.id == 9
    assert "(end)" in difference.describe()
    assert find_difference(model, ids, [7, 8], [7, 8]) is None


def test_figures_of_many_prompts() -> None:
    same = (1, 2, 3, 4)
    found = comparison((2.0, 1.0, same), (1.0, 2.0, same), (4.0, 1.0, same))
    assert [pair.ratio.mean for pair in found.pairs] == pytest.approx([2.0, 0.5, 4.0])
    assert found.ratio.mean == pytest.approx(4.0 ** (1 / 3))
    assert found.ratio.share_faster == pytest.approx(2 / 3)
    assert found.identical is True
    plain = found.as_dict()["plain"]
    assert plain["tokens_per_s"] == pytest.approx(2.0) and plain["target_calls"] == 9
    assert found.repeated_8grams is None


def test_one_odd_prompt_makes_it_not_identical() -> None:
    pairs = ((1.0, 1.0, (1, 2, 3, 4)), (1.0, 1.0, (1, 2, 3, 5)))
    assert (comparison(*pairs).identical, comparison(*pairs).identical_prompts) == (False, 1)
    assert comparison(*pairs, must_agree=False).identical is None
    assert comparison((1.0, 2.0, ())).pairs[0].ratio.mean == 1.0, "without tokens none is faster"


def test_repeated_ngrams() -> None:
    assert repeated_ngrams([1, 2, 3], size=8) is None
    assert repeated_ngrams(list(range(20)), size=8) == 0.0
    assert repeated_ngrams([5] * 10, size=8) == pytest.approx(2 / 3)


def test_where_little_is_gained_it_is_told_why() -> None:
    counters = Counters(target_calls=10, emitted_tokens=18, drafted_calls=8)
    assert "1.80 tokens a call, which took 2.00 times a plain one" in (little_gained(0.9, counters) or "")
    assert little_gained(1.2, counters) is None and little_gained(0.9, Counters(target_calls=10)) is None
