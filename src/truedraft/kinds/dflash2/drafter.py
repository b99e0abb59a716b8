"""DFlash 2 as drafter: the LM head reads a block once, and each node draws among the candidates of its slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.errors import CompositionError
from truedraft.kinds.block.drafter import BlockDrafter, BlockRunner
from truedraft.kinds.block.module import Attend
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.models.backends.graphs.replay import Outputs
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LogitFinish


class DFlash2Runner(BlockRunner):
    """A slot is what the selector reads of it: its entries, and its candidates' ids and logits, up to a constant."""

    head: DFlash2Head

    def slots(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Outputs:
        (x,) = super().slots(anchors, positions, attend)
        candidates = (each.unflatten(0, x.shape[:2]) for each in self._candidates(x.flatten(0, 1)))
        return self.head.candidate_selector.hidden_projection(x), *candidates

    def _candidates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        vocab, own = self._target.vocab_size, self.head.lm_head
        if own is not None:
            return self.head.candidates(own(x)[:, :vocab])
        top = self._target.likeliest(x, min(self.head.config.candidates, vocab))
        return top.ids, top.log_probs

    @torch.inference_mode()
    def guess(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected, ids, logits = slot
        entries = self.head.candidate_selector.predecessor_codebook[tokens] * projected
        return self.head.selected(entries, ids, logits, self._target.vocab_size), projected[:, :0]


class DFlash2(BlockDrafter[DFlash2Head]):
    """Drafts with a DFlash 2 head; arguments: `LevelDrafter`.

    A token is drawn among its slot's candidates, from their distribution after the token drawn before it.
    """

    name = "dflash2"
    runs = DFlash2Runner

    def _runner_for(self, target: LanguageModel) -> BlockRunner:
        config, logits = self.head.config, torch.linspace(-64.0, 64.0, 9)
        own = LogitFinish(config.factor, config.cap)
        same = not config.own_output and torch.allclose(own(logits), target.finish_logits(logits))
        if own != LogitFinish() and not same:
            raise CompositionError(
                f"this head is for logits times {own.factor:g} with the cap {own.cap}, and {target.name} has others; "
                "take a head that was trained for it"
            )
        return super()._runner_for(target)
