"""Block drafters, DFlash and DSpark: all tokens of a draft come from one forward."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind

KINDS: Mapping[str, Kind] = {
    "dflash": Kind(
        "truedraft.kinds.block.drafter:DFlash",
        "DIR",
        OF_LEVELS,
        "a block drafter (DFlash) on vectors of several of the target's layers, without DIR the one trained for the "
        "target: all tokens of a draft come from one pass; options as of eagle",
        head="truedraft.kinds.block.module:DFlashHead",
        trains="truedraft.kinds.block.options:DFLASH",
        training="truedraft.kinds.block.training:DFlashTrainingConfig",
        exports="truedraft.kinds.block.folders:DFLASH",
        variants="truedraft.kinds.block.variants:DFLASH",
        published="truedraft.kinds.block.folders:kind_in",
    ),
    "dspark": Kind(
        "truedraft.kinds.block.drafter:DSpark",
        "DIR",
        OF_LEVELS | {"min_acceptance": "0"},
        "a block drafter with tokens that depend on those before them (DSpark), without DIR the one trained for the "
        "target: options as of eagle, and no token that is reached and accepted with less than min_acceptance by its "
        "confidence head",
        head="truedraft.kinds.block.module:DSparkHead",
        trains="truedraft.kinds.block.options:DSPARK",
        training="truedraft.kinds.block.training:DSparkTrainingConfig",
        exports="truedraft.kinds.block.folders:DSPARK",
        variants="truedraft.kinds.block.variants:DSPARK",
        published="truedraft.kinds.block.folders:kind_in",
    ),
}
