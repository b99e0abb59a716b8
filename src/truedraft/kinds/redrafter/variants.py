"""Common mistakes with recurrent heads: the variants that the doctor tries, each with its fix."""

from __future__ import annotations

from typing import Any

from truedraft.drafters.base import Drafter
from truedraft.kinds.redrafter.drafter import Redrafter
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.measure.variants import RAW, TIED, WIDE, Examined, Variant, flipped, resized, set_to

_REDRAFTER = (
    Variant("embeddings scaled or not", "it reads embeddings at another scale than in training", set_to("scaled"),
            flipped("scaled")),
    Variant("LM head of the target", TIED, set_to("tied"), resized(r"^output\.", tied=True)),
    RAW,
    WIDE,
)  # fmt: skip


def _redrafter_chain(head: Any) -> Drafter:
    return Redrafter(head, beams=1, length=head.reach, nodes=head.reach, sampled=False)


REDRAFTER = Examined("a recurrent head", _redrafter_chain, _REDRAFTER, RedrafterHead)
