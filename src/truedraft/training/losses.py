"""Distillation losses between the target's distribution p and the student's q, and their gradient in chunks.

Losses map log-probabilities [positions, vocab] of both, in float32, and labels to [positions], in nats (total
variation: a fraction). The divergences are those of DistillSpec (2310.08461) and GKD (2306.13649); the best one depends
on the pair, so they can be mixed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.errors import OptionError, UnknownOptionError

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
        terms.append((_weight(weight, spec), NAMED_LOSSES[name]))
    return terms[0][1] if len(terms) == 1 else Mixture(tuple(terms))


def _weight(text: str, spec: str) -> float:
    try:
        weight = float(text or 1.0)
    except ValueError:
        weight = math.nan
    if not 0.0 < weight < math.inf:
        raise OptionError(f"the weight {text!r} in the loss {spec!r} is not a positive number: write kl=0.5,tv=0.5")
    return weight


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
