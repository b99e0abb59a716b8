"""A recurrent head in training (ReDrafter 2403.09919, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from truedraft.heads.redrafter import RedrafterHead

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead


@dataclass(frozen=True)
class RedrafterTrainee:
    """A recurrent head, unrolled over the tokens that it is given; see `Trainee`.

    Attributes:
        module: the head.
        lm_head: of the target, whose embedding it reads.
    """

    module: RedrafterHead
    lm_head: LmHead
    word: str = "place"

    @property
    def reach(self) -> int:
        """Tokens that are guessed behind the one that was drawn."""
        return self.module.config.length

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        """One output for all places."""
        return self.module.outputs

    def vectors(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `Trainee.vectors`; place k reads the first k + 1 tokens."""
        return self.module.unroll(hidden, self.lm_head.embed(tokens.T))
