"""From the command line: a Medusa tree without a number of nodes takes as many as pay here, and says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.models.loading import load_model

WORDS = ("--json", "--max-tokens", "12", "--dtype", "float32", "--ignore-eos", "--controller", "fixed")
TREE = RankTree(((0,), (1,), (0, 0), (2,)), (0.9, 0.05, 0.04, 0.01))


pytestmark = pytest.mark.usefixtures("quick_curves")


@pytest.fixture
def heads(target: str, tmp_path: Path) -> str:
    fingerprint = load_model(target, dtype="float32").fingerprint
    made = MedusaHeads(MedusaConfig(64, 257, heads=2))
    made.save(tmp_path / "heads", HeadRecord(target, fingerprint, {"greedy": TREE, "sampled": TREE}))
    return str(tmp_path / "heads")


def test_generate_says_how_many_nodes(run: Run, target: str, heads: str) -> None:
    words = ("generate", "abc", "--model", target, *WORDS, "--controller", "fixed")
    open_ = run(*words, "--drafter", f"medusa:{heads}")
    assert open_.status == 0, open_.err
    assert open_.err.count("by the cost curve: ") == 1 and "medusa: " in open_.err
    fixed = run(*words, "--drafter", f"medusa:{heads},nodes=2")
    assert fixed.status == 0 and "cost curve" not in fixed.err
    assert fixed.record["stats"]["draft_tokens"] > 0
    plain = run(*words, "--drafter", "none")
    answers = [each.record["prompts"][0]["token_ids"] for each in (open_, fixed, plain)]
    assert answers[0] == answers[1] == answers[2]


def test_a_portfolio_says_all_sizes_in_a_line(run: Run, target: str, heads: str) -> None:
    words = ("generate", "abc", "--model", target, *WORDS, "--controller", "fixed", "--drafter")
    found = run(*words, f"portfolio(medusa:{heads};medusa:{heads},nodes=2;medusa:{heads};prompt-lookup)")
    assert found.status == 0, found.err
    assert re.search(r"^sizes by the cost curve: medusa \d nodes?, medusa-3 \d nodes?$", found.err, re.MULTILINE)
    assert found.record["drafters"] == ["medusa", "medusa-2", "medusa-3", "prompt-lookup"]


def test_a_controller_that_weighs_costs_chooses_at_each_step(run: Run, target: str, heads: str, tmp_path: Path) -> None:
    words = ("--model", target, *WORDS, "--drafter", f"medusa:{heads}", "--controller", "goodput")
    alone = run("generate", "abc", *words)
    assert alone.status == 0 and "by the cost curve" not in alone.err
    (tmp_path / "prompts.txt").write_text("abc\n")
    bench = run("bench", "--prompts", str(tmp_path / "prompts.txt"), *words)
    assert bench.status == 0 and "by the cost curve" not in bench.out


def test_bench_shows_promise_and_prediction(run: Run, target: str, heads: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "text": "abc" * (i + 1)}) for i in range(2)))
    out = tmp_path / "out"
    words = ("--drafter", f"medusa:{heads},nodes=3", "--drafter", f"medusa:{heads}", "--out", str(out))
    result = run("bench", "--model", target, "--prompts", str(prompts), *WORDS, *words)
    assert result.status == 0, result.err
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
