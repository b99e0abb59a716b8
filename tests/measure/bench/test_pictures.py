"""Plots and token trees are drawn, differ from an empty page, and stand in the report beside what was measured."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.bench_runs import circumstances, summary
from support.tiny_models import VOCAB, packed
from truedraft.core.budget import NO_DRAFT, Budget, Decision
from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.stats import RequestStep, StepRecord
from truedraft.core.theory import AcceptanceCurve, TargetCost
from truedraft.drafters.portfolio import Portfolio
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.engine import Engine
from truedraft.engine.policy import StepCosts
from truedraft.engine.policy.decisions import Decisions
from truedraft.engine.policy.sizes import nodes_for
from truedraft.errors import DataError, MissingExtraError
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.measure.bench.costs import size_trees
from truedraft.measure.bench.plots import draw_all, draw_decisions, draw_drafted, draw_tree
from truedraft.measure.bench.report import OutputFolder, bench_record, markdown
from truedraft.measure.bench.runs import Results, Row, SystemOutput
from truedraft.measure.bench.suite import PLAIN, OurEngine, Suite
from truedraft.measure.bench.summary import ChosenTrees, DraftedTree, drafted_trees

COSTS = [
    {"rows": rows, "context": context, "seconds": 0.01 + 1e-3 * rows} for rows in (1, 2, 4) for context in (128, 512)
]


def assert_drawn(picture: Path, height: int) -> None:
    with Image.open(picture) as image:
        assert image.width >= 1000 and image.height >= height
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 20


def test_all_pictures(tmp_path: Path) -> None:
    shown = [summary("plain", 10.0), summary("a drafter with a rather long name", 25.0, drafts=True)]
    assert draw_all(tmp_path, shown, COSTS, 0.008, "where and how " * 12) == ["speed", "cost", "acceptance"]
    for name in ("speed", "cost", "acceptance"):
        assert_drawn(tmp_path / f"{name}.png", 350)
        assert (tmp_path / f"{name}.svg").read_text().count("<path") > 10


def test_decisions_over_time(tmp_path: Path) -> None:
    """Three hundred steps of two drafters, plain decoding and a probe; the name of the file says whose they are."""
    decisions = Decisions()
    for number in range(300):
        name, nodes = ("draft", 4) if number % 3 else ("prompt-lookup", 2)
        reason = "probe" if number == 150 else "pays"
        decision = Decision(name, NO_DRAFT if number > 250 else Budget(nodes), reason=reason)
        nodes = 0 if number > 250 else nodes
        step = RequestStep(0, 9, 1 + nodes, False, nodes, nodes, nodes, number % (nodes + 1), decision=decision)
        decisions(StepRecord((step,), 0.0, 0.0, 0.0, 0.002))
    assert draw_decisions(tmp_path, "auto,x=1", decisions, "where and how") == "decisions-auto-x=1"
    assert_drawn(tmp_path / "decisions-auto-x=1.png", 350)
    text = (tmp_path / "decisions-auto-x=1.svg").read_text()
    for colour in ("#0072b2", "#d55e00", "#cccccc"):
        assert colour in text.lower()


def test_only_what_there_are_numbers_for(tmp_path: Path) -> None:
    assert draw_all(tmp_path, [summary("plain", 0.0)], [], None, "") == ["speed"]
    assert draw_all(tmp_path, [], [], None, "") == []


def test_rows_of_an_earlier_benchmark_stay_until_there_is_a_new_one(tmp_path: Path) -> None:
    row = Row("plain", ("a",), 0, 0, 1.0, 1.0, SystemOutput(((1, 2),), (0.5,), 0.5, 1, 0, 3, 1, 1.0))
    for _ in range(2):
        with OutputFolder(tmp_path) as folder:
            folder.keep(row)
            folder.keep(row, {"note": "n"})
    with OutputFolder(tmp_path):
        pass
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[0]["tokens"] == 2 and rows[0]["token_ids"] == [[1, 2]]
    assert rows[1] == rows[0] | {"note": "n"}


def test_a_run_that_wrote_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("new/deep", "mine/deep", "mine"):
        with pytest.raises(KeyboardInterrupt), OutputFolder(tmp_path / name):
            assert (tmp_path / name / "rows.jsonl").is_file()
            raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write into"):
        OutputFolder(tmp_path / "file")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'truedraft\[bench\]'"):
        OutputFolder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


CHANCES = ((0.6, 0.1, 0.05, 0.02), (0.5, 0.1, 0.05, 0.02), (0.4, 0.1, 0.05, 0.02))


def counted_tree(nodes: int) -> RankTree:
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    whole = RankTree.counted({path: math.prod(CHANCES[d][rank] for d, rank in enumerate(path)) for path in paths})
    return whole.first(nodes)


def texts(svg: Path) -> list[str]:
    """What matplotlib wrote beside each group of glyphs."""
    return [line.strip()[5:-4] for line in svg.read_text().splitlines() if line.strip().startswith("<!-- ")]


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_every_node_is_drawn_with_its_rank(tmp_path: Path, nodes: int) -> None:
    tree = counted_tree(nodes)
    draw_tree(tree, tmp_path / "tree", "A tree", "where it was measured")
    written = texts(tmp_path / "tree.svg")
    for rank in range(tree.width):
        assert written.count(str(rank)) >= sum(path[-1] == rank for path in tree.paths)
    assert "A tree" in written and "where it was measured" in written
    assert ("accepted: 0.60" in written) == (nodes == 1)
    assert ("0.30" in written) == (nodes == 8)  # few enough nodes to write their probabilities
    with Image.open(tmp_path / "tree.png") as image:
        assert image.width >= 1000 and image.height >= 300
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 20


def test_a_tree_that_nobody_counted_has_no_scale(tmp_path: Path) -> None:
    draw_tree(RankTree.cartesian((2, 1)), tmp_path / "tree", "By hand", "")
    written = texts(tmp_path / "tree.svg")
    assert "By hand" in written and not any("accepted" in text for text in written)


def test_names_make_file_names(tmp_path: Path) -> None:
    name = draw_drafted(tmp_path, DraftedTree("medusa:my heads,nodes=3", counted_tree(3), None), "")
    assert name == "tree-medusa-my-heads-nodes=3"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", f"{name}.svg"}


def test_promise_and_measurement() -> None:
    drafted = DraftedTree("medusa", counted_tree(3), 1.9, product=2.2)
    assert drafted.promised == pytest.approx(1 + 0.6 + 0.3 + 0.12)
    assert drafted.measured_over_promised == pytest.approx(1.9 / 2.02)
    assert drafted.describe() == (
        "medusa: a tree of 3 nodes, promised 2.02 tokens per target call, 2.20 if heads erred independently, "
        "measured 1.90, 0.94 of what was promised"
    )
    by_hand = DraftedTree("medusa", RankTree.cartesian((2,)), None)
    assert by_hand.promised is None and by_hand.measured_over_promised is None
    assert by_hand.describe() == "medusa: a tree of 2 nodes"
    assert json.loads(json.dumps(by_hand.as_dict(), allow_nan=False))["tree"]["paths"] == [[0], [1]]


def test_trees_chosen_at_each_step_stand_beside_the_counted_one(tmp_path: Path) -> None:
    drafted = DraftedTree("medusa", counted_tree(3), 2.0, product=2.2, chosen=ChosenTrees(64, 2.5))
    assert (drafted.nodes, drafted.promised, drafted.measured_over_promised) == (64, 2.5, pytest.approx(0.8))
    assert drafted.describe() == (
        "medusa: trees of 64 nodes, chosen at each step, promised 2.50 tokens per target call, 2.02 by the counted "
        "tree, 2.20 if heads erred independently, measured 2.00, 0.80 of what was promised"
    )
    record = json.loads(json.dumps(drafted.as_dict(), allow_nan=False))
    assert (record["trees"], record["nodes"], record["promised"]) == ("likeliest", 64, 2.5)
    assert record["counted"] == pytest.approx(2.02) and len(record["tree"]["paths"]) == 3
    unknown = DraftedTree("medusa", RankTree.cartesian((2,)), 2.0, chosen=ChosenTrees(1, None))
    assert unknown.describe() == "medusa: trees of 1 node, chosen at each step, measured 2.00"
    name = draw_drafted(tmp_path, drafted, "circumstances")
    written = " ".join(texts(tmp_path / f"{name}.svg"))
    for phrase in ("Counted tree of the heads of medusa: 3 nodes", "chosen at each step by the heads' own", "circumst"):
        assert phrase in written


def test_report_and_record_show_the_trees(tmp_path: Path) -> None:
    trees = [DraftedTree("medusa", counted_tree(8), 2.1, product=2.4)]
    summaries = [summary(PLAIN, 10.0), summary("medusa", 10.0, 2.1)]
    record = bench_record(summaries, circumstances(), [], Results(), (), trees)
    assert record["trees"][0]["measured_over_promised"] == pytest.approx(2.1 / counted_tree(8).expected_tokens)
    with OutputFolder(tmp_path) as folder:
        report = folder.finish(summaries, circumstances(), [], [], record, trees).read_text()
    assert f"| medusa | 8 | {counted_tree(8).expected_tokens:.2f} | 2.40 | 2.10 |" in report
    assert "](tree-medusa.svg)" in report and (tmp_path / "tree-medusa.svg").is_file()
    assert "Token trees" not in markdown(summaries, circumstances(), [], [])


def medusa(nodes: int | None = None) -> Medusa:
    tree = counted_tree(40)
    return Medusa(MedusaHeads(MedusaConfig(48, VOCAB, heads=3)), {"greedy": tree, "sampled": tree}, nodes=nodes)


def test_open_budgets_are_chosen_by_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path))
    target = packed("llama")
    ours = [OurEngine(PLAIN, Engine(target))]
    for name, drafter in (("open", medusa()), ("fixed", medusa(4))):
        ours.append(OurEngine(name, Engine(target, drafter, controller="fixed")))
    suite = Suite(target, True, ours, batch=40, controller="fixed")
    level = TargetCost.fit({(1, 8): 10.0, (128, 8): 10.0})
    size_trees(suite, level, SamplingParams())
    assert suite.notes == [f"open: {nodes_for(target, medusa(), costs=StepCosts(target, forwards=level)).describe()}"]
    found = drafted_trees(suite, {"open": 1.5}, SamplingParams())
    shown = [(each.system, len(each.tree), each.measured) for each in found]
    assert shown == [("open", 40, 1.5), ("fixed", 4, None)]
    prompts = [[5, 9, 11], [3]]
    drafted = ours[1].answer(prompts, SamplingParams(max_tokens=8))
    assert drafted.token_ids == ours[0].answer(prompts, SamplingParams(max_tokens=8)).token_ids
    assert drafted.counters is not None and drafted.counters.draft_tokens > 0


def test_where_no_tree_pays_nothing_is_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path))
    target = packed("llama")
    ours = [OurEngine(PLAIN, Engine(target)), OurEngine("medusa", Engine(target, medusa(), controller="fixed"))]
    suite = Suite(target, True, ours, controller="fixed")
    dear = TargetCost.fit({(1, 8): 1.0, (64, 8): 1000.0})
    size_trees(suite, dear, SamplingParams())
    assert "no tree is predicted to pay" in suite.notes[0]
    assert drafted_trees(suite, {}, SamplingParams()) == []
    outcome = ours[1].answer([[5, 9, 11]], SamplingParams(max_tokens=8))
    assert outcome.counters is not None and outcome.counters.draft_tokens == 0


def test_the_trees_of_a_portfolio_are_named_by_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path))
    target = packed("llama")
    drafter = Portfolio({"lookup": PromptLookup(), "open": medusa(), "fixed": medusa(4)})
    ours = [OurEngine(PLAIN, Engine(target)), OurEngine("auto", Engine(target, drafter, controller="fixed"))]
    suite = Suite(target, True, ours, controller="fixed")
    size_trees(suite, TargetCost.fit({(1, 8): 10.0, (128, 8): 10.0}), SamplingParams())
    assert [note.partition(" by ")[0] for note in suite.notes] == ["auto: open: 40 nodes"]
    found = drafted_trees(suite, {"auto": 1.5}, SamplingParams())
    shown = [(each.system, each.nodes, each.measured) for each in found]
    assert shown == [("auto: open", 40, None), ("auto: fixed", 4, None)]


def test_drafters_that_choose_their_trees_are_found_too() -> None:
    target, curve = packed("llama"), AcceptanceCurve.fit([(1, 1.6), (6, 2.0), (12, 2.1)], lambda nodes: min(nodes, 3))
    heads, fixed = MedusaHeads(MedusaConfig(48, VOCAB, heads=3)), {"greedy": counted_tree(40)}
    ways = [GuessTrees(3, {"greedy": curve}, fixed), GuessTrees(3, {}, fixed), GuessTrees(3)]
    ours = [
        OurEngine(str(i), Engine(target, Medusa(heads, way, nodes=6), controller="fixed")) for i, way in enumerate(ways)
    ]
    found = drafted_trees(Suite(target, True, ours), {"0": 1.5}, SamplingParams())
    assert [each.system for each in found] == ["0", "1"], "nothing is known of the third one's trees"
    assert [each.chosen for each in found] == [ChosenTrees(6, 2.0), ChosenTrees(6, found[1].counted)]
    assert found[0].tree == counted_tree(6) and found[0].measured == 1.5


def test_accuracies_kept_with_the_heads_give_the_product() -> None:
    target, drafter = packed("llama"), medusa(6)
    drafter.facts = {"trees": {"greedy": {"rank_accuracy": CHANCES}}}
    suite = Suite(target, True, [OurEngine("medusa", Engine(target, drafter, controller="fixed"))])
    found = drafted_trees(suite, {}, SamplingParams())
    assert found[0].product == pytest.approx(counted_tree(6).expected_tokens)  # these counts are a product
    assert drafted_trees(suite, {}, SamplingParams(temperature=1.0))[0].product is None
