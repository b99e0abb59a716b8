"""DFlash 2 as drafter: the LM head reads a block once, and each node draws among the candidates of its slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from truedraft.drafters.tree_builder import TreeBuilder
from truedraft.errors import CompositionError
from truedraft.kinds.block.drafter import BlockDrafter, BlockRunner
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.models.backends.graphs.replay import Outputs
from truedraft.models.backends.native.linear import likeliest_of
from truedraft.models.base import Choose, LanguageModel
from truedraft.models.lm_head import LogitFinish


class DFlash2Runner(BlockRunner):
    """A slot is what the selector reads of it: its entries, and its candidates' ids and logits, up to a constant."""

    head: DFlash2Head

    def ends(self, x: Tensor) -> Outputs:
        candidates = (each.unflatten(0, x.shape[:2]) for each in self._candidates(x.flatten(0, 1)))
        return self.head.candidate_selector.hidden_projection(x), *candidates

    @property
    def guessed(self) -> int:
        """Number of the draft's ids."""
        return self.head.config.draft_vocab or self._target.vocab_size

    def _candidates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own, count = self.head.lm_head, min(self.head.config.candidates, self.guessed)
        top = self._target.likeliest(x, count) if own is None else likeliest_of(own(x)[:, : self.guessed], count)
        return top.ids, top.log_probs

    @torch.inference_mode()
    def guess(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected, ids, logits = slot
        entries = self.head.candidate_selector.predecessor_codebook[tokens] * projected
        return self.head.selected(entries, ids, logits, self.guessed), projected[:, :0]

    @torch.inference_mode()
    def edges(self, slots: Outputs, anchors: Tensor, names: Tensor | None) -> Tensor:
        """Logits of each slot's candidates after each of those before: float32 `[blocks, reach, before, candidates]`.

        Before the first slot is the anchor, in every place. `names` are the target's ids of the draft's.
        """
        projected, ids, logits = slots
        known = ids if names is None else names[ids]
        before = torch.cat([anchors[:, None, None].expand_as(known[:, :1]), known[:, :-1]], 1)
        selector = self.head.candidate_selector
        entries = selector.predecessor_codebook[before] * projected[:, :, None]
        return logits[:, :, None] + (entries @ selector.successor_codebook[ids].transpose(2, 3)).float()


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

    def _draw_levels(
        self, choose: Choose, chains: Sequence[TreeBuilder], numbers: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Sequence[float], Tensor | None]]:
        """As of `BlockDrafter`, over the candidates only: all logits that a chain may need are computed together."""
        runner, names = cast(DFlash2Runner, self._running[0]), None if self._ids is None else self._ids.ids
        slots, anchors = self._slots_after(chains)
        edges, ids = runner.edges(slots, anchors, names).numpy(), slots[1]
        given = [each.tolist() for each in numbers]  # of sampled requests temperatures and uniform numbers
        places = [0] * len(chains)
        for level in range(self.head.reach):
            drawn = [
                _drawn(edges[row, level, place], *(own[row][level] for own in given))
                for row, place in enumerate(places)
            ]
            places = [place for place, _ in drawn]
            tokens = ids[:, level].gather(1, torch.tensor(places)[:, None])[:, 0]
            probs = None
            if given:
                dists = torch.from_numpy(np.stack([dist for _, dist in drawn]))
                probs = dists.new_zeros(len(chains), runner.guessed).scatter_(1, ids[:, level], dists)
            yield tokens if names is None else names[tokens], [float(dist[place]) for place, dist in drawn], probs


def _drawn(logits: np.ndarray, temperature: float = 0.0, uniform: float = 0.0) -> tuple[int, np.ndarray]:
    """The place of a candidate, and the candidates' distribution `[candidates]`, float32: what it is drawn from, or,
    at temperature 0, that of temperature 1. Where logits are not finite, it is the first with probability 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp((logits - logits.max()) / (temperature or 1.0), dtype=np.float32)
    total = weights.sum()
    if not np.isfinite(total):
        return 0, np.eye(1, len(logits), dtype=np.float32)[0]
    if not temperature:
        return int(logits.argmax()), weights / total
    sums = np.cumsum(weights / total, dtype=np.float64)
    return int(np.searchsorted(sums, uniform * sums[-1], side="right").clip(max=len(sums) - 1)), weights / total
