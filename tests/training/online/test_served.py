"""A server that learns: it tells of it, and takes up what is in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.two_domains import Unthreaded, learning, teach, trained, untrained
from truedraft.cli.serve import _learner
from truedraft.server.metrics import Metrics
from truedraft.server.options import LearningOptions, ServerOptions
from truedraft.server.service import Service
from truedraft.training.online import Learner

online = pytest.importorskip("online", reason="benchmarks are not there")


def test_metrics_tell_what_was_learned() -> None:
    learner = Unthreaded(share=1.0)
    engine = learning(untrained(), learner)
    metrics = Metrics(Service(engine), "tiny", None)
    assert "learner_tokens_per_call" not in metrics.text().decode()
    teach(engine, learner, 0, 6)
    text = metrics.text().decode()
    for name in ("promotions_total", "version"):
        assert f'truedraft:learner_{name}{{model_name="tiny"}} {float(learner.status.promotions)}' in text
    for name in ("rollbacks_total", "trials_total", "time_share", "answers_bytes", "failures"):
        assert f"truedraft:learner_{name}{{" in text
    assert "learner_tokens_per_call_before{" in text and "learner_tokens_per_call_after{" in text
    without = Metrics(Service(learning(trained(), None)), "tiny", None)
    assert "learner_" not in without.text().decode()


def test_the_options_are_the_learners(tmp_path: Path) -> None:
    given = LearningOptions(True, tmp_path, 0.25, 60.0, True)
    made = _learner(given, ServerOptions(api_key_file=tmp_path / "keys"))
    assert isinstance(made, Learner)
    assert (made._folder, made._share, made._keep_s, made._per_tenant) == (tmp_path, 0.25, 60.0, True)
    assert _learner(LearningOptions(), ServerOptions()) is None


def test_the_script_measures_every_version_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`benchmarks/online.py` on the embedded target, with a version that is promoted untried."""
    texts = {"old": "import os", "new": "class Stack:\n    def push(self"}
    for name, text in texts.items():
        lines = [{"question": f"{text}  # {number}", "answer": ""} for number in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    head = online.from_spec("redrafter", online.load_model("embedded:target")).head
    torch.manual_seed(0)
    changes = Learner.changes

    def promoting(self: Learner) -> object:
        (student,) = self._students.values()
        if student is not None and not student.promotions and student.traffic.count == 3:
            student._promote(type(student.served)(head))
        return changes(self)

    monkeypatch.setattr(Learner, "changes", promoting)
    monkeypatch.setattr(Learner, "_run", lambda self: None)
    out = tmp_path / "out.jsonl"
    words = ["online.py", "embedded:target", "redrafter,nodes=4", "--old", str(tmp_path / "old.jsonl")]
    words += ["--new", str(tmp_path / "new.jsonl"), "--folder", str(tmp_path / "learned"), "--shift", "5"]
    words += ["--requests", "4", "--held-out", "2", "--max-tokens", "8", "--turns", "0", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    online.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["what"] for each in lines] == ["traffic", "version", "version", "summary"]
    assert lines[0]["versions"][0] == 0 and set(lines[0]["versions"]) == {0, 1} and len(lines[0]["versions"]) == 9
    gains = [*lines[3]["last_of_first"].values(), lines[3]["least_of_old"]]
    assert len(gains) == 5 and all(each == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0}) for each in gains)
    first, last = ({"x": n / 20, "x, each": [[n, 10], [n, 10]]} for n in (20, 30))
    assert online.gain(first, last, "x") == pytest.approx({"value": 1.5, "low": 1.5, "high": 1.5})
    last["x, each"] = [[40, 10], [20, 10]]
    assert online.gain(first, last, "x") == pytest.approx({"value": 1.5, "low": 1.0, "high": 2.0})
    online.main()
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again == [*lines, lines[3]]
