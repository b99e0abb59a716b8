"""`truedraft train --tracker`: what a tracker of accelerate's is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Run
from truedraft.training import evaluate
from truedraft.training.loop import StepRecord
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.report import Tracker

tracking = pytest.importorskip("accelerate.tracking")
HEARD: list[tuple[Any, ...]] = []


class Listener(tracking.GeneralTracker):  # type: ignore[misc, name-defined, unused-ignore]
    """A tracker as accelerate wants it."""

    name, requires_logging_directory, tracker = "listener", True, None

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        HEARD.append((run_name, logging_dir))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        HEARD.append((step, values))

    def finish(self) -> None:
        HEARD.append(("ends",))


@pytest.fixture(autouse=True)
def _listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_TOKENS", 4)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "listener", Listener)
    HEARD.clear()


def test_it_hears_of_each_step_and_of_what_was_served(run: Run, target: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(100)))
    sizes = "--steps 4 --length 16 --decay-length 32 --tokens-per-step 64 --width 16 --on-policy 0.5"
    ending = ("--tracker", "listener", "--keep-work", "--json")
    result = run("train", "draft", "--model", target, "--data", str(text), "--out", str(out), *sizes.split(), *ending)
    assert result.status == 0, result.err
    assert json.loads((out / "work" / "run.json").read_text())["identity"]["on_policy"] == 0.5
    begins, *steps, (last, served), ends = HEARD
    assert begins == ("truedraft", str(out / "tracker")) and ends == ("ends",)
    assert [step for step, _ in steps] == [0, 1, 2, 3] and last == 4
    for step, values in steps:
        assert values["learning_rate"] == pytest.approx(2e-3 * WarmupStableDecay.of(4, 0.2)(step))
        assert values["tokens"] == 64 * (step + 1) and {"loss", "alpha", "gradient_norm"} < values.keys()
    lengths = {each["temperature"]: each["mean_acceptance_length"] for each in result.record["served"]}
    assert served == {f"served/temperature_{t:g}/num_speculative_tokens_4": each for t, each in lengths.items()}


def test_a_second_stage_follows_the_first_and_promises_stand_beside_what_was_served(tmp_path: Path) -> None:
    tracker = Tracker("listener", tmp_path, "cpu")
    assert not HEARD
    for step in (3, 4, 0, 1):  # the first goes on from a checkpoint
        tracker.step(StepRecord(step, 0, 0.0, 1.0, 0.0, {"loss": 1.0}))
    about = {"nodes": 8, "trees": "counted", "promised": 2.5}
    tracker.finish([evaluate.EngineEvaluation(1.0, about, [])])
    assert [each[0] for each in HEARD[1:]] == [3, 4, 5, 6, 7, "ends"]
    place = "temperature_1/nodes_8_trees_counted"
    assert HEARD[-2][1].keys() == {f"served/{place}", f"promised/{place}"} and HEARD[-2][1][f"promised/{place}"] == 2.5


def test_what_is_not_there_is_one_sentence(run: Run, target: str, tmp_path: Path) -> None:
    missing = next(each for each in ("aim", "wandb") if each not in map(str, tracking.get_available_trackers()))
    (tmp_path / "text.txt").write_text("some text")
    words = ("train", "draft", "--model", target, "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"))
    for name, status, said in ((missing, 1, f"installed: pip install {missing}\n"), ("wnadb", 2, "you mean 'wandb'?")):
        result = run(*words, "--tracker", name)
        assert result.status == status and said in result.err and result.err.count("\n") == 1, result.err
    assert not (tmp_path / "out").exists()
