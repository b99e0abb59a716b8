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
        True, "Norm what goes into the next step (EAGLE-3.1).", "", name="--norm-output/--no-norm-output"
    )


TRAINS = Trains(
    "An EAGLE-3 head",
    "Train an EAGLE-3 head on what the target itself writes; measures what it brings.\n\n"
    "The target computes its vectors anew in each pass, so that none are kept on disk but those of its LM "
    "head.",
    Eagle3SizeOptions,
    ChainRunOptions,
)
