"""How often heads in training are right on answers that they are not trained on: for the log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.errors import DataError
from truedraft.models.ranking import largest_ids
from truedraft.training.feeding import TextFeed
from truedraft.training.trainee import place_logits
from truedraft.training.windows import Pack, pack

if TYPE_CHECKING:
    from truedraft.training.self_text import SelfText
    from truedraft.training.trainee import Trainee

_TOP = 5
_POSITIONS = 1024  # at once, about
_ROWS = 256  # whose logits are held at once


@dataclass(frozen=True)
class HeldOutAccuracy:
    """How often each place is right, on whole answers, where those before it are the text's.

    Attributes:
        trainee: heads in training.
        text: held-out answers.
        windows: the answers that are read, int64 `[answers, 2]`: their first row, and how many positions have a token
            at every place. The last token of an answer is left out: the step that emits it ends the answer, so it is
            never drafted.
    """

    trainee: Trainee
    text: SelfText
    windows: NDArray[np.int64]

    @classmethod
    def on(cls, trainee: Trainee, text: SelfText, positions: int) -> HeldOutAccuracy:
        """On answers of about so many tokens, evenly over the text.

        Raises:
            DataError: there are no answers longer than what the heads reach.
        """
        reach = trainee.reach
        spans = zip(text.records, itertools.pairwise(text.starts), strict=True)
        by_temperature = sorted(spans, key=lambda span: span[0].temperature)
        found = [(first, end - first - 1 - reach) for _, (first, end) in by_temperature if end - first > reach + 1]
        if not found:
            raise DataError(
                f"the target's answers to the held-out prompts have all fewer than the {reach + 2} tokens that heads "
                f"which reach {reach} tokens ahead are measured on: let it write more, or let them reach less far"
            )
        every = max(1, sum(count + reach for _, count in found) // positions)
        return cls(trainee, text, np.array(found[::every], dtype=np.int64))

    @torch.no_grad()
    def __call__(self) -> Mapping[str, float]:
        """`WORD_K_top_1` and `WORD_K_top_5` of each place, K from 1: shares of positions."""
        trainee = self.trainee
        hits = torch.zeros(trainee.reach, 2, dtype=torch.float64)
        top = min(_TOP, trainee.lm_head.weight.shape[0])
        for some in self._packs():
            weight = next(trainee.module.parameters())
            hidden = some.hidden[some.places].to(weight.dtype)
            vectors = trainee.vectors(hidden, TextFeed(trainee.reach).tokens(some, hidden))
            for place in range(trainee.reach):
                labels = some.tokens[some.places + 1 + place]
                for some_vectors, some_labels in zip(vectors[place].split(_ROWS), labels.split(_ROWS), strict=True):
                    hits[place] += _hits(place_logits(trainee, place, some_vectors), some_labels, top)
        shares = (hits / self.windows[:, 1].sum()).tolist()
        return {
            f"{trainee.word}_{place}_top_{count}": share
            for place, of_place in enumerate(shares, start=1)
            for count, share in zip((1, _TOP), of_place, strict=True)
        }

    def _packs(self) -> Iterator[Pack]:
        device = next(self.trainee.module.parameters()).device
        number = np.cumsum(self.windows[:, 1]) // _POSITIONS
        for which in np.unique(number):
            yield pack(self.text, torch.from_numpy(self.windows[number == which]).to(device), self.trainee.reach)


def _hits(logits: Tensor, labels: Tensor, top: int) -> Tensor:
    """How many labels `[rows]` are the first, and among the first `top`, by logits `[rows, vocab]`: `[2]`."""
    same = largest_ids(logits, top) == labels[:, None]
    return torch.stack([same[:, 0].sum(), same.sum()]).cpu()
