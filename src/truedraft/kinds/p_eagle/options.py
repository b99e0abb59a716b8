"""Options of `truedraft train p-eagle`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.options import option
from truedraft.training.options import ChainRunOptions, LayerHeadOptions, Trains


@dataclass(frozen=True)
class PEagleSizeOptions(LayerHeadOptions):
    """Sizes of a P-EAGLE head."""

    length: int = option(8, "How many tokens are guessed at once.", "T")
    depth: int = option(4, "Decoder layers of the head.", "N")
    own_embedding: bool = option(
        False,
        "An embedding of its own, which begins as the target's and learns, or the target's.",
        "",
        name="--own-embedding/--targets-embedding",
    )


@dataclass(frozen=True)
class PEagleRunOptions(ChainRunOptions):
    """Training options of a P-EAGLE head."""

    kept: float = option(
        0.7, "Share of the places with one more mask at each token further ahead, at random; a fifth remain.", "SHARE"
    )


TRAINS = Trains(
    "A P-EAGLE head",
    "Train an EAGLE-3 head that guesses all tokens of a draft in one pass (P-EAGLE) on what the target itself "
    "writes.\n\n"
    "The target computes its vectors anew in each pass.",
    PEagleSizeOptions,
    PEagleRunOptions,
)
