"""`truedraft bench` from the command line, on tiny models; trees without a number of nodes take as many as pay."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import Run, prompts_in
from truedraft import load_model
from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord
from truedraft.drafters.registry import write_record
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.measure.bench import runs, suite
from truedraft.models import loading
from truedraft.models.backends.native.build import Built

WORDS = ("--json", "--max-tokens", "16", "--dtype", "float32", "--ignore-eos", "--controller", "fixed")


pytestmark = pytest.mark.usefixtures("quick_curves")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return prompts_in(tmp_path, *({"id": f"p{i}", "text": "abc" * (i + 1)} for i in range(4)))


@pytest.fixture
def base(target: str, prompts: str) -> tuple[str, ...]:
    return ("bench", "--model", target, "--prompts", prompts, *WORDS)


def test_everything(run: Run, base: tuple[str, ...], draft: str, tmp_path: Path) -> None:
    out = tmp_path / "out" / "deep"
    words = ("--drafter", f"draft:{draft}", "--drafter", "prompt-lookup", "--peer", "transformers", "--out", str(out))
    result = run(*base, *words, "--limit", "2", "--runs", "2", "--seed", "3", "--threads", "1").ok
    record = result.record
    names = [each["name"] for each in record["systems"]]
    assert names[:5] == ["plain", "draft:draft", "prompt-lookup", "transformers", "transformers lookup"]
    assert len(names) == 8 and f"note: transformers' assistant is {draft}" in result.out
    plain, speculative = record["systems"][:2]
    assert record["tokens_per_s"] == speculative["tokens_per_s"] and record["speedup"] == speculative["speedup"]
    assert record["identical"] is True and all(each["identical"] for each in record["systems"])
    assert plain["target_calls"] == 2 * 15 and plain["speedup"] == 1.0
    assert speculative["mean_acceptance_length"] >= 1 and speculative["acceptance_per_position"]
    assert speculative["predicted_speedup"] > 0 and speculative["measured_over_predicted"] > 0
    shares = plain["shares"]
    assert shares["target"] + shares["draft"] + shares["host"] == pytest.approx(1) and shares["draft"] == 0
    assert plain["mbu"] > 0 and plain["cpu_s_per_1000_tokens"] > 0 and plain["first_token_s"] > 0
    assert record["prompts"] == 2 and record["prompt_set"] == "prompts.jsonl" and record["sampling"]["seed"] == 3
    assert record["machine"]["torch"] and record["threads"] == 1 and record["batch"] == 1 and record["runs"] == 2
    for words_ in ("tokens/s", "x plain", "identical", "MBU", "best of 3 settings", "2 prompts of prompts.jsonl"):
        assert words_ in result.out
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 8 * 2 * 2 and {row["run"] for row in rows} == {0, 1}
    assert {tuple(row["prompts"]) for row in rows} == {("p1",), ("p3",)}
    assert json.loads((out / "record.json").read_text()) == record
    report = (out / "report.md").read_text()
    for picture in ("speed", "cost", "acceptance"):
        assert f"({picture}.svg)" in report
        assert (out / f"{picture}.png").stat().st_size > 10_000 and (out / f"{picture}.svg").stat().st_size > 5_000
    assert record["controller"] == "fixed" and {row["controller"] for row in rows} == {"fixed"}
    drafted = {each["name"]: each for each in speculative["decisions"]["decided"]}
    assert drafted["draft"]["steps"] <= 2 * speculative["target_calls"]  # two runs
    assert drafted["draft"]["reasons"] == {"": drafted["draft"]["steps"]} and speculative["decisions"]["timeline"]
    assert [each["name"] for each in plain["decisions"]["decided"]] == ["plain"] and plain["decisions"][
        "speedup"
    ] is None
    assert all(row["decisions"]["timeline"] == [] for row in rows if row["decisions"] is not None)
    assert "## Decisions" in report and "### draft:draft" in report and "### plain" not in report
    assert "(decisions-prompt-lookup.svg)" in report and "estimated speed-up over plain decoding: " in report
    assert (out / "decisions-draft-draft.png").stat().st_size > 10_000


def test_a_controller_that_weighs_costs(run: Run, base: tuple[str, ...], tmp_path: Path) -> None:
    words = [word for word in base if word not in ("--controller", "fixed")]
    result = run(*words, "--drafter", "prompt-lookup,min_ngram=1", "--limit", "1", "--out", str(tmp_path / "out")).ok
    assert result.record["controller"] == "goodput" and "controller goodput" in result.out
    reasons = [each["reasons"] for each in result.record["systems"][1]["decisions"]["decided"]]
    assert {reason for each in reasons for reason in each} <= {"pays", "plain", "probe", "end"}
    assert "### prompt-lookup" in (tmp_path / "out" / "report.md").read_text()


def test_portfolios(run: Run, base: tuple[str, ...], target: str, draft: str, tmp_path: Path) -> None:
    """A drafter that is found, and a portfolio of the same one: each member's cost is known, and what it drafts."""
    drafters = tmp_path / "drafters"
    shutil.copytree(draft, drafters / "mine")
    write_record(drafters / "mine", "draft", target, load_model(target, dtype="float32").fingerprint, {})
    words = f"portfolio(prompt-lookup,min_ngram=1;draft:{draft})"
    result = run(*base, "--drafter", "auto", "--drafter", words, "--drafters-dir", str(drafters), "--limit", "2").ok
    plain, auto, named = result.record["systems"]
    assert (plain["name"], auto["name"], named["name"]) == (
        "plain",
        "auto",
        "portfolio(prompt-lookup,min_ngram=1;draft:draft)",
    )
    assert "note: auto is draft + prompt-lookup" in result.out
    assert "note: portfolio(prompt-lookup,min_ngram=1;draft:draft) is prompt-lookup + draft" in result.out
    assert auto["identical"] is True and named["identical"] is True
    for each in (auto, named):
        assert each["predicted_speedup"] > 0 and each["shares"]["timed_draft"] > 0, each


def test_a_batch_at_a_temperature(run: Run, base: tuple[str, ...], draft: str) -> None:
    words = ("--drafter", f"draft:{draft}", "--batch", "3", "--temperature", "0.8", "--top-p", "0.9")
    for seed, identical in ((), None), (("--seed", "1"), True):
        result = run(*base, *words, *seed).ok
        assert result.record["identical"] is identical and result.record["systems"][0]["groups"] == 2
        shown = "".join(result.out.splitlines()[:-1])
        assert f"batch 3, temperature 0.8, {'seed 1' if seed else 'controller'}" in shown
        assert ("identical" in shown) == bool(identical)


def test_plain_alone_without_fast_paths(run: Run, base: tuple[str, ...]) -> None:
    result = run(*base, "--drafter", "none", "--no-fast-paths").ok
    assert [each["name"] for each in result.record["systems"]] == ["plain"]
    assert result.record["fast_paths"] == [] and result.record["drafters"] == []


def test_prompts_of_one_id_stay_two(run: Run, target: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, *({"id": "a", "text": text} for text in ("one", "two", "three")))
    words = ("--drafter", "prompt-lookup", "--prompts", file, "--out", str(tmp_path / "out"))
    result = run("bench", "--model", target, *WORDS, *words).ok
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert {row["prompts"][0] for row in rows} == {"a", "a (2)", "a (3)"}
    assert result.record["systems"][0]["groups"] == 3 and result.record["identical"] is True


def test_a_prompt_that_does_not_fit_is_told(run: Run, target: str, tmp_path: Path) -> None:
    words = ("bench", "--model", target, "--drafter", "prompt-lookup", *WORDS, "--prompts")
    result = run(*words, prompts_in(tmp_path, "too long" * 100, "fine"))
    assert result.status == 1 and result.record["systems"][0]["groups"] == 1
    assert "error: prompt 1: the prompt has 800 tokens" in result.err and len(result.record["failures"]) == 1
    run(*words, prompts_in(tmp_path, "too long" * 100)).refused(
        "none of the prompts can be answered; prompt 1: the prompt has 800"
    )


def test_an_interrupted_run_keeps_what_is_finished(
    run: Run, base: tuple[str, ...], tmp_path: Path, interrupted_at: Callable[[int], None]
) -> None:
    interrupted_at(2 + 5)  # after the warm-up of two systems and four turns
    result = run(*base, "--drafter", "prompt-lookup", "--out", str(tmp_path / "out"))
    assert result.status == 130
    assert "interrupted after 4 of 8 turns" in result.err
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4
    assert result.record["interrupted"] is True and result.record["systems"][0]["groups"] == 2
    assert "- interrupted after 4 of 8 turns" in (tmp_path / "out" / "report.md").read_text() and "plain" in result.out


def test_a_corrupt_cost_file_is_rebuilt(run: Run, base: tuple[str, ...], quick_curves: Path) -> None:
    words = (*base, "--drafter", "prompt-lookup", "--limit", "1")
    first = run(*words)
    files = sorted(quick_curves.rglob("*.json"))
    assert first.status == 0 and "warning" not in first.err and len(files) == 2
    assert first.record["costs_kept"] is False and "--refresh-costs" not in first.out
    kept = run(*words)
    assert kept.record["costs"] == first.record["costs"] and kept.record["costs_kept"] is True
    assert "note: cost curves are of an earlier run; --refresh-costs" in kept.out
    assert run(*words, "--refresh-costs").record["costs"] != first.record["costs"]
    for file in files:
        file.write_text("{ no")
    again = run(*words)
    assert again.status == 0 and again.err.count("warning: the kept costs of") == 2
    assert "warning" not in run(*words).err


def test_without_bfloat16_instructions_float32_is_used(
    run: Run, base: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.machine.has_bfloat16", lambda device: False)
    monkeypatch.setattr(suite, "has_bfloat16", lambda device: False)
    monkeypatch.setattr(loading, "built", lambda dtype: Built(None, "not here"))
    words = [word for word in base if word not in ("--dtype", "float32")]
    result = run(*words, "--drafter", "none", "--limit", "1").ok
    assert result.record["dtype"] == "float32"
    assert "note: this CPU has no bfloat16 instructions, so float32 is used" in result.out
    emulated = run(*words, "--drafter", "none", "--limit", "1", "--dtype", "bfloat16", "--no-fast-paths")
    assert emulated.status == 0 and "bfloat16 is emulated" in emulated.out


@pytest.mark.parametrize(("cpu_s", "told"), [(0.0, True), (1e9, False)])
def test_a_busy_machine_is_told(
    run: Run, base: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, cpu_s: float, told: bool
) -> None:
    turn = runs.take_turn
    monkeypatch.setattr(runs, "take_turn", lambda *words: dataclasses.replace(turn(*words), cpu_s=cpu_s))
    result = run(*base, "--drafter", "none", "--limit", "1")
    assert ("for 1.00 of the time this process had no core" in result.out) is told


@pytest.mark.usefixtures("tampered")
def test_different_tokens_fail_and_are_explained(run: Run, base: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*base, "--drafter", "prompt-lookup", "--limit", "2", "--out", str(tmp_path / "out"))
    assert result.status == 1
    assert result.record["identical"] is False and "0 of 2" in result.out
    sentence = "prompt-lookup, prompt p1 differs at token 5"
    assert f"note: {sentence}" in result.out and f"- {sentence}" in (tmp_path / "out" / "report.md").read_text()
    assert len(result.record["differences"]) == 2 and result.record["differences"][0].startswith(sentence)


TREE = RankTree(((0,), (1,), (0, 0), (2,)), (0.9, 0.05, 0.04, 0.01))


@pytest.fixture
def heads(target: str, tmp_path: Path) -> str:
    fingerprint = load_model(target, dtype="float32").fingerprint
    made = MedusaHeads(MedusaConfig(64, 257, heads=2))
    made.save(tmp_path / "heads", HeadRecord(target, fingerprint, {"greedy": TREE, "sampled": TREE}))
    return str(tmp_path / "heads")


def test_generate_says_how_many_nodes(run: Run, target: str, heads: str) -> None:
    words = ("generate", "abc", "--model", target, *WORDS, "--controller", "fixed")
    open_ = run(*words, "--drafter", f"medusa:{heads}").ok
    assert open_.err.count("by the cost curve: ") == 1 and "medusa: " in open_.err
    fixed = run(*words, "--drafter", f"medusa:{heads},nodes=2")
    assert fixed.status == 0 and "cost curve" not in fixed.err
    assert fixed.record["stats"]["draft_tokens"] > 0
    plain = run(*words, "--drafter", "none")
    answers = [each.record["prompts"][0]["token_ids"] for each in (open_, fixed, plain)]
    assert answers[0] == answers[1] == answers[2]


def test_a_portfolio_says_all_sizes_in_a_line(run: Run, target: str, heads: str) -> None:
    words = ("generate", "abc", "--model", target, *WORDS, "--controller", "fixed", "--drafter")
    found = run(*words, f"portfolio(medusa:{heads};medusa:{heads},nodes=2;medusa:{heads};prompt-lookup)").ok
    assert re.search(r"^sizes by the cost curve: medusa \d nodes?, medusa-3 \d nodes?$", found.err, re.MULTILINE)
    assert found.record["drafters"] == ["medusa", "medusa-2", "medusa-3", "prompt-lookup"]


def test_a_controller_that_weighs_costs_chooses_at_each_step(run: Run, target: str, heads: str, tmp_path: Path) -> None:
    words = ("--model", target, *WORDS, "--drafter", f"medusa:{heads}", "--controller", "goodput")
    alone = run("generate", "abc", *words)
    assert alone.status == 0 and "by the cost curve" not in alone.err
    bench = run("bench", "--prompts", prompts_in(tmp_path, "abc"), *words)
    assert bench.status == 0 and "by the cost curve" not in bench.out


def test_bench_shows_promise_and_prediction(run: Run, target: str, heads: str, tmp_path: Path) -> None:
    prompts = prompts_in(tmp_path, *({"id": f"p{i}", "text": "abc" * (i + 1)} for i in range(2)))
    out = tmp_path / "out"
    words = ("--drafter", f"medusa:{heads},nodes=3", "--drafter", f"medusa:{heads}", "--out", str(out))
    result = run("bench", "--model", target, "--prompts", prompts, *WORDS, *words).ok
    assert result.out.count("by the cost curve: ") == 1
    fixed = result.record["systems"][1]
    assert fixed["name"] == "medusa:heads,nodes=3" and fixed["identical"] is True
    assert fixed["predicted_speedup"] > 0 and fixed["measured_over_predicted"] > 0
    tree = result.record["trees"][0]
    assert tree["nodes"] == 3 and tree["promised"] == pytest.approx(1.99)
    assert tree["measured"] == fixed["mean_acceptance_length"]
    assert f"{tree['measured_over_promised']:.2f} of what was promised" in result.out
    report = (out / "report.md").read_text()
    assert "## Token trees" in report and "](tree-medusa-heads-nodes=3.svg)" in report
    assert (out / "tree-medusa-heads-nodes=3.svg").stat().st_size > 5_000
