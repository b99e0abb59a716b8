"""Medusa heads in training (2401.10774, section 2.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from truedraft.heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead


@dataclass(frozen=True)
class MedusaTrainee:
    """Medusa heads, one for each place; see `Trainee`.

    Attributes:
        module: the heads.
        lm_head: of the target.
    """

    module: MedusaHeads
    lm_head: LmHead
    word: str = "head"

    @property
    def reach(self) -> int:
        """Number of heads."""
        return self.module.config.heads

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        """Each head's own output, or the LM head."""
        return [head.output for head in self.module.each()]

    def vectors(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `Trainee.vectors`; heads read the first token at most."""
        return self.module.vectors(hidden, self.lm_head.embed(tokens[:, 0]))
