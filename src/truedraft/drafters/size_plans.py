"""Sizes that a drafter could have, and what its trees would bring with them: what planning chooses from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter

PROMISED_ON = "promised_on"
"""Among what was found out about heads: the text on which promises were measured, in words."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What nodes are expected to bring, measured on text of the target.

    Attributes:
        gains: for each node, in the order in which a budget takes them, the tokens per target call that it adds.
        depths: of the trees of 0, 1, ... nodes; what drafting them costs goes by these.
        text: on which it was measured, in words; empty where nobody wrote it down. On other text nodes bring more or
            less.
    """

    gains: tuple[float, ...]
    depths: tuple[int, ...]
    text: str = ""

    @property
    def measured_on(self) -> str:
        """The text, in words that say so where nobody knows."""
        return self.text or "text like that of its training"

    def tokens(self, nodes: int) -> float:
        """Tokens per target call with so many nodes; with all of them where there are fewer."""
        return 1.0 + math.fsum(self.gains[:nodes])


@dataclass(frozen=True, slots=True)
class SizePlan:
    """One way to size a drafter, its number of nodes still open.

    Attributes:
        name: what is chosen beside the nodes, for reports: "8 beams of 4"; empty where nothing is.
        promise: what nodes bring.
        timed: a drafter whose proposals cost what this plan's cost, by their depth.
        with_nodes: makes the drafter with a number of nodes; 0 drafts nothing.
    """

    name: str
    promise: Promise
    timed: Drafter
    with_nodes: Callable[[int], Drafter]
