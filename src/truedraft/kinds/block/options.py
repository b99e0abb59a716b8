"""Options of `truedraft train dflash` and `dspark`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.options import option
from truedraft.training.options import ChainRunOptions, LayerHeadOptions, Trains


@dataclass(frozen=True)
class BlockSizeOptions(LayerHeadOptions):
    """Sizes of a block drafter."""

    length: int = option(7, "How many tokens are guessed at once.", "T")
    layers: tuple[int, ...] = option(
        (),
        "A layer of the target to read the output of, 0 the first; may be repeated.",
        "N",
        name="--layer",
        shown_default="five, evenly from the second to the third last",
    )
    depth: int = option(2, "Decoder layers of the head.", "N")


@dataclass(frozen=True)
class BlockRunOptions(ChainRunOptions):
    """Training options of a block drafter."""

    anchors: int = option(64, "Places of an answer, at random, from which blocks are guessed in each pass.", "N")


@dataclass(frozen=True)
class DSparkSizeOptions(BlockSizeOptions):
    """Further sizes of a DSpark head."""

    markov: int = option(128, "Entries of the Markov head.", "N")
    markov_kind: str = option("vanilla", "vanilla, gated, or rnn, which carries a state along the block.", "KIND")


@dataclass(frozen=True)
class DSparkRunOptions(BlockRunOptions):
    """Training options of a DSpark head."""

    loss: str = option(
        "kl=0.1,tv=1.8", "kl, reverse-kl, tv, jsd, lk or lk-adaptive; or a mixture, as the one that DSpark has.", "LOSS"
    )


DFLASH = Trains(
    "A block drafter (DFlash)",
    "Train a block drafter (DFlash) on what the target itself writes; measures its acceptance.\n\n"
    "All tokens of a draft come from one pass of it. The target computes its vectors anew in each pass.",
    BlockSizeOptions,
    BlockRunOptions,
)
DSPARK = Trains(
    "A block drafter (DSpark)",
    "Train a block drafter with tokens that depend on those before them (DSpark) on what the target itself writes.\n\n"
    "It also learns how likely the target accepts each token. The target computes its vectors anew in each "
    "pass.",
    DSparkSizeOptions,
    DSparkRunOptions,
)
