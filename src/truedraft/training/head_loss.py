"""The loss of heads at all places, and its gradient in what their blocks make, without laws of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from truedraft.errors import OptionError
from truedraft.training.trainee import place_logits

if TYPE_CHECKING:
    from truedraft.training.feeding import Feed
    from truedraft.training.lessons import Lesson, Teacher
    from truedraft.training.trainee import Trainee
    from truedraft.training.windows import Pack

_CHUNK = 256  # positions whose laws are held at once


class HeadLoss:
    """sum_k decay^k loss_k, with loss_k the mean over positions at place k (from 0), the k + 2nd token behind a vector.

    Medusa 2401.10774, section 2.2.1, has lambda_k = 0.8^k.

    Args:
        trainee: heads in training.
        decay: by how much each place counts less than the one before.

    Raises:
        OptionError: decay out of (0, 1].
    """

    def __init__(self, trainee: Trainee, *, decay: float = 0.8) -> None:
        if not 0.0 < decay <= 1.0:
            raise OptionError(f"place_decay must lie in (0, 1], got {decay}")
        self._trainee = trainee
        self._weights = [decay**place for place in range(trainee.reach)]

    def gradient(
        self, vectors: Tensor, places: Tensor, lesson_of: Callable[[slice], Lesson], scale: float
    ) -> tuple[Tensor, dict[str, float]]:
        """The gradient in `vectors` of `scale` times the loss; that in outputs of the heads' own is added to theirs.

        Args:
            vectors: `[reach, positions, exit_width]`: what the heads made of the vectors at `places`.
            places: `[positions]`, rising rows; place k is about row `place + 1 + k`.
            lesson_of: what is learned at a slice of the rows.
            scale: of the gradient.

        Returns:
            The gradient, as `vectors`; and for the log the loss and the mean loss at each place, in nats.
        """
        count = len(self._weights)
        gradient = torch.empty_like(vectors)
        sums = torch.zeros(count, device=vectors.device)
        firsts = places.tolist()
        for start in range(0, len(firsts), _CHUNK):
            here = slice(start, start + _CHUNK)
            base = firsts[start] + 1
            with torch.no_grad():
                lesson = lesson_of(slice(base, firsts[here][-1] + count + 1))  # neighbours share rows
            for place, weight in enumerate(self._weights):
                rows = places[here] + 1 + place - base
                piece, loss = self._at(place, vectors[place, here], rows, lesson, weight * scale / len(firsts))
                gradient[place, here] = piece
                sums[place] += loss
        losses = (sums / len(firsts)).tolist()
        total = sum(weight * loss for weight, loss in zip(self._weights, losses, strict=True))
        word = self._trainee.word
        return gradient, {"loss": total} | {f"{word}_{place}": loss for place, loss in enumerate(losses, start=1)}

    def _at(self, place: int, vectors: Tensor, rows: Tensor, lesson: Lesson, scale: float) -> tuple[Tensor, Tensor]:
        """Gradient in some vectors of one place, and the sum of their losses."""
        leaf = vectors.detach().requires_grad_()
        with torch.enable_grad():
            logits = place_logits(self._trainee, place, leaf)
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            difference, loss = lesson(logits.detach().float(), rows)
            difference.mul_(scale)
        logits.backward(difference.to(logits.dtype))
        assert leaf.grad is not None
        return leaf.grad, loss


class HeadsObjective:
    """Trains heads on a frozen target's vectors: a batch holds windows of a `SelfText`.

    Args:
        trainee: heads in training.
        pack_of: the rows of a batch of windows.
        feed: which tokens the heads read.
        teacher: what they learn.
        loss: of all places.
    """

    def __init__(
        self, trainee: Trainee, pack_of: Callable[[Tensor], Pack], feed: Feed, teacher: Teacher, loss: HeadLoss
    ) -> None:
        self._trainee = trainee
        self._pack_of = pack_of
        self._feed = feed
        self._teacher = teacher
        self._loss = loss

    def accumulate(self, batch: Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the positions of the windows `[count, 2]`."""
        pack = self._pack_of(batch)
        hidden = pack.hidden[pack.places].float()
        with torch.no_grad():
            tokens = self._feed.tokens(pack, hidden)
        vectors = self._trainee.vectors(hidden, tokens)
        gradient, values = self._loss.gradient(vectors, pack.places, self._teacher.lessons(pack), scale)
        vectors.backward(gradient)
        return values
