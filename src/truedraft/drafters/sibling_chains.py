"""Several chains for one context, drawn in parallel and merged where they agree."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import INDEPENDENT_DRAWS, OpenNode
from truedraft.drafters.tree_builder import TreeBuilder
from truedraft.models.cache import RequestCache


class SiblingChains(TreeBuilder):
    """Builds the tree of several chains, each drawn from the draft independently (SpecTr, Sun et al. 2310.15141).

    Equal prefixes are one path, so a node on m chains has m independent draws; two of them may have one child, and both
    count. If the draft is sure, the chains stay together with several draws per node; otherwise they separate. The
    number of draws at a node depends on the tokens above it, so it is known before the first is drawn.

    Worked example: three chains 5 7, 5 8 and 5 7 are node 0 = 5 with three draws at the root that all name it, and its
    children 1 = 7, named by two of the three draws there, and 2 = 8.

    Args:
        request: sampled, without a seed.
        budget: its width limits the number of chains.
    """

    def __init__(
        self,
        cache: RequestCache,
        request: DraftRequest,
        budget: Budget,
        noise: Noise,
        chains: int,
        device: torch.device,
    ) -> None:
        count = min(chains, budget.width)
        super().__init__(cache, request, budget, noise, (max(1, count),) * max(1, budget.depth), device)
        self.drawing = INDEPENDENT_DRAWS
        self._passing = {-1: count}  # by node: number of chains through it; -1 is the root
        self._known: dict[tuple[int, int | Tensor], int] = {}  # children by parent and token

    def open_nodes(self) -> list[OpenNode]:
        """As many draws at each node as chains through it; the node budget cuts as if no two of them agreed."""
        widths = [self._passing[node] for node in self._open]
        first, left = len(self._tokens), self.budget.nodes - len(self._tokens)
        return [
            OpenNode(self._noise, self._depth, first + before, max(0, min(width, left - before)))
            for before, width in zip(itertools.accumulate(widths, initial=0), widths, strict=False)
        ]

    def _child(self, parent: int, token: int | Tensor) -> int:
        """The node below `parent` with a drawn token; counts its draws."""
        key = parent, token
        if key not in self._known:
            self._known[key] = super()._child(parent, token)
        node = self._known[key]
        self._passing[node] = self._passing.get(node, 0) + 1
        return node
