"""Training heads on a frozen target's vectors: loss, step, loop, and accuracy during training.

Medusa-1 (2401.10774, section 2.2.1) and ReDrafter (2403.09919) are trained this way; the code is for heads of any kind.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core.top_k import stable_topk
from truedraft.drafters.heads.head import VectorHead
from truedraft.errors import DataError, OptionError
from truedraft.models.checkpoint import weights_hash
from truedraft.models.lm_head import LmHead
from truedraft.training.loop import (
    Measurement,
    Phase,
    RunFolder,
    TrainingLoop,
)
from truedraft.training.losses import DistillationLoss, gradient_in_chunks
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig
from truedraft.training.targets import DistillationTarget, TargetRows
from truedraft.training.texts.self_distillation import (
    CollatedBatch,
    SelfDistillationData,
    WindowSampler,
    collate,
    text_tokens,
)

if TYPE_CHECKING:
    from truedraft.training.head_config import HeadTrainingConfig

Feed: TypeAlias = Callable[[CollatedBatch, Tensor], Tensor]
"""Chooses the tokens that heads read, `[positions, reach]`, from a batch and its vectors `[positions, width]`."""
_TOP = 5
_POSITIONS = 1024  # of a measurement at once, about
_ROWS = 256  # of a measurement with logits held at once


class HeadLoss:
    """sum_k decay^k loss_k, with loss_k the mean over positions at place k (from 0), the k + 2nd token after a vector.

    Medusa 2401.10774, section 2.2.1, has lambda_k = 0.8^k.

    Raises:
        OptionError: decay out of (0, 1].
    """

    def __init__(self, head: VectorHead, lm_head: LmHead, loss: DistillationLoss, *, decay: float = 0.8) -> None:
        if not 0.0 < decay <= 1.0:
            raise OptionError(f"must lie in (0, 1], got {decay}", field="place_decay")
        self._head = head
        self._lm_head = lm_head
        self._loss = loss
        self._weights = [decay**place for place in range(head.reach)]

    def gradient(
        self,
        vectors: Tensor,
        places: Tensor,
        target_at: Callable[[slice], TargetRows],
        scale: float,
        of: int | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The gradient of `scale` times the loss in `vectors`; gradients of the heads' own outputs are added to theirs.

        Args:
            vectors: `[reach, positions, exit_width]`: the heads' vectors for `places`.
            places: `[positions]`, ascending rows; place k is about row `place + 1 + k`.
            target_at: returns the targets of a slice of the rows.
            of: number of positions for the mean, where `places` are only a part of them.

        Returns:
            The gradient, as `vectors`; and for the log the loss and the mean loss at each place, in nats.
        """
        reach, rows = len(self._weights), places.tolist()
        count = len(rows) if of is None else of
        sums = torch.zeros(reach, device=vectors.device)

        def losses(some: list[Tensor], here: slice) -> Iterator[Tensor]:
            first, last = rows[here][0] + 1, rows[here][-1] + 1
            with torch.no_grad():
                target = target_at(slice(first, last + reach))  # neighbours share rows
            for place, weight in enumerate(self._weights):
                logits = self._head.place_logits(place, some[place], self._lm_head)  # [some positions, vocab]
                loss = target.losses(logits, places[here] + 1 + place - first, self._loss).sum()
                sums[place] += loss.detach()
                yield loss * (weight * scale / count)

        gradient = gradient_in_chunks(vectors, losses)
        means = (sums / count).tolist()
        total = sum(weight * loss for weight, loss in zip(self._weights, means, strict=True))
        word = self._head.place_word
        return gradient, {"loss": total} | {f"{word}_{place}": loss for place, loss in enumerate(means, start=1)}


class HeadsObjective:
    """Trains heads on a frozen target's vectors: a batch holds windows of its answers.

    Args:
        collated: maps windows to the rows of a batch.
        feed: chooses the tokens that the heads read.
        loss: summed over all places.
    """

    def __init__(
        self,
        head: VectorHead,
        lm_head: LmHead,
        collated: Callable[[Tensor], CollatedBatch],
        feed: Feed,
        target: DistillationTarget,
        loss: HeadLoss,
    ) -> None:
        self._head = head
        self._lm_head = lm_head
        self._collated = collated
        self._feed = feed
        self._target = target
        self._loss = loss

    def accumulate(self, batch: Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the positions of the windows `[count, 2]`."""
        rows = self._collated(batch)  # all windows, because feeding draws for all of them
        hidden = rows.hidden[rows.places].float()  # [positions, width]
        with torch.no_grad():
            tokens = self._feed(rows, hidden)
        first, last = (None, None) if own is None else (int(batch[:at, 1].sum()) for at in (own.start, own.stop))
        hidden, tokens, places = (each[first:last] for each in (hidden, tokens, rows.places))
        vectors = self._head.unroll(hidden, self._lm_head.embed(tokens.T))  # [reach, positions, exit_width]
        gradient, values = self._loss.gradient(
            vectors, places, lambda some: self._target.rows(rows, some), scale, len(rows.places)
        )
        vectors.backward(gradient)
        return values


def heads_optimizer(head: VectorHead, config: OptimizerConfig) -> MixedOptimizer:
    """Muon for matrices, AdamW for biases and the heads' own outputs."""
    return MixedOptimizer(head, config, [output.weight for output in head.outputs if output is not None])


def head_loop(
    config: HeadTrainingConfig,
    head: VectorHead,
    lm_head: LmHead,
    target: DistillationTarget,
    texts: tuple[SelfDistillationData, SelfDistillationData],
    fingerprint: str,
    folder: Path,
) -> TrainingLoop:
    """The loop that trains heads on the first of `texts` and measures accuracy on the second; resumes from the
    checkpoint.

    Raises:
        DataError: the answers are shorter than the heads reach.
        OptionError: the folder holds a training with another configuration.
    """
    text, held_out = texts
    sampler = WindowSampler(text, head.reach, config.window, config.seed)
    schedule = config.schedule(len(sampler.windows))
    more = {"target": fingerprint, "text_sha256": hashlib.sha256(text.tokens.tobytes()).hexdigest()}
    if config.start_from is not None:
        more["start_from"] = weights_hash(head)
    objective = HeadsObjective(
        head,
        lm_head,
        functools.partial(collate, text, reach=head.reach),
        config.feed(head, lm_head),
        target,
        HeadLoss(head, lm_head, config.distillation_loss, decay=config.place_decay),
    )
    accuracy = HeldOutAccuracy.on(head, lm_head, held_out, config.evaluated_positions)
    return TrainingLoop(
        head,
        heads_optimizer(head, config.optimizer),
        objective,
        [Phase(schedule.total_steps, sampler, config.windows_per_step, config.windows_per_step)],
        schedule,
        RunFolder(folder, config.identity(schedule, config.decisive, **more), config.device, config.checkpoint_every_s),
        Measurement(config.evaluate_every, accuracy),
    )


@dataclass(frozen=True)
class HeldOutAccuracy:
    """Accuracy of each place on whole held-out answers, with the text's tokens at the places before it.

    Attributes:
        windows: the answers read, int64 `[answers, 2]`: their first row, and the number of positions with a token at
            every place. The last token of an answer is left out: the step that emits it ends the answer, so it is never
            drafted.
    """

    head: VectorHead
    lm_head: LmHead
    text: SelfDistillationData
    windows: NDArray[np.int64]

    @classmethod
    def on(cls, head: VectorHead, lm_head: LmHead, text: SelfDistillationData, positions: int) -> HeldOutAccuracy:
        """On answers of about `positions` tokens, evenly over the text.

        Raises:
            DataError: there are no answers longer than the heads reach.
        """
        reach = head.reach
        spans = zip(text.records, itertools.pairwise(text.starts), strict=True)
        by_temperature = sorted(spans, key=lambda span: span[0].temperature)
        found = [(first, end - first - 1 - reach) for _, (first, end) in by_temperature if end - first > reach + 1]
        if not found:
            raise DataError(
                f"the target's answers to the held-out prompts have all fewer than the {reach + 2} tokens that heads "
                f"which reach {reach} tokens ahead are measured on: let it write more, or let them reach less far"
            )
        every = max(1, sum(count + reach for _, count in found) // positions)
        return cls(head, lm_head, text, np.array(found[::every], dtype=np.int64))

    @torch.no_grad()
    def __call__(self) -> Mapping[str, float]:
        """`WORD_K_top_1` and `WORD_K_top_5` of each place, K from 1: fractions of positions."""
        head, lm_head = self.head, self.lm_head
        hits = torch.zeros(head.reach, 2, dtype=torch.float64)
        top = min(_TOP, lm_head.weight.shape[0])
        for batch in self._batches():
            hidden = batch.hidden[batch.places].to(next(head.parameters()).dtype)
            vectors = head.unroll(hidden, lm_head.embed(text_tokens(batch, head.reach).T))
            for place in range(head.reach):
                labels = batch.tokens[batch.places + 1 + place]
                for some, some_labels in zip(vectors[place].split(_ROWS), labels.split(_ROWS), strict=True):
                    hits[place] += _hits(head.place_logits(place, some, lm_head), some_labels, top)
        shares = (hits / int(self.windows[:, 1].sum())).tolist()
        return {
            f"{head.place_word}_{place}_top_{count}": share
            for place, of_place in enumerate(shares, start=1)
            for count, share in zip((1, _TOP), of_place, strict=True)
        }

    def _batches(self) -> Iterator[CollatedBatch]:
        device = next(self.head.parameters()).device
        number = np.cumsum(self.windows[:, 1]) // _POSITIONS
        for which in np.unique(number):
            yield collate(self.text, torch.from_numpy(self.windows[number == which]).to(device), self.head.reach)


def _hits(logits: Tensor, labels: Tensor, top: int) -> Tensor:
    """Counts of labels `[rows]` that are the first, and among the first `top`, by logits `[rows, vocab]`: `[2]`."""
    same = stable_topk(logits, top) == labels[:, None]
    return torch.stack([same[:, 0].sum(), same.sum()]).cpu()
