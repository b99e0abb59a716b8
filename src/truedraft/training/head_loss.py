"""The loss of Medusa heads, and its gradient in what their blocks make, without laws of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from truedraft.errors import OptionError

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead
    from truedraft.training.windows import Pack

_CHUNK = 256  # positions whose laws are held at once

LogitsOfRows: TypeAlias = Callable[[slice], Tensor]
"""The target's logits `[rows, vocab]` at some rows of a batch."""


class HeadLoss:
    """sum_k decay^k CE(m_k, q_k): head k, with law q_k, learns a mixture m_k of a token and the law it came from.

    Medusa 2401.10774, section 2.2.1, with lambda_k = 0.8^k, has the token alone: `law_share` 0. At `law_share` 1 each
    head learns the target's whole law at its place, which says more about a position than one draw from it does. In
    between m_k = (1 - law_share) onehot + law_share p. The gradient in the logits is q_k - m_k.

    Args:
        heads: in training.
        lm_head: of the target; tied heads end in it.
        decay: by how much each head counts less than the one before.
        law_share: in [0, 1].

    Raises:
        OptionError: decay or law_share out of its range.
    """

    def __init__(self, heads: MedusaHeads, lm_head: LmHead, *, decay: float = 0.8, law_share: float = 1.0) -> None:
        if not 0.0 <= law_share <= 1.0:
            raise OptionError(f"law_share must lie in [0, 1], got {law_share}")
        if not 0.0 < decay <= 1.0:
            raise OptionError(f"decay must lie in (0, 1], got {decay}")
        self._outputs = [head.output for head in heads.each()]
        self._lm_head = lm_head
        self._weights = [decay**head for head in range(heads.config.heads)]
        self._law_share = law_share

    def gradient(
        self, vectors: Tensor, places: Tensor, tokens: Tensor, logits_of: LogitsOfRows, scale: float
    ) -> tuple[Tensor, dict[str, float]]:
        """The gradient in `vectors` of `scale` times the mean loss; that in free outputs is added to their own.

        Args:
            vectors: `[heads, positions, width]`: what the heads' blocks made of the vectors at `places`.
            places: `[positions]`, rising rows; head k guesses `tokens[place + 1 + k]`.
            tokens: `[rows]`: the token that follows each row.
            logits_of: the target's logits at a slice of the rows.
            scale: of the gradient.

        Returns:
            The gradient, as `vectors`; and for the log the loss and each head's mean cross-entropy, in nats.
        """
        count = len(self._weights)
        gradient = torch.empty_like(vectors)
        sums = torch.zeros(count, device=vectors.device)
        firsts = places.tolist()
        for start in range(0, len(firsts), _CHUNK):
            here = slice(start, start + _CHUNK)
            base = firsts[start]
            law = None
            if self._law_share:
                with torch.no_grad():
                    logits = logits_of(slice(base + 1, firsts[here][-1] + count + 1))
                    law = torch.softmax(logits.float(), dim=-1).mul_(self._law_share)
            for head, weight in enumerate(self._weights):
                rows = places[here] + 1 + head
                mixture = None if law is None else law[rows - base - 1]
                piece, loss = self._of_head(
                    head, vectors[head, here], tokens[rows], mixture, weight * scale / len(firsts)
                )
                gradient[head, here] = piece
                sums[head] += loss
        losses = (sums / len(firsts)).tolist()
        total = sum(weight * loss for weight, loss in zip(self._weights, losses, strict=True))
        return gradient, {"loss": total} | {f"head_{head + 1}": loss for head, loss in enumerate(losses)}

    def _of_head(
        self, head: int, vectors: Tensor, labels: Tensor, law: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Gradient in some vectors of one head, and the sum of their cross-entropies.

        `law` holds the target's laws times `law_share`; None stands for a share of 0.
        """
        leaf = vectors.detach().requires_grad_()
        with torch.enable_grad():
            output = self._outputs[head]
            logits = self._lm_head(leaf) if output is None else self._lm_head.finish(output(leaf))
        with torch.no_grad():
            law_of_head = logits.detach().float()
            log_sum = torch.logsumexp(law_of_head, dim=-1, keepdim=True)
            own = (1.0 - self._law_share) * law_of_head.gather(1, labels[:, None]).sum()
            if law is not None:
                own += torch.dot(law.flatten(), law_of_head.flatten())
            loss = log_sum.sum() - own
            difference = law_of_head.sub_(log_sum).exp_()
            if law is not None:
                difference.sub_(law)
            difference.scatter_add_(1, labels[:, None], difference.new_full((len(labels), 1), self._law_share - 1.0))
            difference.mul_(scale)
        logits.backward(difference.to(logits.dtype))
        assert leaf.grad is not None
        return leaf.grad, loss


class HeadsObjective:
    """Trains heads on a frozen target's vectors (Medusa-1): a batch holds windows of a `SelfText`.

    Args:
        heads: in training.
        lm_head: of the target.
        pack_of: the rows of a batch of windows.
        loss: of the heads.
    """

    def __init__(self, heads: MedusaHeads, lm_head: LmHead, pack_of: Callable[[Tensor], Pack], loss: HeadLoss) -> None:
        self._heads = heads
        self._lm_head = lm_head
        self._pack_of = pack_of
        self._loss = loss

    def accumulate(self, batch: Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the positions of the windows `[count, 2]`."""
        pack = self._pack_of(batch)
        vectors = self._heads.vectors(pack.hidden[pack.places].float(), self._lm_head.embed(pack.tokens[pack.places]))

        def logits_of(rows: slice) -> Tensor:
            return self._lm_head(pack.hidden[rows])

        gradient, values = self._loss.gradient(vectors, pack.places, pack.tokens, logits_of, scale)
        vectors.backward(gradient)
        return values
