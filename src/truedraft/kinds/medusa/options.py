"""Options of `truedraft train medusa`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.options import option
from truedraft.training.options import HeadRunOptions, HeadSizeOptions, Trains


@dataclass(frozen=True)
class MedusaSizeOptions(HeadSizeOptions):
    """Sizes of Medusa heads."""

    heads: int = option(4, "How many tokens after the next are guessed.", "N")
    layers: int = option(1, "Residual blocks of a head.", "N")
    reads_token: bool = option(
        True,
        "Heads also read the token that was drawn from their vector, or only the vector, as Medusa's own.",
        "",
        name="--reads-token/--vector-only",
    )


@dataclass(frozen=True)
class MedusaRunOptions(HeadRunOptions):
    """Training options of Medusa heads."""

    law_share: float = option(1.0, "1 learns the target's distributions, 0 only its tokens, in between a mixture.", "X")


@dataclass(frozen=True)
class JointOptions:
    """Stage 2: training heads and target together."""

    stage: int = option(
        1, "1: heads of a frozen target. 2: the target learns too; heads to start from are warm already.", "1|2"
    )
    joint_steps: int = option(300, "Updates of heads and target together.", "N")
    backbone_rate: float = option(5e-4, "The highest rate of the target.", "RATE")
    lora_rank: int | None = option(
        None,
        "Rank of the target's adapters, which are merged when it is saved; 0 trains all weights.",
        "R",
        shown_default="0 for small targets, else 32",
    )


MEDUSA = Trains(
    "Medusa heads",
    "Train heads that guess the tokens after the next, on what the target itself writes; measures what they bring.",
    MedusaSizeOptions,
    MedusaRunOptions,
    JointOptions,
    "Stage 2",
)
