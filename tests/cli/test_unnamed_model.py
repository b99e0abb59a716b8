"""The model where none is named: what is installed, said on standard error and in JSON."""

from __future__ import annotations

import pytest

from cli.tiny import Run
from support import embedded_models
from truedraft.cli import session
from truedraft.models import embedded, loading
from truedraft.options import UNNAMED

named_model = session.named_model
"""Before the fixtures of this folder put another in its place."""
WORDS = ("generate", "x = ", "--max-tokens", "2", "--drafter", "none", "--controller", "fixed", "--json")


@pytest.fixture(autouse=True)
def _as_users_meet_it(monkeypatch: pytest.MonkeyPatch, every_model_is_named: None) -> None:
    monkeypatch.setattr(session, "named_model", named_model)


def test_smollm2_is_taken_where_it_is_installed(run: Run, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "smollm2_missing", lambda: None)
    monkeypatch.setattr(loading, "resolve_source", {"smollm2": target}.__getitem__)
    # Else other tests would share this one.
    monkeypatch.setattr(embedded_models, "_once", embedded_models._once.__wrapped__)
    result = run(*WORDS).ok
    assert "no --model is named: smollm2, which is installed, is taken" in result.err
    assert result.record["model"] == "smollm2"


def test_the_embedded_target_is_taken_where_it_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "smollm2_missing", lambda: "pip install something")
    result = run(*WORDS).ok
    assert "embedded:target, a fixture of tests, is taken; for smollm2 run pip install something" in result.err
    assert result.record["model"] == "embedded:target"


@pytest.mark.parametrize("command", [("serve",), ("certify", "engine", "http://127.0.0.1:1")])
def test_where_a_model_has_to_be_named_that_is_said(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command)
    assert result.status == 2 and "--model" in result.err and len(result.err.splitlines()) == 1


def test_a_named_one_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert named_model("a/b") == "a/b" != UNNAMED
    assert capsys.readouterr().err == ""
