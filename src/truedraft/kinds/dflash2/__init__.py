"""DFlash 2: a block drafter that selects each token among a few candidates by the one before it."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind

KINDS: Mapping[str, Kind] = {
    "dflash2": Kind(
        "truedraft.kinds.dflash2.drafter:DFlash2",
        "DIR",
        OF_LEVELS,
        "a block drafter that selects each token among a few candidates by the one before it (DFlash 2), without DIR "
        "the one trained for the target: options as of eagle",
        head="truedraft.kinds.dflash2.module:DFlash2Head",
        trains="truedraft.kinds.dflash2.options:DFLASH2",
        training="truedraft.kinds.dflash2.training:DFlash2TrainingConfig",
        exports="truedraft.kinds.dflash2.folders:EXPORTS",
        variants="truedraft.kinds.dflash2.variants:VARIANTS",
        published="truedraft.kinds.dflash2.folders:kind_in",
    ),
}
