"""The target's laws beside its vectors on disk: its likeliest tokens at each row, and the mass of all others.

Computing a law from a stored vector takes one product with the LM head, vocabulary x width, for each row in each epoch.
Kept, it is read: 4 bytes for each of the ids and 2 for each log-probability, and one of the rest, together 386 bytes
a row at 64 ids. That pays where the vocabulary is large; it is an approximation, see `StoredLaws`.

`NAME.law_ids` holds the ids as int32 `[tokens, kept]`, `NAME.laws` the logs as float16 `[tokens, kept + 1]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from truedraft.models.ranking import largest_ids
from truedraft.training.disk import writing

if TYPE_CHECKING:
    from pathlib import Path

    from truedraft.models.lm_head import LmHead
    from truedraft.training.self_text import SelfText

KEPT = 64
"""Ids of a row."""
LAW_BYTES = 6 * KEPT + 2
"""What a row takes on disk: an id and a log of each, and the log of the rest."""
_CHUNK = 512  # rows whose laws are held at once


@dataclass(frozen=True)
class KeptLaws:
    """Laws on few buckets, mapped from disk.

    Attributes:
        ids: int32 `[rows, kept]`: the likeliest tokens of each row, the likeliest first.
        logs: float16 `[rows, kept + 1]`: the logs of their probabilities, and of that of all others together.
    """

    ids: NDArray[np.int32]
    logs: NDArray[np.float16]

    def at(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Some of the rows: ids `[some, kept]`, int64, and logs `[some, kept + 1]`, float32, of laws that sum to 1."""
        logs = torch.from_numpy(np.array(self.logs[rows])).float()
        return torch.from_numpy(self.ids[rows].astype(np.int64)), functional.log_softmax(logs, dim=-1)


@torch.no_grad()
def keep_laws(
    text: SelfText,
    lm_head: LmHead,
    folder: Path,
    name: str,
    *,
    kept: int = KEPT,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> KeptLaws:
    """Write the laws of a text beside it, or go on where an interruption stopped.

    Args:
        text: what the target wrote; its files never change once they are written.
        lm_head: of the target.
        folder: where the text lies.
        name: of its files.
        kept: ids of each row; fewer where the vocabulary has no more.
        on_progress: called with the number of finished rows, and of all.

    Raises:
        TrainingError: the files cannot be written.
    """
    rows, kept = len(text.tokens), min(kept, lm_head.weight.shape[0] - 1)
    files = [(folder / f"{name}.law_ids", np.int32, kept), (folder / f"{name}.laws", np.float16, kept + 1)]
    done = min(_whole_rows(path, np.dtype(kind).itemsize * width) for path, kind, width in files)
    done = min(rows, done // _CHUNK * _CHUNK) if done < rows else rows  # the same chunks after an interruption
    for path, kind, width in files:
        _cut(path, done * width * np.dtype(kind).itemsize)
    while done < rows:
        on_progress(done, rows)
        here = slice(done, min(done + _CHUNK, rows))
        parts = _law(lm_head(text.hidden(here).to(lm_head.weight.device)).float(), kept)
        for (path, kind, _), part in zip(files, parts, strict=True):
            with writing(path), path.open("ab") as file:
                file.write(part.cpu().numpy().astype(kind).tobytes())
        done = here.stop
    on_progress(rows, rows)
    ids, logs = (_mapped(path, kind, (rows, width)) for path, kind, width in files)
    return KeptLaws(ids, logs)


def _law(logits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Ids `[rows, kept]` and logs `[rows, kept + 1]` of the laws of logits `[rows, vocab]`."""
    logs = functional.log_softmax(logits, dim=-1)
    ids = largest_ids(logs, kept)
    own = logs.gather(1, ids)
    rest = logs.scatter_(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return ids, torch.cat([own, rest], dim=1)


def _whole_rows(path: Path, size: int) -> int:
    return path.stat().st_size // size if path.is_file() else 0


def _cut(path: Path, size: int) -> None:
    """Cut off what lies behind whole rows."""
    if path.is_file() and path.stat().st_size > size:
        with writing(path):
            os.truncate(path, size)


def _mapped(path: Path, kind: Any, shape: tuple[int, int]) -> NDArray[Any]:
    return np.memmap(path, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)
