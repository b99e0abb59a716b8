"""Lossy rules from the command line: asked for by name, marked, measured, and never called a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Result, Run, prompts_in
from truedraft.cli.report import divergence_words
from truedraft.core.stats import Counters
from truedraft.core.verdict import Divergence
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.verification import LenientSampling, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.specs import rule_from_spec

RATES = ("mean_total_variation", "mean_kl", "mean_total_variation_greedy", "mean_kl_greedy")
WORDS = ("--json", "--max-tokens", "20", "--dtype", "float32", "--ignore-eos")
LOSSY = ["typical,epsilon=0.01,delta=0.01", "speculative,lenience=0.01"]


@pytest.fixture
def base(target: str, draft: str) -> tuple[str, ...]:
    return ("generate", "hello", "--model", target, "--drafter", f"draft:{draft}", "--controller", "fixed", *WORDS)


# ------------------------------------------------------------------------------- words


def test_words_become_rules() -> None:
    assert type(rule_from_spec("speculative")) is SpeculativeSampling
    assert type(rule_from_spec("speculative,lenience=1")) is SpeculativeSampling  # that is what it is
    lenient = rule_from_spec("speculative, lenience = 0.25")
    assert isinstance(lenient, LenientSampling) and lenient.lenience == 0.25
    typical = rule_from_spec("typical")
    assert isinstance(typical, TypicalAcceptance) and (typical.epsilon, typical.delta) == (0.09, 0.3)
    other = rule_from_spec("typical,delta=0.5")
    assert isinstance(other, TypicalAcceptance) and (other.epsilon, other.delta) == (0.09, 0.5)


@pytest.mark.parametrize("spec", ["speculative", "speculative,lenience=0.25", "typical,epsilon=0.2,delta=0.5"])
def test_a_rule_names_the_words_that_make_it(spec: str) -> None:
    assert rule_from_spec(spec).spec == spec
    assert rule_from_spec(spec).lossless is (spec == "speculative")


BAD = [
    ("typicall", "unknown rule 'typicall'; did you mean 'typical'?"),
    ("greedy", "unknown rule 'greedy'; valid: block, speculative, typical"),
    ("typical,foo=1", "unknown option of rule 'typical' 'foo'; valid: delta, epsilon"),
    ("typical,epsilom=0.1", "did you mean 'epsilon'?"),
    ("typical,lenience=0.5", "unknown option of rule 'typical' 'lenience'"),
    ("speculative,lenient=0.5", "did you mean 'lenience'?"),
    ("typical,epsilon=2", "epsilon must be above 0 and at most 1, got 2"),
    ("typical,epsilon=nan", "epsilon must be above 0 and at most 1, got nan"),
    ("typical,delta=0", "delta must be above 0 and finite, got 0"),
    ("typical,delta=much", "delta must be a number, got 'much'"),
    ("speculative,lenience=0", "lenience must be above 0 and at most 1, got 0"),
    ("speculative,lenience=1.5", "lenience must be above 0 and at most 1, got 1.5"),
]


def test_unusable_words_are_refused_in_one_sentence() -> None:
    for spec, phrase in BAD:
        with pytest.raises((OptionError, UnknownOptionError)) as error:
            rule_from_spec(spec)
        assert phrase in str(error.value) and "\n" not in str(error.value)


def test_help_names_the_rules(run: Run) -> None:
    shown = " ".join(run("generate", "--help-all").out.replace("│", " ").split())
    for words in ("speculative,lenience=L", "typical,epsilon=.09,delta=.3", "Lossy"):
        assert words.replace(" ", "") in shown.replace(" ", "")


# ------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_an_answer_says_what_it_gave_up(run: Run, base: tuple[str, ...], spec: str, temperature: str) -> None:
    result = run(*base, "--rule", spec, "--temperature", temperature).ok
    record = result.record
    assert record["lossless"] is False and record["rule"] == spec
    for stats in (record["stats"], record["prompts"][0]["stats"]):
        assert stats["divergence"]["tokens"] == 20
        assert all(stats[rate] >= 0 for rate in RATES) and stats["mean_total_variation"] > 0
    words = f"lossy: total variation {record['stats']['mean_total_variation']:.3f}, KL"
    assert words in result.out + result.err and "greedy decoding there" in result.out + result.err


def test_a_lossless_answer_does_not(run: Run, base: tuple[str, ...]) -> None:
    result = run(*base)
    assert result.record["lossless"] is True and result.record["rule"] == "speculative"
    assert result.record["stats"]["divergence"] is None
    assert all(result.record["stats"][rate] is None for rate in RATES)
    assert "lossy" not in result.err + result.out


def test_a_stop_text_takes_its_tokens_out_of_the_statistics(run: Run, base: tuple[str, ...]) -> None:
    full = run(*base, "--rule", LOSSY[0]).record["prompts"][0]["text"]
    stop = next(each for each in full[5:] if full.index(each) >= 5)
    record = run(*base, "--rule", LOSSY[0], "--stop", stop).record["prompts"][0]
    assert record["text"] == full[: full.index(stop)]
    stats = record["stats"]
    assert (
        stats["divergence"]["tokens"] == stats["emitted_tokens"] + stats["prefill_tokens"] == len(record["token_ids"])
    )


def test_in_words() -> None:
    assert divergence_words(Counters()) == ""
    counters = Counters(divergence=Divergence(2, 0.5, 1.0, 0.75, 3.0))
    assert divergence_words(counters) == (
        "total variation 0.250, KL 0.500 nats a token (greedy decoding there: 0.375, 1.500)"
    )


# ------------------------------------------------------------------------------- --compare


@pytest.mark.parametrize("spec", LOSSY)
def test_differing_answers_are_no_failure(run: Run, base: tuple[str, ...], spec: str) -> None:
    result = run(*base, "--rule", spec, "--compare").ok
    record = result.record
    assert record["identical"] is None and record["identical_prompts"] == 0 and record["lossless"] is False
    assert record["prompts"][0]["identical"] is False and record["prompts"][0]["difference"] is None
    assert record["plain"]["divergence"] is None and record["speculative"]["mean_kl"] > 0
    assert "lossy: 0 of 1 answers identical to plain decoding" in result.out
    assert f"lossy rule {spec}, greedy" in result.out.replace("\n", " ") and "identical: no" not in result.out
    assert f"lossy rule {spec}: total variation {record['speculative']['mean_total_variation']:.3f}" in result.out


def test_identical_answers_are_counted(run: Run, target: str, draft: str, tmp_path: Path) -> None:
    """A lenience this near to 1 keeps the argmax, however lossy its name."""
    file = prompts_in(tmp_path, "one", "two", "three")
    words = ("--drafter", f"draft:{draft}", "--rule", "speculative,lenience=0.999", "--compare")
    result = run("generate", "--prompts", file, "--model", target, *WORDS, *words).ok
    assert result.record["identical"] is None and result.record["identical_prompts"] == 3
    assert "lossy: 3 of 3 answers identical to plain decoding" in result.out


# ------------------------------------------------------------------------------- bench


@pytest.fixture
def bench(run: Run, target: str, draft: str, tmp_path: Path, quick_curves: Path) -> Callable[..., tuple[Result, Path]]:
    """The command on two prompts, with curves of one round."""
    file = prompts_in(tmp_path, "abc", "abcabc")

    def call(*words: str) -> tuple[Result, Path]:
        out = tmp_path / "out"
        drafter = ("--drafter", f"draft:{draft}", "--prompts", file, "--out", str(out))
        return run("bench", "--model", target, "--controller", "fixed", *drafter, *WORDS, *words), out

    return call


def test_a_benchmark_marks_what_is_lossy(bench: Callable[..., tuple[Result, Path]]) -> None:
    result, out = bench("--rule", LOSSY[0])
    assert result.status == 0, result.err
    record = result.record
    plain, lossy = record["systems"]
    assert record["lossless"] is False and record["rule"] == LOSSY[0] and record["identical"] is None
    assert plain["lossless"] is True and all(plain[rate] is None for rate in RATES)
    assert lossy["lossless"] is False and all(lossy[rate] > 0 for rate in RATES)
    assert lossy["counters"]["divergence"]["tokens"] == 40
    assert (lossy["identical"], lossy["identical_groups"], lossy["compared_groups"]) == (None, 0, 2)
    assert record["differences"] == []
    report = (out / "report.md").read_text()
    for text in (result.out, report):
        assert "draft:draft (lossy)" in text and f"lossy rule {LOSSY[0]}" in text
        assert f"{lossy['mean_total_variation']:.3f}" in text and "plain (lossy)" not in text
    assert f"rule: {LOSSY[0]} (lossy)" in report and "- *lossy*:" in report and "0 of 2" in report
    rows: list[dict[str, Any]] = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert all(row["lossless"] is False and row["rule"] == LOSSY[0] for row in rows)
    assert [row["counters"]["divergence"] is None for row in rows if row["system"] == "plain"] == [True, True]
    assert all(row["counters"]["divergence"]["tokens"] for row in rows if row["system"] != "plain")


def test_a_lossless_benchmark_does_not(bench: Callable[..., tuple[Result, Path]]) -> None:
    result, out = bench()
    assert result.status == 0 and result.record["lossless"] is True and result.record["identical"] is True
    assert all(each["lossless"] is True for each in result.record["systems"])
    assert "lossy" not in result.out.splitlines()[0] and "lossy" not in (out / "report.md").read_text()
