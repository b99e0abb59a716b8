"""`generate --explain`: the table, the picture, the speed-up, and what programs get of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.tiny import Run, prompts_in
from truedraft.cli.report import marks_of, timeline, verdict
from truedraft.core.budget import NO_DRAFT, Budget, Decision
from truedraft.core.stats import RequestStep, StepRecord
from truedraft.engine.policy.decisions import Decisions

WORDS = ("--max-tokens", "24", "--dtype", "float32", "--ignore-eos", "--explain", "--json")
FIXED = ("--drafter", "prompt-lookup,min_ngram=1", "--controller", "fixed")


pytestmark = pytest.mark.usefixtures("quick_curves")


def decided(drafter: str, nodes: int, accepted: int, reason: str = "pays") -> StepRecord:
    decision = Decision(drafter, Budget(nodes) if nodes else NO_DRAFT, reason=reason)
    step = RequestStep(0, 9, 1 + nodes, False, nodes, nodes, nodes, accepted, accepted + 1, decision=decision)
    return StepRecord((step,), 0.0, 0.0, 0.0, 1.0)


def test_one_prompt(run: Run, target: str) -> None:
    result = run("generate", "abcabcabc", "--model", target, *WORDS, *FIXED).ok
    found, stats = result.record["decisions"], result.record["stats"]
    assert "decisions" not in result.out.replace(result.out.splitlines()[-1], "")  # people read standard error
    drafted = {each["name"]: each for each in found["decided"]}
    assert drafted["prompt-lookup"]["drafted"] == stats["draft_tokens"] > 0
    assert found["steps"] == stats["target_calls"] == sum(each["steps"] for each in found["decided"])
    assert sum(each["share"] for each in found["decided"]) == pytest.approx(1)
    assert sum(each["time_share"] for each in found["decided"]) == pytest.approx(1)
    assert sum(each["emitted"] for each in found["timeline"]) == stats["emitted_tokens"]
    assert found["speedup"]["factor"] > 0
    assert re.search(r"^ prompt-lookup .* as set", result.err, re.MULTILINE)
    assert re.search(r"^drafted +[0-9 +]+$", result.err, re.MULTILINE)
    assert f"estimated speed-up over plain decoding: {found['speedup']['factor']:.2f} (" in result.err
    silent = run("generate", "abcabcabc", "--model", target, *(word for word in WORDS if word != "--explain"), *FIXED)
    assert "decisions" not in silent.record and "speed-up" not in silent.err


def test_the_default_controller_gives_its_reasons(run: Run, target: str) -> None:
    result = run("generate", "abcabcabc", "--model", target, *WORDS).ok
    found = result.record["decisions"]["decided"]
    reasons = {reason for each in found for reason in each["reasons"]}
    assert reasons <= {"pays", "plain", "probe", "end", "measuring"} and reasons
    assert all(each["expected_per_step"] for each in found if not {"end", "measuring"} & {*each["reasons"]})


def test_many_prompts(run: Run, target: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, *["abcabc", "xyxyxy", "hello"] * 4)
    result = run("generate", "--prompts", file, "--model", target, *WORDS, *FIXED).ok
    assert result.record["decisions"]["steps"] <= result.record["stats"]["target_calls"]
    assert "the mean of a step and request" in result.err


def test_with_compare(run: Run, target: str) -> None:
    result = run("generate", "abcabcabc", "--model", target, *WORDS, *FIXED, "--compare").ok
    found, side = result.record["decisions"], result.record["speculative"]
    assert found["steps"] == 3 * side["target_calls"]  # three runs
    assert "estimated speed-up over plain decoding" in result.out and "prompt-lookup" in result.out


def test_without_a_drafter(run: Run, target: str) -> None:
    for more in ((), ("--compare",)):
        result = run("generate", "abc", "--model", target, *WORDS, "--drafter", "none", *more).ok
        assert "nothing was decided: there is no drafter, so every step was plain decoding" in result.err + result.out
        assert result.record["decisions"]["speedup"] is None
        assert [each["name"] for each in result.record["decisions"]["decided"]] == ["plain"]


def test_one_token_needs_no_decision(run: Run, target: str) -> None:
    words = [word if word != "24" else "1" for word in WORDS]
    result = run("generate", "abc", "--model", target, *words, *FIXED)
    assert result.status == 0 and "there was no step after the prompt" in result.err
    assert result.record["decisions"]["steps"] == 0


def test_timeline_of_each_step() -> None:
    drafted = [decided("draft", 4, 4), decided("draft", 12, 12)]
    steps = [*drafted, decided("draft", 0, 0, "plain"), decided("lookup", 3, 0, "probe")]
    lines = timeline(Decisions.of(steps), 80)
    assert lines[:3] == ["drafter  dd.?", "drafted  4+ 3", "accepted 4+ 0"]
    assert lines[3] == "d draft · . plain · ? probe · each column is a step, numbers are tokens, + from ten on"
    # No wider than the terminal.
    decisions = Decisions.of([decided("draft", 4, number % 5) for number in range(100)])
    *rows, legend = timeline(decisions, 40)
    assert all(len(row) <= 40 for row in rows) and len({len(row) for row in rows}) == 1
    assert rows[0].endswith("d" * 25) and "each column is 4 steps" in legend
    assert all(len(row) <= 10 for row in timeline(decisions, 1)[:3])


def test_marks_differ() -> None:
    names = ["draft", "draft-2", "draft-3", "medusa", "plain", "probe", "d", "prompt-lookup"]
    marks = marks_of(names)
    assert len(set(marks.values())) == len(names) and marks["plain"] == "." and marks["probe"] == "?"
    assert set(marks_of([f"d{number}" for number in range(30)]).values()) >= {"d", "#"}


def test_verdicts() -> None:
    plain = Decisions.of([decided("draft", 0, 0, "plain")])
    assert verdict(plain) == "nothing was drafted: every step was plain decoding"
    assert "there are no costs" in verdict(Decisions.of([decided("draft", 3, 1)]))
    assert json.dumps(plain.as_dict())
