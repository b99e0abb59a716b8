"""Losses between the target's law p and the draft's law q at each position, as small objects that compose.

Every loss takes log-probabilities [tokens, vocab] of both, in float32, and the label of each position, and
answers with one value per position [tokens], in nats (total variation: a fraction). Gradients flow into q only.
The choice of divergence is that of DistillSpec (2310.08461) and GKD (2306.13649); which one is best depends on
the pair, so they can be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from truedraft.errors import OptionError, UnknownOptionError


class DistillationLoss(Protocol):
    """A divergence per position."""

    def __call__(
        self,
        target: torch.Tensor,  # log p: [tokens, vocab]
        draft: torch.Tensor,  # log q: [tokens, vocab]
        labels: torch.Tensor,  # the tokens that the text goes on with: [tokens]
    ) -> torch.Tensor:
        """The loss of each position: [tokens]."""


@dataclass(frozen=True)
class ForwardKL:
    """KL(p || q) = sum_x p(x) (log p(x) - log q(x)).

    The draft is pulled over all of the target's mass. Its gradient in the logits is q - p, which stays large
    however bad the draft is: the loss to start with. By Pinsker, TV <= sqrt(KL / 2), so it bounds 1 - alpha.
    """

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """KL(p || q) of each position: [tokens]."""
        del labels
        return (target.exp() * _difference(target, draft)).sum(-1)


@dataclass(frozen=True)
class ReverseKL:
    """KL(q || p) = sum_x q(x) (log q(x) - log p(x)).

    Punishes mass where the target has none, so a small draft concentrates on the target's modes.
    """

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """KL(q || p) of each position: [tokens]."""
        del labels
        return (draft.exp() * _difference(draft, target)).sum(-1)


@dataclass(frozen=True)
class JensenShannon:
    """JSD_b = b KL(p || m) + (1 - b) KL(q || m), with m = b p + (1 - b) q (GKD, 2306.13649, eq. 1).

    Bounded by log 2, whatever the tails; between forward (b near 0) and reverse KL (b near 1).
    """

    beta: float = 0.5

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The generalised Jensen-Shannon divergence of each position: [tokens]."""
        del labels
        mixture = torch.logaddexp(target + math.log(self.beta), draft + math.log1p(-self.beta))
        from_target = (target.exp() * _difference(target, mixture)).sum(-1)
        from_draft = (draft.exp() * _difference(draft, mixture)).sum(-1)
        return self.beta * from_target + (1 - self.beta) * from_draft


@dataclass(frozen=True)
class TotalVariation:
    """TV(p, q) = 1/2 sum_x |p(x) - q(x)| = 1 - sum_x min(p(x), q(x)).

    Its mean over positions is exactly 1 - alpha, the rate at which speculative sampling rejects (2211.17192,
    corollary 3.6). Each gradient is weighted by q(x), hence weak where the draft has no mass yet: mix it with a
    divergence that is not.
    """

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """TV(p, q) of each position: [tokens]."""
        del labels
        return 0.5 * (target.exp() - draft.exp()).abs().sum(-1)


@dataclass(frozen=True)
class CrossEntropy:
    """-log q(label): the text itself is the teacher, and the target is not asked."""

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """-log q of each position's label: [tokens]."""
        del target
        return -draft.gather(-1, labels[:, None]).squeeze(-1)


@dataclass(frozen=True)
class Mixture:
    """sum_i w_i loss_i: a weighted sum of losses."""

    weights: tuple[tuple[float, DistillationLoss], ...]

    def __call__(self, target: torch.Tensor, draft: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The weighted sum at each position: [tokens]."""
        total = torch.zeros_like(draft[:, 0])
        for weight, loss in self.weights:
            total = total + weight * loss(target, draft, labels)
        return total


NAMED_LOSSES: Mapping[str, DistillationLoss] = {
    "kl": ForwardKL(),
    "reverse-kl": ReverseKL(),
    "jsd": JensenShannon(),
    "tv": TotalVariation(),
    "ce": CrossEntropy(),
}


def loss_from_spec(spec: str) -> DistillationLoss:
    """A loss from words: `kl`, or a mixture with weights such as `kl=0.5,tv=0.5`."""
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


def _difference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Left minus right, where the left law has mass; 0 elsewhere, since 0 log 0 = 0."""
    return torch.where(left == -math.inf, torch.zeros_like(left), left - right)
