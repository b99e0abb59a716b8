"""Common mistakes with block drafters: the variants that the doctor tries, each with its fix."""

from __future__ import annotations

import json

from truedraft.kinds.block.drafter import DFlash, DSpark
from truedraft.kinds.block.module import DFlashHead, DSparkHead
from truedraft.measure.variants import CONFIG, LAYERS, Examined, Variant, flipped

BLOCK = (
    Variant("sample_from_anchor", "its rows guess the token at another place than in training",
            lambda case: f"set sample_from_anchor to {json.dumps(case.part.config.from_anchor)} in {CONFIG}, in "
            "truedraft's own folder from_anchor", flipped("from_anchor")),
    *LAYERS,
)  # fmt: skip
DFLASH = Examined("a DFlash head", DFlash, BLOCK, DFlashHead)
DSPARK = Examined("a DSpark head", DSpark, BLOCK, DSparkHead)
