"""Tiny models on disk, and the command as tests call it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli.tiny import Result, save_tiny_llama
from truedraft.cli.main import main


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "target", seed=1, layers=2)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "draft", seed=2, layers=1)


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "chat", seed=3, layers=1, chat=True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call
