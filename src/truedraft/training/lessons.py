"""What a place learns: from its logits and what the target says there to a gradient, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.training.losses import CrossEntropy, DistillationLoss, ForwardKL, Mixture

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.kept_laws import KeptLaws
    from truedraft.training.windows import Pack

Lesson: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is learned at some rows. Takes logits `[guesses, vocab]` in float32, which it may overwrite, and the row that
each guess is about `[guesses]`, from 0; gives the gradient in the logits of the sum of their losses, and that sum."""


class Goal(Protocol):
    """What is learned from a token and the whole law that it was drawn from."""

    def lesson(self, tokens: Tensor, logits: Callable[[], Tensor]) -> Lesson:
        """The lesson of some rows.

        Args:
            tokens: `[rows]`: drawn at them.
            logits: the target's at them, `[rows, vocab]`; not called where the tokens are enough.
        """


class Teacher(Protocol):
    """Gives the lessons of a pack."""

    def lessons(self, pack: Pack) -> Callable[[slice], Lesson]:
        """The lesson of a slice of the rows of a pack."""


@dataclass(frozen=True)
class TokensAndLaws:
    """token_share CE(token) + law_share KL(p || q), whose gradient in the logits is known: no pass of autograd.

    With q the law that is learned, d CE = q - onehot(token) and d KL(p || q) = q - p.

    Attributes:
        token_share: weight of the cross-entropy.
        law_share: weight of the divergence; at 0 the target is not asked.
    """

    token_share: float
    law_share: float

    def lesson(self, tokens: Tensor, logits: Callable[[], Tensor]) -> Lesson:
        """See `Goal`."""
        law = mass = None
        if self.law_share:
            given = logits().float()
            law = torch.softmax(given, dim=-1)
            mass = torch.linalg.vecdot(law, given) - torch.logsumexp(given, dim=-1)  # sum of p log p
            law.mul_(self.law_share)

        def teach(guessed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            labels = tokens[rows][:, None]
            total = self.token_share + self.law_share
            log_sum = torch.logsumexp(guessed, dim=-1, keepdim=True)
            loss = total * log_sum.sum() - self.token_share * guessed.gather(1, labels).sum()
            part = None if law is None else law[rows]
            if part is not None and mass is not None:
                loss = loss + self.law_share * mass[rows].sum() - torch.dot(part.flatten(), guessed.flatten())
            gradient = guessed.sub_(log_sum).exp_()
            if total != 1.0:
                gradient.mul_(total)
            if part is not None:
                gradient.sub_(part)
            if self.token_share:
                gradient.scatter_add_(1, labels, gradient.new_full((len(labels), 1), -self.token_share))
            return gradient, loss

        return teach


@dataclass(frozen=True)
class WholeLaws:
    """Any loss between laws, its gradient by autograd."""

    loss: DistillationLoss

    def lesson(self, tokens: Tensor, logits: Callable[[], Tensor]) -> Lesson:
        """See `Goal`."""
        log_p = functional.log_softmax(logits().float(), dim=-1)

        def teach(guessed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return _by_autograd(self.loss, log_p[rows], guessed, tokens[rows])

        return teach


class ComputedLaws:
    """The target's laws from its stored vectors, through its LM head, when they are needed.

    Args:
        lm_head: of the target.
        goal: what is learned from them.
    """

    def __init__(self, lm_head: LmHead, goal: Goal) -> None:
        self._lm_head = lm_head
        self._goal = goal

    def lessons(self, pack: Pack) -> Callable[[slice], Lesson]:
        """See `Teacher`."""
        return lambda rows: self._goal.lesson(pack.tokens[rows], lambda: self._lm_head(pack.hidden[rows]))


class StoredLaws:
    """The target's laws as they were kept beside its vectors: its likeliest tokens, and the rest as one bucket.

    Both laws are taken on these few buckets, so a label outside of them counts as the rest. What is learned inside
    the rest is left open: its share of the gradient goes to its tokens in proportion to what they have.

    With logits z, u = (z at the kept tokens, log sum exp z over the rest) are logits of the law on the buckets, so
    dL/dz = dL/du at a kept token and dL/du_rest exp(z - u_rest) at another.

    Args:
        kept: for every row of the text.
        loss: between laws.
    """

    def __init__(self, kept: KeptLaws, loss: DistillationLoss) -> None:
        self._kept = kept
        self._loss = loss

    def lessons(self, pack: Pack) -> Callable[[slice], Lesson]:
        """See `Teacher`."""

        def lesson(rows: slice) -> Lesson:
            ids, log_p = (each.to(pack.tokens.device) for each in self._kept.at(pack.rows[rows]))
            return self._lesson(pack.tokens[rows], ids, log_p)

        return lesson

    def _lesson(self, tokens: Tensor, ids: Tensor, log_p: Tensor) -> Lesson:
        same = ids == tokens[:, None]
        buckets = torch.where(same.any(dim=1), same.int().argmax(dim=1), ids.shape[1])

        def teach(guessed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            here = ids[rows]
            own = guessed.gather(1, here)
            others = guessed.scatter_(1, here, -torch.inf)
            rest = torch.logsumexp(others, dim=-1, keepdim=True)
            gradient, loss = _by_autograd(self._loss, log_p[rows], torch.cat([own, rest], dim=1), buckets[rows])
            spread = others.sub_(rest).exp_().mul_(gradient[:, -1:])
            return spread.scatter_(1, here, gradient[:, :-1]), loss

        return teach


def goal_of(loss: DistillationLoss) -> Goal:
    """How a loss is learned from whole laws: in closed form where that is known."""
    terms = loss.weights if isinstance(loss, Mixture) else ((1.0, loss),)
    shares = {CrossEntropy: 0.0, ForwardKL: 0.0}
    for weight, term in terms:
        if type(term) not in shares:
            return WholeLaws(loss)
        shares[type(term)] += weight
    return TokensAndLaws(shares[CrossEntropy], shares[ForwardKL])


def reads_laws(loss: DistillationLoss) -> bool:
    """Whether a loss looks at the target's law at all."""
    terms = loss.weights if isinstance(loss, Mixture) else ((1.0, loss),)
    return any(not isinstance(term, CrossEntropy) for _, term in terms)


def _by_autograd(loss: DistillationLoss, log_p: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        total = loss(log_p, functional.log_softmax(leaf, dim=-1), labels).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient, total.detach()
