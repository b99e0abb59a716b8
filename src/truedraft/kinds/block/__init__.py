"""Block drafters, DFlash and DSpark: all tokens of a draft come from one forward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from truedraft.drafters.kinds import OF_LEVELS, Kind

_kind = partial(Kind.of_heads, __name__)

KINDS: Mapping[str, Kind] = {
    "dflash": _kind(
        *("dflash", "DFlash", "DFlashHead", "DFlashTrainingConfig"),
        OF_LEVELS,
        "a block drafter (DFlash) on vectors of several of the target's layers, without DIR the one trained for the "
        "target: all tokens of a draft come from one pass; options as of eagle",
    ),
    "dspark": _kind(
        *("dspark", "DSpark", "DSparkHead", "DSparkTrainingConfig"),
        OF_LEVELS | {"min_acceptance": "0"},
        "a block drafter with tokens that depend on those before them (DSpark), without DIR the one trained for the "
        "target: options as of eagle, and no token that is reached and accepted with less than min_acceptance by its "
        "confidence head",
    ),
}
