"""Tiny models on disk, and the command as tests call it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Result, save_tiny_llama
from support.embedded_models import share_embedded
from support.quick_costs import measure_quickly
from truedraft.cli import session
from truedraft.cli.main import main
from truedraft.drafters import registry
from truedraft.measure.bench import OurEngine, SystemOutput
from truedraft.options import UNNAMED


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "target", seed=1, layers=2)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "draft", seed=2, layers=1)


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "chat", seed=3, layers=1, chat=True)


@pytest.fixture(autouse=True)
def _one_embedded_target(monkeypatch: pytest.MonkeyPatch) -> None:
    share_embedded(monkeypatch)


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch, target: str, draft: str, chat_target: str) -> None:
    """Tiny models too, for files of many commands that leave them as they are."""
    share_embedded(monkeypatch, target, draft, chat_target)


@pytest.fixture(autouse=True)
def every_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken where no model is named hangs on what is installed; so tests name theirs."""

    def named(typed: str) -> str:
        assert typed != UNNAMED, "this test names no model"
        return typed

    monkeypatch.setattr(session, "named_model", named)


@pytest.fixture(autouse=True)
def registry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's trainings are noted."""
    file = tmp_path / "registry" / "drafters.json"
    monkeypatch.setattr(registry, "_REGISTRY", str(file))
    return file


@pytest.fixture(autouse=True)
def hardly_trained_drafters_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By auto, whatever they bring: those of tests are trained for some steps."""
    for name in ("_LEAST_TOKENS", "_LEAST_TOKENS_OF_TABLE"):
        monkeypatch.setattr(f"truedraft.drafters.registry.{name}", 0.0)


@pytest.fixture(autouse=True)
def nothing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine loads slowly, which adds no line to what tests read."""
    monkeypatch.setattr("truedraft.cli.session._PATIENCE_S", 3600.0)


@pytest.fixture(autouse=True)
def a_server_logs_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handlers would stay for the other tests of this process."""
    monkeypatch.setattr("truedraft.cli.serve._log_to_standard_error", lambda: None)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file to train heads on."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(30)))
    return str(file)


@pytest.fixture
def quick_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cost curves of one round and a small read, kept in a folder of the test's own, which it gives."""
    measure_quickly(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that speculate answer another sixth token than they drew."""
    answer = OurEngine.answer

    def wrong(self: OurEngine, *arguments: Any) -> SystemOutput:
        outcome = answer(self, *arguments)
        tokens = list(outcome.token_ids[0])
        tokens[5] = 100 if tokens[5] != 100 else 101
        return outcome if self.name == "plain" else dataclasses.replace(outcome, token_ids=(tuple(tokens),))

    monkeypatch.setattr(OurEngine, "answer", wrong)


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C comes in a turn of a benchmark, counted from 1 with the warm-up."""
    answer, turns = OurEngine.answer, itertools.count(1)

    def at(turn: int) -> None:
        def interrupted(self: OurEngine, *arguments: Any) -> SystemOutput:
            if next(turns) == turn:
                raise KeyboardInterrupt
            return answer(self, *arguments)

        monkeypatch.setattr(OurEngine, "answer", interrupted)

    return at
