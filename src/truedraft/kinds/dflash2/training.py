"""Training of DFlash 2 heads: DFlash's loss, and that of the selector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.errors import OptionError
from truedraft.kinds.block.module import BlockHead, Leaving
from truedraft.kinds.block.training import Blocks, BlockTrainingConfig
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.dflash2.options import DFlash2RunOptions, DFlash2SizeOptions
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.options import check_whole
from truedraft.training.chains import UnrolledStep
from truedraft.training.losses import DistillationLoss, distill

_SIZES = ("taps", "group", "rank", "candidates")


@dataclass(frozen=True)
class DFlash2TrainingConfig(DFlash2SizeOptions, DFlash2RunOptions, BlockTrainingConfig):
    """Configuration of a training of a DFlash 2 head; raises `OptionError` for a value out of its range."""

    head = DFlash2Head
    drafter = DFlash2
    decisive = BlockTrainingConfig.decisive | {*_SIZES, "selector_weight", "selector_teaches"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _SIZES:
            check_whole(name, getattr(self, name), 1)
        if not self.selector_weight >= 0.0:
            raise OptionError(f"must be 0 or more, got {self.selector_weight}", field="selector_weight")

    def sizes(self, width: int, vocab_size: int) -> DFlash2Config:
        own = {name: getattr(self, name) for name in _SIZES}
        entries = self.entries(width, vocab_size)
        return DFlash2Config(**entries, **own, block=self.length + 1, mask_id=vocab_size - 1, depth=self.depth)

    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Selections:
        return Selections(
            head, lm_head, model, self.anchors, self.seed, self.selector_weight, teaches=self.selector_teaches
        )


class Selections(Blocks):
    """A DFlash 2 head that reads answers of its target; the output of a row is the LM head's input, then the entries
    of the token before.

    `weight` is that of the selector's loss, and `teaches` whether its gradient reaches the layers.
    """

    head: DFlash2Head

    def __init__(
        self,
        head: DFlash2Head,
        lm_head: LmHead,
        model: LanguageModel,
        anchors: int,
        seed: int,
        weight: float = 1.0,
        *,
        teaches: bool = True,
    ) -> None:
        super().__init__(head, lm_head, model, anchors, seed)
        self._weight, self._teaches = weight, teaches

    def leaving(self, x: Tensor, before: Tensor, state: Tensor | None) -> Leaving:
        read = x if self._teaches else x.detach()
        return replace(super().leaving(read, before, state), x=x)

    def loss(self, vectors: Tensor, step: UnrolledStep, loss: DistillationLoss) -> tuple[Tensor, Tensor]:
        """DFlash's loss, and the cross-entropy of the true token among the candidates after the true token before it.

        A true token that is not among them takes the place of the last one in the loss. Where the draft does not have
        it, the selector learns nothing.
        """
        leaving = self._parts(vectors)
        logits = BlockHead.logits(self.head, leaving, self.lm_head)  # as of DFlash
        served = self.head.candidates(logits.detach())
        own = self.ids(step.tokens)
        tokens = own.clamp_min(0)
        ids, places = with_tokens(served[0], tokens)
        scores = (logits if self._teaches else logits.detach()).float().gather(1, ids)
        edges = self.head.candidate_selector.edges(leaving.added, ids, scores)
        selecting = functional.cross_entropy(edges, places, reduction="none") * (own >= 0)
        losses = distill(logits, step.target, tokens, loss) + self._weight * selecting
        return losses, self.head.selected(leaving.added.detach(), *served, logits.shape[1])

    def _parts(self, together: Tensor) -> Leaving:
        x, added = together.split([self.head.config.width, self.head.config.rank], -1)
        return Leaving(x, x[:, :0], added, x[:, :0])


def with_tokens(candidates: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates `[rows, candidates]` with each row's token in place of the last one if it is missing, and its place.

    Worked example: of the candidates 7, 3 the token 3 has the place 1, and the token 5 makes them 7, 5 with that place.
    """
    found = candidates == tokens[:, None]
    missing = ~found.any(-1)
    ids = candidates.clone()
    ids[:, -1] = torch.where(missing, tokens, ids[:, -1])
    return ids, torch.where(missing, ids.shape[1] - 1, found.int().argmax(-1))
