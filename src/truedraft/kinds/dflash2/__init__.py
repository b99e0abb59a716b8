"""DFlash 2: a block drafter that selects each token among a few candidates by the one before it."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind

KINDS: Mapping[str, Kind] = {
    "dflash2": Kind.of_heads(
        *(__name__, "dflash2", "DFlash2", "DFlash2Head", "DFlash2TrainingConfig"),
        OF_LEVELS,
        "a block drafter that selects each token among a few candidates by the one before it (DFlash 2), without DIR "
        "the one trained for the target: options as of eagle",
    ),
}
