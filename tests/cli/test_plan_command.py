"""`truedraft plan`, and `--plan` of generate and bench."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Run, prompts_in
from truedraft.core import intervals
from truedraft.core.intervals import Interval
from truedraft.engine.policy import Goodput
from truedraft.measure import Prediction, read_plan
from truedraft.measure.plan import LONGEST
from truedraft.measure.predictions import Circumstance

NO_TORCH = ("torch", "transformers", "tokenizers", "safetensors")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return prompts_in(tmp_path, *(f"def f{n}(x):{'y' * n}" for n in range(8)))


@pytest.fixture
def written(quick_curves: Path, run: Run, target: str, prompts: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A plan with everything, and the record that was printed."""
    words = ("--model", target, "--drafter", "prompt-lookup,min_ngram=1", "--prompts", prompts, "--runs", "1")
    result = run("plan", *words, "--max-tokens", "24", "--out", str(tmp_path / "out"), "--json").ok
    return tmp_path / "out", result.record


def test_a_plan(written: tuple[Path, dict[str, Any]]) -> None:
    folder, record = written
    assert record["command"] == "plan" and record["status"] == 0
    assert record["prompts"] == 6 and record["check"]["prompts"] == 2  # of eight one in four is kept back
    assert record["tokens"] == 6 * 23
    (best,) = record["predicted"]
    assert best["drafter"].startswith("prompt-lookup,min_ngram=1,num_speculative_tokens=")
    assert best["tokens_per_call"]["low"] <= best["tokens_per_call"]["value"] <= best["tokens_per_call"]["high"]
    assert record["recommended"] in (best["drafter"], "none")
    check = record["check"]
    assert check["drafter"] == best["drafter"]
    assert check["identical"] is True and record["identical"] is True
    assert check["predicted_at_measured_tokens"] == pytest.approx(
        best["speedup"]["value"] * check["tokens_per_call"] / best["tokens_per_call"]["value"]
    )
    assert check["predicted_speedup"] == best["speedup"] and check["speedup"]["value"] == record["speedup"] > 0
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["recommended"] == record["recommended"] and plan["check"] == check
    assert len(plan["drafters"][0]["options"]) == LONGEST
    assert {file.stem for file in folder.glob("*.svg")} == {"survival", "costs", "batches"}
    assert len(list(folder.glob("*.png"))) == 3


def test_without_words_what_fits_is_tried(quick_curves: Path, run: Run, target: str, prompts: str) -> None:
    result = run("plan", "--model", target, "--prompts", prompts, "--runs", "1", "--max-tokens", "6", "--json")
    assert [each["drafter"].partition(",")[0] for each in result.record["predicted"]] == ["prompt-lookup"]


@pytest.mark.parametrize("measured", [0.96, 1.2])
def test_the_measured_figure_decides(
    quick_curves: Path,
    run: Run,
    target: str,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: float,
) -> None:
    """What was predicted to gain and was run at 0.96 of plain decoding is not recommended, here nor to --plan."""
    monkeypatch.setattr(intervals, "ratio_of_rates", lambda ours, others: Interval(measured, 0.9, 1.3))
    monkeypatch.setattr(Circumstance, "best_of", lambda self, each, requests: gaining(whole(self, each, requests)))
    words = ("--model", target, "--drafter", "prompt-lookup", "--prompts", prompts, "--runs", "1", "--max-tokens", "8")
    out = tmp_path / "plan.json"
    result = run("plan", *words, "--out", str(out), "--json").ok
    best = result.record["predicted"][0]["drafter"]
    assert "prompt-lookup: tried on 6 prompts, and the best one run on others; about " in result.err
    if measured > 1.0:
        assert result.record["recommended"] == read_plan(out).recommended() == best
        assert f"recommended: {best}\n" in result.out
    else:
        assert result.record["recommended"] == read_plan(out).recommended() == "none"
        assert f"recommended: none; {best} was predicted 1.54, and measured 0.96" in result.out
        generated = run("generate", "x", "--model", target, "--plan", str(out), "--max-tokens", "2", "--json")
        assert generated.record["drafter"] == "none"
    assert read_plan(out).recommended(batch=4) == best, "which was not run"


whole = Circumstance.best_of


def gaining(found: Prediction) -> Prediction:
    """The same, predicted to gain."""
    return dataclasses.replace(found, speedup=Interval(1.54, 1.5, 1.6))


def test_chains_and_trees_are_weighed_and_told(
    quick_curves: Path, run: Run, target: str, draft: str, prompts: str, tmp_path: Path
) -> None:
    words = ("--model", target, "--drafter", f"draft:{draft}", "--prompts", prompts, "--limit", "4", "--runs", "1")
    out = tmp_path / "mine.json"
    result = run("plan", *words, "--max-tokens", "6", "--temperature", "1", "--out", str(out), "--json").ok
    plan = json.loads(out.read_text())
    options = [option for each in plan["drafters"] for option in each["options"]]
    tried = {f"draft:{draft},chains={count},num_speculative_tokens={n}" for count in (2, 3, 4) for n in (1, LONGEST)}
    tried |= {f"draft:{draft},branching=3-2-1", f"draft:{draft},num_speculative_tokens=1"}
    assert {option["drafter"] for option in options} >= tried
    assert {option["nodes"] for option in options} >= {1, 8, 14, 15}
    ways = result.record["ways"]
    assert len(ways) == 1 + 3 + 3 and [each["speedup"]["value"] for each in ways] == sorted(
        (each["speedup"]["value"] for each in ways), reverse=True
    )
    assert ways[0]["drafter"] == result.record["predicted"][0]["drafter"]
    assert "recommended: " in result.out and "speed-up with as many tokens per call" in result.out
    assert "the best of each way to draft it" in result.out and "chains=3,num_speculative_tokens=" in result.out
    assert {file.stem for file in tmp_path.glob("mine*.svg")} == {"mine-survival", "mine-costs", "mine-batches"}
    assert plan["check"]["prompts"] == 1 and plan["check"]["speedup"]["low"] is None  # of one prompt no interval
    assert plan["check"]["identical"] is None  # sampled tokens are not promised to be the same
    assert plan["sampling"]["temperature"] == 1.0


def test_generate_and_bench_draft_as_planned(
    run: Run, target: str, prompts: str, written: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Mapping[str, Sequence[float]]] = []
    monkeypatch.setattr(Goodput, "expect", lambda self, survival: told.append(survival))
    file = written[0] / "plan.json"
    plan = json.loads(file.read_text())
    plan["measured"] = {}
    plan["drafters"][0]["options"] = plan["drafters"][0]["options"][2:3]
    plan["drafters"][0]["options"][0]["tokens_per_call"] = {"value": 9.0, "low": 8.0, "high": 10.0}
    file.write_text(json.dumps(plan))
    words = "prompt-lookup,min_ngram=1,num_speculative_tokens=3"
    result = run("generate", "some text", "--model", target, "--plan", str(file), "--max-tokens", "4", "--json").ok
    assert (result.record["drafter"], result.record["drafter_kind"]) == (words, "prompt-lookup")
    bench = ("bench", "--model", target, "--plan", str(file), "--prompts", prompts, "--limit", "1", "--max-tokens", "4")
    assert run(*bench, "--json").record["drafters"] == [words]
    # The controllers of generate, of plain decoding and of the drafter start from what the plan found.
    assert told == [{"prompt-lookup": tuple(plan["drafters"][0]["survival"])}] * 3


def test_a_plan_is_refused(run: Run, target: str, draft: str, written: tuple[Path, dict[str, Any]]) -> None:
    file = written[0] / "plan.json"
    short = ("--max-tokens", "2", "--json")
    both = run("generate", "x", "--model", target, "--plan", str(file), "--drafter", "draft", *short)
    assert both.status == 2 and both.record["field"] == "plan" and "--drafter draft" in both.err
    other = run("generate", "x", "--model", draft, "--plan", str(file), *short)
    assert other.status == 2 and "another fingerprint" in other.err and "run truedraft plan again" in other.err
    assert other.record["field"] == "plan"
    run("bench", "--model", target, "--plan", str(written[0] / "none.json"), *short).refused("cannot read the plan")
    warmer = run("generate", "x", "--model", target, "--plan", str(file), "--temperature", "1", *short)
    assert warmer.status == 0 and "made with temperature 0.0" in warmer.err


def test_what_if(run: Run, written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file = str(written[0] / "plan.json")
    same = run("plan", "--simulate", file, "--json").record
    assert same["recommended"] == same["recommended_as_planned"] == written[1]["recommended"]
    assert same["predicted"][0]["speedup"] == pytest.approx(written[1]["predicted"][0]["speedup"])
    words = ("--bandwidth", "2", "--batch", "8", "--draft-cost", "0.5")
    result = run("plan", "--simulate", str(written[0]), *words, "--out", str(tmp_path / "if"), "--json")
    assert result.status == 0 and result.record["batch"] == 8
    assert "recommended then" in result.out and "memory 2 times as fast" in result.out
    assert {file.name for file in (tmp_path / "if").iterdir()} == {"what_if.json", "what_if.svg", "what_if.png"}
    over = run("plan", "--simulate", file, "--out", file, "--json")
    assert over.status == 2 and over.record["field"] == "out" and "write over the plan" in over.err


def test_a_load(run: Run, written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    asked = ("plan", "--simulate", str(written[0]), "--load", "50", "--json")
    result = run(*asked, "--answer-tokens", "40", "--max-batch", "6", "--out", str(tmp_path / "if")).ok
    load = result.record["load"]
    assert (load["requests_per_s"], load["answer"], len(load["levels"])) == (50.0, 40, 6)
    assert load["replicas"]["best"]["count"] <= load["replicas"]["plain"]["count"]
    assert "50 requests a second, each of" in result.out and "assumed: " in result.out and "drafting " in result.out
    assert {file.stem for file in (tmp_path / "if").glob("*.svg")} == {"what_if", "load"}
    bound = run(*asked, "--token-ms", "0.000001")
    assert bound.record["load"]["replicas"] == {"plain": None, "best": None} and "no number of replicas" in bound.out


def test_formulas_alone_load_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from truedraft.cli.main import main
status = main(["plan", "--alpha", "0.8", "--cost", "0.05", "--out", {str(tmp_path)!r}, "--json"])
heavy = [name for name in {NO_TORCH!r} if name in sys.modules]
sys.exit(f"loaded {{heavy}}" if heavy else status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["best_length"] == 8 and record["speedup"] == pytest.approx((1 - 0.8**9) / (0.2 * 1.4))
    assert record["break_even_cost"] == 0.8 and record["pays"] is True
    assert json.loads((tmp_path / "formulas.json").read_text()) == record and (tmp_path / "formulas.svg").exists()


def test_formulas_where_nothing_pays(run: Run) -> None:
    result = run("plan", "--alpha", "0.2", "--cost", "0.5", "--length", "3", "--json")
    assert result.record["best_length"] == 0 and result.record["length"] == 3 and result.record["speedup"] < 1.0
    assert "no length pays" in result.out
