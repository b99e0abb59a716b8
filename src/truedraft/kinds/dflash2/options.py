"""Options of `truedraft train dflash2`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.kinds.block.options import BlockRunOptions, BlockSizeOptions
from truedraft.options import option
from truedraft.training.options import Trains


@dataclass(frozen=True)
class DFlash2SizeOptions(BlockSizeOptions):
    """Sizes of a DFlash 2 head."""

    draft_vocab: int = option(0, "The likeliest ids of the text, among which it guesses; 0 is all of them.", "N")
    taps: int = option(2, "Rows of a block that each convolution reads.", "N")
    group: int = option(16, "Entries of a row that share the corrections of a convolution.", "N")
    rank: int = option(128, "Entries of the selector for each id.", "N")
    candidates: int = option(16, "Likeliest ids of each place among which it selects.", "N")


@dataclass(frozen=True)
class DFlash2RunOptions(BlockRunOptions):
    """Training options of a DFlash 2 head."""

    selector_weight: float = option(1.0, "Weight of the selector's loss; that of DFlash's is 1.", "X")
    selector_teaches: bool = option(
        True,
        "Whether the gradient of the selector's loss also reaches the layers, or only the selector.",
        "",
        name="--selector-teaches/--selector-only",
    )


DFLASH2 = Trains(
    "A block drafter (DFlash 2)",
    "Train a block drafter that selects each token by the one before (DFlash 2) on what the target itself writes.\n\n"
    "All tokens of a draft come from one pass of it. The target computes its vectors anew in each pass.",
    DFlash2SizeOptions,
    DFlash2RunOptions,
)
