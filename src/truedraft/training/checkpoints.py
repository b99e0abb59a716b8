"""What a training loop leaves in its folder: the checkpoint and the log, and how they are read."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from truedraft.errors import TrainingError
from truedraft.training.disk import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from truedraft.training.identity import Identity

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
CHECKPOINT_EVERY_S = 120.0
"""Seconds between two checkpoints: what a kill costs at the most, and far more than writing one takes."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was just written.

    Attributes:
        step: updates that it holds.
        total_steps: of the whole training.
        tokens: that those updates saw.
        loss: of the last of them.
        left_s: seconds that the rest will take, as the steps of this run did.
        path: of the checkpoint.
    """

    step: int
    total_steps: int
    tokens: int
    loss: float
    left_s: float
    path: Path


def checkpoint_of(folder: Path) -> tuple[int, Identity] | None:
    """The step of a folder's checkpoint, and what decides its weights; None where there is none.

    Raises:
        TrainingError: it cannot be read.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    state = read_checkpoint(path)
    return state["progress"]["step"], state.get("identity") or {}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """All of a checkpoint, mapped from disk.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"cannot read the checkpoint {str(path)!r}: remove it to begin again") from error
    return state


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of steps that will be run again, and a last one that a full disk or a kill cut short."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_whole(path, "".join(line for line in lines if json.loads(line)["step"] < step))


def tensor_bytes(states: object) -> int:
    """The bytes of all tensors in nested lists and dictionaries, each once."""
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in _tensors(states)}.values())


def _tensors(states: object) -> Iterator[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        yield states
    inner = states.values() if isinstance(states, dict) else states if isinstance(states, list | tuple) else ()
    for each in inner:
        yield from _tensors(each)
