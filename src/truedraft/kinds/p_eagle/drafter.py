"""P-EAGLE as drafter: one forward reads the committed tokens and masks after them, and gives all guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.drafters.heads.levels import Tree
from truedraft.kinds.eagle.drafter import Eagle3, Eagle3Runner, levels_of
from truedraft.kinds.p_eagle.module import PEagleHead
from truedraft.models.base import LanguageModel


class PEagle(Eagle3):
    """Drafts with a P-EAGLE head (2602.01469); options: `LevelDrafter`.

    All nodes at one depth share a distribution, which does not depend on the draws above them; verification is as exact
    as for any other draws. A proposal is one forward at any depth.

    Raises:
        OptionError: an option is out of range, or the head does not name its layers.
    """

    name: ClassVar[str] = "p-eagle"
    levels = 1
    head: PEagleHead

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        runner = super()._new_runner(target)
        self._mask = self.head.mask_hidden[0].to(target.device, target.dtype)  # [1, layers * width]
        return runner

    def _behind(self, levels: int) -> tuple[Tensor, Tensor]:
        masks = levels - 1
        return torch.full((masks,), self.head.config.mask_token), self._mask.expand(masks, -1)

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        _, logits = self._catch_up(level)
        ahead = dict(zip(level, logits.split(list(map(levels_of, level))), strict=True))
        depth = 0
        while level:
            rows = [ahead[own][depth : depth + 1].expand(len(own.open), -1) for own in level]
            level, depth = grow(level, torch.cat(rows)), depth + 1
