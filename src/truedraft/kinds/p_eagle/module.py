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
        mask_token: the id with the embedding of unknown tokens.

    Raises:
        OptionError: invalid sizes.
    """

    mask_token: int = 0

    @property
    def mask(self) -> int:
        return self.mask_token


class PEagleHead(Eagle3Head):
    """Pairs of hidden states and tokens as in EAGLE-3, followed by unknown pairs: masks.

    The last known pair gives the distribution of the next but one token, and the k-th mask after it that of the token k
    positions further, whatever tokens are drafted before it. A mask is the embedding of the mask token with a learned
    vector in place of the target's hidden state.
    """

    kind: ClassVar[str] = "p-eagle"
    noun: ClassVar[str] = "a P-EAGLE head"
    plural: ClassVar[str] = "P-EAGLE heads"
    sizes: ClassVar[type[Any]] = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.merged * config.width))
