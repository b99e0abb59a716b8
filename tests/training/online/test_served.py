"""A server that learns: it tells of it, and takes up what is in its folder."""

from __future__ import annotations

from pathlib import Path

from support.two_domains import Unthreaded, learning, teach, trained, untrained
from truedraft.cli.serve import _learner
from truedraft.server.metrics import Metrics
from truedraft.server.options import LearningOptions, ServerOptions
from truedraft.server.service import Service
from truedraft.training.online import Learner


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
