"""`benchmarks/gpu.py` as it runs on a GPU, with small models on a CPU: every row is there, with a number."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpu
from gpu_rows import GROUPS, Row

NAMES = [row.name for kind in GROUPS for row in kind.ROWS]
TINY = ["--tiny", "--device", "cpu", "--commit", "abc"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_has_a_number_and_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.jsonl"
    gpu.main([*TINY, "--minutes", "9", "--row-s", "300", "--out", str(out)])
    found = lines(out)
    assert [each["name"] for each in found] == NAMES
    assert [each for each in found if not isinstance(each.get("value"), float)] == []
    assert all(each["commit"] == "abc" and each["versions"]["torch"] and each["conditions"] for each in found)
    bars = [each["bar"] for each in found if each["name"].startswith("7B: auto over plain, one")]
    assert bars == [">= 2.5", ">= 1.7"]
    monkeypatch.setattr(gpu, "_measured", lambda *_: pytest.fail("it is measured again"))
    gpu.main([*TINY, "--out", str(out)])
    assert lines(out) == found


def test_a_row_that_fails_or_takes_too_long_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(group: Any) -> Any:
        raise ValueError("no  room")

    def wait(group: Any) -> Any:
        while True:
            pass

    rows = [Row("a", "s", fail), Row("b", "s", wait), Row("c", "s", lambda group: (1.0, {"x": 2}), ">= 1")]
    monkeypatch.setattr(gpu, "GROUPS", [lambda *_: SimpleNamespace(about={"dtype": "d"}, close=lambda: None)])
    monkeypatch.setattr(gpu.GROUPS[0], "ROWS", rows, raising=False)
    out = tmp_path / "gpu.jsonl"
    for _ in range(2):
        gpu.main([*TINY, "--row-s", "0.05", "--out", str(out)])
    told = [(each["name"], each.get("value"), each.get("error")) for each in lines(out)]
    failed = [("a", None, "ValueError: no room"), ("b", None, "it took more than 0.05 s")]
    assert told == [*failed, ("c", 1.0, None), *failed]
    assert lines(out)[2]["conditions"] == {"dtype": "d", "x": 2}


def test_rows_are_left_for_the_next_run_once_time_is_up_and_only_some_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_measured", lambda group, row, seconds: {"value": 1.0})
    out = tmp_path / "gpu.jsonl"
    gpu.main([*TINY, "--minutes", "0", "--out", str(out)])
    assert not out.exists() and f"time is up; left: {NAMES[0]}" in capsys.readouterr().err
    gpu.main([*TINY, "--only", "reading", "--out", str(out)])
    assert [each["name"] for each in lines(out)] == ["8B: reading 8,192 tokens"]


def test_without_a_device_it_says_what_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--tiny --device cpu" in capsys.readouterr().err
