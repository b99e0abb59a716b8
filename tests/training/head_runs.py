"""Trainings of heads in folders, as tests interrupt them and begin them again."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from truedraft import files
from truedraft.drafters.heads.head import Head
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.heads import HeadResult, train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.texts.prompts import PromptSets

Trained = tuple[Path, HeadResult, list[tuple[Any, ...]]]
"""A folder after an uninterrupted training, with its result and what it said meanwhile."""


def trained_in(target: Path, prompts: PromptSets, out: Path, config: HeadTrainingConfig) -> Trained:
    said: list[tuple[Any, ...]] = []
    return out, train_heads(target, prompts, out, config, callbacks=Callbacks(lambda *words: said.append(words))), said


def copied(trained: Trained, folder: Path) -> Path:
    """What an interruption after the writing leaves: texts and vectors."""
    shutil.copytree(trained[0] / "work", folder / "work")
    for name in ("checkpoint.pt", "log.jsonl", "run.json"):
        (folder / "work" / name).unlink()
    return folder


def same_weights(kind: type[Head], one: Path, other: Path, within: float = 0.0) -> bool:
    expected = kind.load(one).state_dict()
    found = kind.load(other).state_dict()
    return all(torch.allclose(weight, expected[name], rtol=0.0, atol=within) for name, weight in found.items())


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "work" / "log.jsonl").read_text().splitlines()]


def assert_resumed_equals_uninterrupted(
    trained: Trained, target: Path, prompts: PromptSets, folder: Path, config: HeadTrainingConfig, killed_at: int
) -> None:
    """To the bit, in weights and in what is logged."""

    class KilledError(Exception):
        pass

    def kill(what: str, done: int, total: int, remark: str) -> None:
        if what == "training" and done == killed_at + 1:
            raise KilledError

    copied(trained, folder)
    with pytest.raises(KilledError):
        train_heads(target, prompts, folder, config, callbacks=Callbacks(on_progress=kill))
    train_heads(target, prompts, folder, config)
    assert same_weights(config.head, trained[0], folder)
    logs = [[entry | {"elapsed_s": None} for entry in log_of(each)] for each in (trained[0], folder)]
    assert logs[0] == logs[1]


@contextmanager
def full_disk(name: str, first: int = 1) -> Iterator[None]:
    """The disk is full when a file of this name is written, from some write on; to open it empties it all the same."""
    opened, take_place, writes = Path.open, files.take_place, itertools.count(1)

    def write(path: Path) -> None:
        if path.name == name and next(writes) >= first:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        file = opened(path, mode, *rest, **more)
        if "r" not in mode:
            try:
                write(path)
            except OSError:
                file.close()
                raise
        return file

    def taken(partial: Path, path: Path) -> None:
        write(path)
        take_place(partial, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        patch.setattr(files, "take_place", taken)
        yield
