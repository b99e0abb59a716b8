"""From a batch of blocks to gradients, without ever holding float32 laws of the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from truedraft.training.losses import DistillationLoss

_CHUNK = 512  # positions whose laws are held at once: 512 x 8,192 floats fit the last-level cache


class LawObjective:
    """Trains a model towards a loss between laws; without a target, towards the text itself.

    The logits' gradient is computed chunk by chunk in float32 and handed to the model in one backward pass.
    """

    def __init__(self, model: PreTrainedModel, loss: DistillationLoss, target: PreTrainedModel | None = None) -> None:
        self._model = model
        self._loss = loss
        self._target = target

    def accumulate(self, batch: torch.Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the batch [sequences, length + 1].

        Answers with the mean loss and, with a target, `alpha` of the batch's first chunk.
        """
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        teacher = None
        if self._target is not None:
            with torch.no_grad():
                teacher = self._target(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        logits = self._model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # [tokens, vocab]
        gradient, values = law_gradient(logits, teacher, labels, self._loss, scale)
        logits.backward(gradient)
        return values


def law_gradient(
    logits: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor, loss: DistillationLoss, scale: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient in the logits of `scale` times the mean loss, chunk by chunk in float32.

    Args:
        logits: `[tokens, vocab]`, of the model in training.
        teacher: `[tokens, vocab]`: the target's logits; None where the loss looks at the labels alone.
        labels: `[tokens]`.
        loss: between the laws.
        scale: of the gradient.

    Returns:
        The gradient, as `logits`; the mean loss and, with a target, `alpha` of the first chunk.
    """
    gradient = torch.empty_like(logits)
    values = {"loss": 0.0}
    with torch.autocast(logits.device.type, enabled=False):
        for start in range(0, len(labels), _CHUNK):
            rows = slice(start, start + _CHUNK)
            piece = logits[rows].detach().float().requires_grad_()
            log_q = functional.log_softmax(piece, dim=-1)
            log_p = log_q.detach() if teacher is None else functional.log_softmax(teacher[rows].float(), -1)
            mean = loss(log_p, log_q, labels[rows]).sum() / len(labels)
            (piece_gradient,) = torch.autograd.grad(mean, piece)
            gradient[rows] = piece_gradient * scale
            values["loss"] += float(mean.detach())
            if teacher is not None and start == 0:
                values["alpha"] = float(torch.minimum(log_p, log_q.detach()).exp().sum(-1).mean())
    return gradient, values
