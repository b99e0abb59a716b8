"""The head of P-EAGLE (arXiv 2602.01469): that of EAGLE-3 with more layers, which guesses all tokens in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head


@dataclass(frozen=True, slots=True)
class PEagleConfig(Eagle3Config):
    """Sizes of a P-EAGLE head.

    Attributes:
        mask_token: the id whose embedding stands for tokens that nobody knows yet.

    Raises:
        OptionError: sizes that make no head.
    """

    mask_token: int = 0

    @property
    def mask(self) -> int:
        return self.mask_token


class PEagleHead(Eagle3Head):
    """Pairs of vectors and tokens as those of EAGLE-3, and behind them pairs that nobody knows: masks.

    The last known pair gives the distribution of the next but one token, the k-th mask behind it that of the token k
    places further, whatever tokens are drafted before it. A mask is the embedding of the mask token beside a vector
    that was learned in place of the target's.

    Args:
        config: sizes.
    """

    kind: ClassVar[str] = "p-eagle"
    noun: ClassVar[str] = "a P-EAGLE head"
    plural: ClassVar[str] = "P-EAGLE heads"
    sizes: ClassVar[type[Any]] = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.merged * config.width))
