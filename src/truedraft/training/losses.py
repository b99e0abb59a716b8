"""Distillation: losses between the target's distribution p and the student's q, their gradient in chunks, and targets.

Losses map log-probabilities [positions, vocab] of both, in float32, and labels to [positions], in nats (total
variation: a fraction). The divergences are those of DistillSpec (2310.08461) and GKD (2306.13649); the best one depends
on the pair, so they can be mixed. The target's distributions at the rows of its own answers are computed, by a product
with the LM head for each row in each epoch, or stored: faster for a large vocabulary, but an approximation.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from truedraft.core.top_k import stable_topk
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.training.workspace import writing

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.texts.self_distillation import CollatedBatch, SelfDistillationData


# Positions with distributions held at once. On a CPU 256 x 8,192 floats fit the last-level cache; on a GPU each
# chunk costs the host some thirty launches.
_CHUNK, _CHUNK_ON_GPU = 256, 2048


class DistillationLoss(ABC):
    """A divergence per position."""

    @property
    def reads_target(self) -> bool:
        return True

    @abstractmethod
    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """The loss of each position, `[positions]`, of log p and log q `[positions, vocab]` and the next tokens."""


@dataclass(frozen=True)
class ForwardKL(DistillationLoss):
    """KL(p || q) = sum_x p(x) (log p(x) - log q(x)).

    Its gradient in the logits is q - p, which stays large however bad the student is, so it is the loss to start with.
    By Pinsker, TV <= sqrt(KL / 2), so it bounds 1 - alpha.
    """

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        p = target.exp()
        # Without products over all ids: as fast as the closed form of the gradient; the form below takes 1.4 times it.
        found = torch.linalg.vecdot(p, target) - torch.linalg.vecdot(p, student)
        if bool(found.isfinite().all()):
            return found
        return (p * _difference(target, student)).sum(-1)  # somewhere p is 0


@dataclass(frozen=True)
class ReverseKL(DistillationLoss):
    """KL(q || p) = sum_x q(x) (log q(x) - log p(x)).

    Penalises mass where the target has none, so a small student concentrates on the target's modes.
    """

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        return (student.exp() * _difference(student, target)).sum(-1)


@dataclass(frozen=True)
class JensenShannon(DistillationLoss):
    """JSD_b = b KL(p || m) + (1 - b) KL(q || m), with m = b p + (1 - b) q (GKD, 2306.13649, eq. 1).

    Bounded by log 2, whatever the tails; between forward (b near 0) and reverse KL (b near 1).
    """

    beta: float = 0.5

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        mixture = torch.logaddexp(target + math.log(self.beta), student + math.log1p(-self.beta))
        from_target = (target.exp() * _difference(target, mixture)).sum(-1)
        from_student = (student.exp() * _difference(student, mixture)).sum(-1)
        return self.beta * from_target + (1 - self.beta) * from_student


@dataclass(frozen=True)
class TotalVariation(DistillationLoss):
    """TV(p, q) = 1/2 sum_x |p(x) - q(x)| = 1 - sum_x min(p(x), q(x)).

    Its mean is 1 - alpha, the rejection rate of speculative sampling (2211.17192, corollary 3.6). Each gradient is
    weighted by q(x), so it is weak where the student has no mass yet: mix it with a divergence that is not.
    """

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (target.exp() - student.exp()).abs().sum(-1)


@dataclass(frozen=True)
class NegativeLogAcceptance(DistillationLoss):
    """-log alpha, with alpha = sum_x min(p(x), q(x)): the first LK loss (2602.23881).

    Its gradient is that of the total variation over alpha, so it does not vanish where the student has hardly any of
    the target's mass. Where p has a single token it is the cross-entropy.
    """

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        return -torch.minimum(target, student).logsumexp(-1)


@dataclass(frozen=True)
class AdaptiveVariation(DistillationLoss):
    """w KL(p || q) + (1 - w) TV(p, q), w = exp(-eta alpha) per position: the second LK loss (2602.23881).

    No gradient flows through w. As the student improves, it moves to the total variation, which decides acceptance.
    """

    eta: float = 3.0

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        accepted = torch.minimum(target, student.detach()).exp().sum(-1)
        weight = torch.exp(-self.eta * accepted)
        variation = TotalVariation()(target, student, labels)
        return weight * ForwardKL()(target, student, labels) + (1.0 - weight) * variation


@dataclass(frozen=True)
class CrossEntropy(DistillationLoss):
    """-log q(label): the text is the teacher, and the target is not used."""

    @property
    def reads_target(self) -> bool:
        return False

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        return -student.gather(-1, labels[:, None]).squeeze(-1)


@dataclass(frozen=True)
class Mixture(DistillationLoss):
    """sum_i w_i loss_i: a weighted sum of losses."""

    weights: tuple[tuple[float, DistillationLoss], ...]

    @property
    def reads_target(self) -> bool:
        return any(loss.reads_target for _, loss in self.weights)

    def __call__(self, target: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros_like(student[:, 0])
        for weight, loss in self.weights:
            total = total + weight * loss(target, student, labels)
        return total


NAMED_LOSSES: Mapping[str, DistillationLoss] = {
    "kl": ForwardKL(),
    "reverse-kl": ReverseKL(),
    "jsd": JensenShannon(),
    "tv": TotalVariation(),
    "lk": NegativeLogAcceptance(),
    "lk-adaptive": AdaptiveVariation(),
    "ce": CrossEntropy(),
}


def loss_from_spec(spec: str) -> DistillationLoss:
    """A loss from its spec: `kl`, or a mixture with weights such as `kl=0.5,tv=0.5`."""
    terms = []
    for part in spec.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in NAMED_LOSSES:
            raise UnknownOptionError.nearest("loss", name, NAMED_LOSSES)
        try:
            share = float(weight or 1.0)
        except ValueError:
            share = math.nan
        if not 0.0 < share < math.inf:
            raise OptionError(
                f"the weight {weight!r} in the loss {spec!r} is not a positive number: write kl=0.5,tv=0.5"
            )
        terms.append((share, NAMED_LOSSES[name]))
    return terms[0][1] if len(terms) == 1 else Mixture(tuple(terms))


def _difference(left: Tensor, right: Tensor) -> Tensor:
    """Left minus right, where the left distribution has mass; 0 elsewhere, since 0 log 0 = 0."""
    return torch.where(left == -math.inf, torch.zeros_like(left), left - right)


def distill(student_logits: Tensor, target_log_probs: Tensor | None, labels: Tensor, loss: DistillationLoss) -> Tensor:
    """The loss of each position, `[positions]`, in float32; gradients flow into the student.

    Args:
        student_logits: `[positions, vocab]`.
        target_log_probs: `[positions, vocab]`, float32; None where the loss needs only labels. In logs, because
            the reverse divergence needs the logarithm of values that a softmax would round to 0.
        labels: `[positions]`, int64.
    """
    with torch.autocast(student_logits.device.type, enabled=False):
        log_q = functional.log_softmax(student_logits.float(), dim=-1)  # [positions, vocab]
        return loss(log_q.detach() if target_log_probs is None else target_log_probs, log_q, labels)


def gradient_in_chunks(x: Tensor, losses: Callable[[list[Tensor], slice], Iterable[Tensor]]) -> Tensor:
    """The gradient in x `[places, rows, width]` of a sum of losses, some rows at a time, to save memory.

    `losses` yields scalars for one tensor `[some, width]` per place and the slice of these rows; each scalar's backward
    runs before the next is requested.
    """
    gradient = torch.empty_like(x)
    chunk = _CHUNK if x.device.type == "cpu" else _CHUNK_ON_GPU
    for start in range(0, x.shape[1], chunk):
        rows = slice(start, start + chunk)
        leaves = [place.detach().requires_grad_() for place in x[:, rows].unbind()]
        with torch.enable_grad():
            for loss in losses(leaves, rows):
                loss.backward()
        for place, leaf in zip(gradient, leaves, strict=True):
            assert leaf.grad is not None, "every row has a loss"
            place[rows] = leaf.grad
    return gradient


def distillation_gradient(
    logits: Tensor, target_logits: Tensor | None, labels: Tensor, loss: DistillationLoss, scale: float
) -> tuple[Tensor, dict[str, float]]:
    """The gradient in logits `[tokens, vocab]` of `scale` times the mean loss.

    Returns the gradient, and the mean loss and, with a target, `alpha` of the first chunk.
    """
    total = torch.zeros((), device=logits.device)  # read once, since each reading waits for the device
    values = {}

    def losses(pieces: list[Tensor], rows: slice) -> Iterable[Tensor]:
        (piece,) = pieces
        log_p = None if target_logits is None else functional.log_softmax(target_logits[rows].float(), dim=-1)
        mean = distill(piece, log_p, labels[rows], loss).sum() / len(labels)
        total.add_(mean.detach())
        if log_p is not None and rows.start == 0:
            log_q = functional.log_softmax(piece.detach().float(), dim=-1)
            values["alpha"] = float(torch.minimum(log_p, log_q).exp().sum(-1).mean())
        yield mean * scale

    gradient = gradient_in_chunks(logits[None], losses)[0]
    return gradient, {"loss": float(total), **values}


KEPT = 64  # ids of a row
KEPT_BYTES = 6 * KEPT + 2  # bytes of a row on disk: an id and a log of each, and the log of the rest
_STORED = 512  # rows with distributions in memory at once


@dataclass(frozen=True)
class TargetRows:
    """The distillation targets of some rows; the last bucket is of all ids without their own."""

    labels: Tensor  # `[rows]`, int64: the drawn tokens; with `ids` the bucket of each
    log_probs: Tensor | None  # `[rows, buckets]`, float32; None where the loss needs only labels
    ids: Tensor | None = None  # `[rows, buckets - 1]`: ids with their own bucket; None: every id has one

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


DistillationTarget: TypeAlias = "Callable[[CollatedBatch, slice], TargetRows]"
"""Gives the distillation targets at some rows of a batch."""


def computed_rows(labels: Tensor, logits: Callable[[], Tensor], loss: DistillationLoss) -> TargetRows:
    """The whole distributions at some rows `[rows]`; `logits` is not called where the labels are enough."""
    return TargetRows(labels, functional.log_softmax(logits().float(), dim=-1) if loss.reads_target else None)


def computed_target(lm_head: LmHead, loss: DistillationLoss) -> DistillationTarget:
    """The target's distributions, computed from its stored vectors when they are needed."""
    return lambda batch, rows: computed_rows(batch.tokens[rows], lambda: lm_head(batch.hidden[rows]), loss)


@dataclass(frozen=True)
class KeptTarget:
    """The target's distributions stored with its vectors, mapped from disk: its top tokens, and the rest as one bucket.

    In `NAME.law_ids` and `NAME.laws`, of `KEPT_BYTES` a row.
    """

    ids: NDArray[np.int32]  # `[rows, kept]`: the top tokens of each row of the text, in descending order
    logs: NDArray[np.float16]  # `[rows, kept + 1]`: the logs of their probabilities, and of all others together

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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> KeptTarget:
    """Write the top `KEPT` ids of a text's distributions into its folder, or resume; TrainingError on failure."""
    rows, kept = len(text.tokens), min(KEPT, lm_head.weight.shape[0] - 1)
    files: list[tuple[Path, Any, int]] = [
        (folder / f"{name}.law_ids", np.int32, kept),
        (folder / f"{name}.laws", np.float16, kept + 1),
    ]
    sizes = {path: width * np.dtype(kind).itemsize for path, kind, width in files}  # bytes of a row
    done = min(path.stat().st_size // size if path.is_file() else 0 for path, size in sizes.items())
    done = min(rows, done // _STORED * _STORED) if done < rows else rows  # the same chunks after an interruption
    for path, size in sizes.items():
        if path.is_file() and path.stat().st_size > done * size:
            with writing(path):
                os.truncate(path, done * size)
    while done < rows:
        on_progress(done, rows)
        here = slice(done, min(done + _STORED, rows))
        parts = _likeliest(lm_head(text.hidden(here).to(lm_head.weight.device)).float(), kept)
        for (path, kind, _), part in zip(files, parts, strict=True):
            with writing(path), path.open("ab") as file:
                file.write(part.cpu().numpy().astype(kind).tobytes())
        done = here.stop
    on_progress(rows, rows)
    ids, logs = (
        np.memmap(path, kind, "r", shape=(rows, width)) if rows else np.zeros((0, width), kind)
        for path, kind, width in files
    )
    return KeptTarget(ids, logs)


def _likeliest(logits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Ids `[rows, kept]` and logs `[rows, kept + 1]` of the distributions of logits `[rows, vocab]`."""
    logs = functional.log_softmax(logits, dim=-1)
    ids = stable_topk(logs, kept)
    own = logs.gather(1, ids)
    rest = logs.scatter_(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return ids, torch.cat([own, rest], dim=1)
