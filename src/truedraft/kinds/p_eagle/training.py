"""Training of P-EAGLE heads (2602.01469): masks after each pair, of which few are kept far ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from truedraft.drafters.heads.levels import LevelDrafter
from truedraft.errors import OptionError
from truedraft.kinds.eagle.training import Unrolled
from truedraft.kinds.p_eagle.drafter import PEagle
from truedraft.kinds.p_eagle.module import PEagleConfig, PEagleHead
from truedraft.kinds.p_eagle.options import PEagleRunOptions, PEagleSizeOptions
from truedraft.options import check_whole
from truedraft.training.chains import ChainTrainingConfig
from truedraft.training.texts.self_distillation import WrittenAnswer

if TYPE_CHECKING:
    from truedraft.drafters.heads.head import Head
    from truedraft.models.base import LanguageModel
    from truedraft.models.lm_head import LmHead

_LEAST = 0.2  # of the pairs, at any depth


@dataclass(frozen=True)
class PEagleTrainingConfig(PEagleSizeOptions, PEagleRunOptions, ChainTrainingConfig):
    """Configuration of a training of a P-EAGLE head.

    Raises:
        OptionError: a value out of its range.
    """

    head: ClassVar[type[Head]] = PEagleHead
    drafter: ClassVar[type[LevelDrafter[Any, Any]]] = PEagle
    decisive: ClassVar[frozenset[str]] = ChainTrainingConfig.decisive | {"depth", "own_embedding", "kept"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("depth", self.depth, 1)
        if not 0.0 < self.kept <= 1.0:
            raise OptionError(f"must lie in (0, 1], got {self.kept}", field="kept")

    def sizes(self, width: int, vocab_size: int) -> PEagleConfig:
        return PEagleConfig(
            **self.entries(width, vocab_size),
            own_embedding=self.own_embedding,
            reach=self.length,
            more_layers=self.depth - 1,
            mask_token=vocab_size - 1,
        )

    def new_head(self, lm_head: LmHead) -> Head:
        head: Any = super().new_head(lm_head)
        if head.embed_tokens is not None:
            head.embed_tokens.weight.data.copy_(lm_head.embed(torch.arange(head.config.vocab_size)))
        return head

    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Masked:
        return Masked(head, lm_head, model, self.kept, self.seed)


class Masked(Unrolled):
    """A head that reads answers of its target, and masks after each pair, all of a step at once.

    At step k the pair at index i is its k-th mask, at position i + k, and predicts the text's token at i + k + 2. It
    attends to pairs 0 to i of the text, and the masks of its own index up to itself (2602.01469, section 3).

    Args:
        kept: share of the pairs with a mask that also have the next one, in training, down to a fifth of all.
    """

    def __init__(self, head: PEagleHead, lm_head: LmHead, model: LanguageModel, kept: float, seed: int) -> None:
        super().__init__(head, lm_head, model)
        self._shares, self._seed = np.maximum(kept ** np.arange(head.reach), min(_LEAST, kept)), seed

    def pairs(self, answer: WrittenAnswer, number: int) -> Mapping[int, int]:
        """Worked example: with half kept, 4 of 8 pairs have two steps or more, 2 of these three, and 2 all others."""
        every = super().pairs(answer, number)
        order = np.random.default_rng((self._seed, number)).permutation([*every]).tolist()
        kept = np.ceil(self._shares * len(order))
        lengths = {pair: min(every[pair], int((kept > rank).sum())) for rank, pair in enumerate(order)}
        return dict(sorted(lengths.items(), key=lambda each: -each[1]))

    def _entering(self, step: int, pairs: Tensor, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        if not step:
            return super()._entering(step, pairs, x, embedded)
        config = self.head.config
        mask = self.head.fuse(self.head.mask_hidden[0].chunk(config.merged, dim=-1))
        token = self._embed(torch.tensor([config.mask_token], device=pairs.device))
        return mask.expand(*pairs.shape, -1), token.expand(*pairs.shape, -1)
