"""Options of `truedraft train redrafter`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.options import option
from truedraft.training.options import HeadRunOptions, HeadSizeOptions, Trains


@dataclass(frozen=True)
class RedrafterSizeOptions(HeadSizeOptions):
    """Sizes of a recurrent head."""

    length: int = option(5, "How many tokens after the next are guessed in training.", "T")
    state: int | None = option(None, "Entries of the recurrent state.", "N", shown_default="the target's width")
    layers: int = option(2, "Residual blocks of a head.", "N")
    exit_width: int | None = option(
        None,
        "Entries of what enters the blocks and the output; others than the target's width only with --free.",
        "N",
        shown_default="the target's width",
    )
    rnn: bool = option(
        True, "The state is recurrent, or the plain sum of the embeddings so far.", "", name="--recurrent/--summed"
    )


@dataclass(frozen=True)
class RedrafterRunOptions(HeadRunOptions):
    """Training options of a recurrent head."""

    loss: str = option(
        "kl",
        "kl, reverse-kl, tv, jsd, lk or lk-adaptive learn the target's distributions, ce only its tokens; or a "
        "mixture: kl=0.5,tv=0.5.",
        "LOSS",
    )
    laws: str = option(
        "computed",
        "computed: whole, by the LM head at each step. stored: once, as the 64 likeliest tokens and the mass of the "
        "rest, for large vocabularies.",
        "KIND",
    )
    self_fed: float = option(
        0.0, "At this share of the positions the head reads its own guesses; 0 reads only the text's tokens.", "SHARE"
    )


REDRAFTER = Trains(
    "A recurrent head (ReDrafter)",
    "Train a recurrent head (ReDrafter) on what the target itself writes; measures its acceptance.\n\n"
    "The target stays as it is: only `truedraft train medusa --stage 2` trains it together with its heads.",
    RedrafterSizeOptions,
    RedrafterRunOptions,
)
