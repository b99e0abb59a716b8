"""Commands that need Ray where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from truedraft.cli.main import main

pytest.importorskip("fastapi")

NEEDS = "this needs the package ray; install Ray by: pip install 'truedraft[ray]'"


@pytest.mark.parametrize("words", [["serve", "--ray"], ["train", "ngram", "--answers", "--ray", "--out", "made"]])
def test_it_is_said_what_to_install(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ray.serve", "ray.data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*words, "--model", "embedded:target"]) == 1
    assert NEEDS in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "2"], "--replicas has no effect without --ray; give that, too"),
        (["--autoscale", "1:2"], "--autoscale has no effect without --ray; give that, too"),
        (["--ray", "--autoscale", "2"], "--autoscale must be MIN:MAX with 1 <= MIN <= MAX, got '2'"),
        (["--ray", "--autoscale", "1:x"], "--autoscale must be MIN:MAX with 1 <= MIN <= MAX, got '1:x'"),
        (["--ray", "--replicas", "2", "--autoscale", "1:2"], "--replicas has no effect with --autoscale; leave one"),
        (["--ray", "--autoscale", "3:2"], "--autoscale must be MIN:MAX with 1 <= MIN <= MAX, got '3:2'"),
        (["--ray", "--replicas", "0"], "--replicas must be 1 or more, got 0"),
    ],
)
def test_numbers_of_replicas_that_cannot_be(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "embedded:target", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
