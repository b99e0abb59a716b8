"""Plots are drawn, differ from an empty page, and are written as PNG and SVG."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.bench_runs import summary
from truedraft.core.budget import NO_DRAFT, Budget, Decision
from truedraft.core.stats import RequestStep, StepRecord
from truedraft.engine.policy.decisions import Decisions
from truedraft.errors import DataError, MissingExtraError
from truedraft.measure.bench.plots import draw_all, draw_decisions
from truedraft.measure.bench.report import OutputFolder
from truedraft.measure.bench.runs import Row, SystemOutput

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
