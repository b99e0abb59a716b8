"""Common mistakes with Medusa heads: the variants that the doctor tries, each with its fix."""

from __future__ import annotations

from typing import Any

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.base import Drafter
from truedraft.drafters.heads.calibration import GREEDY, SAMPLED
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.measure.variants import RAW, TIED, WIDE, Examined, Variant, another_head, changed, resized, set_to


def _later_heads(head: Any) -> Any:
    """Without the first, which guesses the next token itself in some folders."""
    names = {name: name.split(".", 2) for name in head.state_dict() if name.startswith("heads.")}
    moved = {
        f"heads.{int(number) - 1}.{rest}": head.state_dict()[name]
        for name, (_, number, rest) in names.items()
        if int(number)
    }
    return changed(head, {"heads": head.config.heads - 1}, r"^heads\.", moved)


_MEDUSA = (
    Variant("heads one later", "its first head guesses the next token itself, which the target gives anyway",
            lambda _: "leave the first head out, and number the others from 0", another_head(_later_heads)),
    Variant("without the token", "it was trained without reading the token that was drawn", set_to("reads_token"),
            resized(r"^token\.", reads_token=False)),
    Variant("LM head of the target", TIED, set_to("tied"), resized(r"\.output\.", tied=True)),
    RAW,
    WIDE,
)  # fmt: skip


def _medusa_chain(heads: Any) -> Drafter:
    chain = RankTree.cartesian((1,) * heads.reach)
    return Medusa(heads, {GREEDY: chain, SAMPLED: chain}, nodes=heads.reach)


MEDUSA = Examined("Medusa heads", _medusa_chain, _MEDUSA, MedusaHeads)
