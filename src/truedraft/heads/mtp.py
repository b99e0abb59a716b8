"""The layer that a checkpoint brings along to predict a token further (MTP), as a head of its own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from truedraft.heads.base import Head, HeadRecord
from truedraft.models.base import LanguageModel
from truedraft.models.mtp import MtpLayer, read_mtp

_REACH = 3


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Sizes of an MTP layer.

    Attributes:
        width: entries of the target's vectors.
        vocab_size: token ids of the target.
        reach: how many tokens it drafts where nobody says; it was trained for one, and its output goes round.
    """

    width: int
    vocab_size: int
    reach: int = _REACH


class MtpHead(Head):
    """A pair of a vector at position i and the token at i + 1 gives the distribution of the token at i + 2.

    It is of the target's own files, or fine-tuned from it, and is neither trained nor written here.

    Args:
        config: sizes.
        layer: as it was read for the target.

    Attributes:
        layer: as given.
    """

    kind: ClassVar[str] = "mtp"
    noun: ClassVar[str] = "an MTP layer"
    plural: ClassVar[str] = "MTP layers"
    place_word: ClassVar[str] = "step"
    sizes: ClassVar[type[Any]] = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, layer: MtpLayer) -> None:
        super().__init__(config)
        self.layer = layer

    @classmethod
    def of(cls, target: LanguageModel, folder: str | None = None) -> Self:
        """The first such layer of a target's files, or of a folder that `speculators` wrote for it.

        Raises:
            TruedraftError: as of `truedraft.models.mtp.read_mtp`.
        """
        made = cls(MtpConfig(target.head_width, target.vocab_size), read_mtp(target, folder))
        made.record = HeadRecord(target.name)
        return made

    @property
    def reach(self) -> int:
        return self.config.reach

    @property
    def reads_tokens(self) -> bool:
        return True

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [None] * self.reach

    def start_from(self, weight: Tensor) -> None:
        """It has no output of its own."""
