"""Options of `truedraft train eagle`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.options import option
from truedraft.training.options import ChainRunOptions, LayerHeadOptions, Trains


@dataclass(frozen=True)
class Eagle3SizeOptions(LayerHeadOptions):
    """Sizes of an EAGLE-3 head."""

    fc_norm: bool = option(
        True, "Norm each layer's vectors before they are merged (EAGLE-3.1).", "", name="--fc-norm/--no-fc-norm"
    )
    norm_output: bool = option(
        True, "Norm the input of the next step (EAGLE-3.1).", "", name="--norm-output/--no-norm-output"
    )


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


EAGLE = Trains(
    "An EAGLE-3 head",
    "Train an EAGLE-3 head on what the target itself writes; measures its acceptance.\n\n"
    "The target computes its vectors anew in each pass, so that none are kept on disk but those of its LM "
    "head.",
    Eagle3SizeOptions,
    ChainRunOptions,
)
P_EAGLE = Trains(
    "A P-EAGLE head",
    "Train an EAGLE-3 head that guesses all tokens of a draft in one pass (P-EAGLE) on what the target itself "
    "writes.\n\n"
    "The target computes its vectors anew in each pass.",
    PEagleSizeOptions,
    PEagleRunOptions,
)
