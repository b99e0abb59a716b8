"""Distillation targets of heads: the target's distributions at the rows of its own answers, computed or stored.

Computing takes one product with the LM head for each row in each epoch. Stored are 4 bytes for each of the top ids
(`NAME.dist_ids`, int32 `[tokens, kept]`) and 2 for each log-probability and one of the rest (`NAME.probs`, float16
`[tokens, kept + 1]`), 386 bytes a row at 64 ids: faster for a large vocabulary, but an approximation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from truedraft.core.top_k import stable_topk
from truedraft.training.losses import DistillationLoss, distill
from truedraft.training.workspace import writing

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.texts.self_distillation import CollatedBatch, SelfDistillationData

KEPT = 64
"""Ids of a row."""
KEPT_BYTES = 6 * KEPT + 2
"""Bytes of a row on disk: an id and a log of each, and the log of the rest."""
_CHUNK = 512  # rows with distributions in memory at once


@dataclass(frozen=True)
class TargetRows:
    """The distillation targets of some rows.

    Attributes:
        labels: `[rows]`, int64: the drawn tokens; with `ids` the bucket of each.
        log_probs: `[rows, buckets]`, float32; None where the loss needs only labels.
        ids: `[rows, buckets - 1]`: ids with their own bucket; the last bucket is all others. None: every id has one.
    """

    labels: Tensor
    log_probs: Tensor | None
    ids: Tensor | None = None

    def losses(self, student_logits: Tensor, rows: Tensor, loss: DistillationLoss) -> Tensor:
        """The loss of each guess, `[guesses]`, for logits `[guesses, vocab]` and the row of each guess, from 0.

        The student's rest is log sum exp of its logits there; its tokens share the gradient by their probability.
        """
        if self.ids is not None:
            here = self.ids[rows]
            logits = student_logits.float()
            rest = logits.scatter(1, here, -torch.inf).logsumexp(dim=-1, keepdim=True)
            student_logits = torch.cat([logits.gather(1, here), rest], dim=1)  # [guesses, buckets]
        log_probs = None if self.log_probs is None else self.log_probs[rows]
        return distill(student_logits, log_probs, self.labels[rows], loss)


class DistillationTarget(Protocol):
    """Gives the distillation targets at the rows of a batch."""

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows: ...


def computed_rows(labels: Tensor, logits: Callable[[], Tensor], loss: DistillationLoss) -> TargetRows:
    """The whole distributions at some rows `[rows]`; `logits` is not called where the labels are enough."""
    return TargetRows(labels, functional.log_softmax(logits().float(), dim=-1) if loss.reads_target else None)


@dataclass(frozen=True)
class ComputedTarget:
    """The target's distributions, computed from its stored vectors when they are needed."""

    lm_head: LmHead
    loss: DistillationLoss

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows:
        return computed_rows(batch.tokens[rows], lambda: self.lm_head(batch.hidden[rows]), self.loss)


@dataclass(frozen=True)
class KeptTarget:
    """The target's distributions stored with its vectors: its top tokens, and the rest as one bucket.

    Attributes:
        ids: int32 `[rows, kept]`: the top tokens of each row of the text, in descending order; mapped from disk.
        logs: float16 `[rows, kept + 1]`: the logs of their probabilities, and of all others together.
    """

    ids: NDArray[np.int32]
    logs: NDArray[np.float16]

    def at(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Ids `[some, kept]`, int64, and logs `[some, kept + 1]`, float32, of distributions that sum to 1."""
        logs = torch.from_numpy(np.array(self.logs[rows])).float()
        return torch.from_numpy(self.ids[rows].astype(np.int64)), functional.log_softmax(logs, dim=-1)

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows:
        ids, log_probs = (each.to(batch.tokens.device) for each in self.at(batch.rows[rows]))
        same = ids == batch.tokens[rows][:, None]
        buckets = torch.where(same.any(dim=1), same.int().argmax(dim=1), ids.shape[1])
        return TargetRows(buckets, log_probs, ids)


@torch.no_grad()
def keep_target(
    text: SelfDistillationData,
    lm_head: LmHead,
    folder: Path,
    name: str,
    *,
    kept: int = KEPT,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> KeptTarget:
    """Write the top `kept` ids of a text's distributions into its folder, or resume; TrainingError on failure."""
    rows, kept = len(text.tokens), min(kept, lm_head.weight.shape[0] - 1)
    files = [(folder / f"{name}.law_ids", np.int32, kept), (folder / f"{name}.laws", np.float16, kept + 1)]
    done = min(_whole_rows(path, np.dtype(kind).itemsize * width) for path, kind, width in files)
    done = min(rows, done // _CHUNK * _CHUNK) if done < rows else rows  # the same chunks after an interruption
    for path, kind, width in files:
        _cut(path, done * width * np.dtype(kind).itemsize)
    while done < rows:
        on_progress(done, rows)
        here = slice(done, min(done + _CHUNK, rows))
        parts = _likeliest(lm_head(text.hidden(here).to(lm_head.weight.device)).float(), kept)
        for (path, kind, _), part in zip(files, parts, strict=True):
            with writing(path), path.open("ab") as file:
                file.write(part.cpu().numpy().astype(kind).tobytes())
        done = here.stop
    on_progress(rows, rows)
    ids, logs = (_mapped(path, kind, (rows, width)) for path, kind, width in files)
    return KeptTarget(ids, logs)


def _likeliest(logits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Ids `[rows, kept]` and logs `[rows, kept + 1]` of the distributions of logits `[rows, vocab]`."""
    logs = functional.log_softmax(logits, dim=-1)
    ids = stable_topk(logs, kept)
    own = logs.gather(1, ids)
    rest = logs.scatter_(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return ids, torch.cat([own, rest], dim=1)


def _whole_rows(path: Path, size: int) -> int:
    return path.stat().st_size // size if path.is_file() else 0


def _cut(path: Path, size: int) -> None:
    if path.is_file() and path.stat().st_size > size:
        with writing(path):
            os.truncate(path, size)


def _mapped(path: Path, kind: Any, shape: tuple[int, int]) -> NDArray[Any]:
    return np.memmap(path, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)
