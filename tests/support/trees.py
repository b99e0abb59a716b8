"""Token trees by their definition."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.core.tree import TreeShape


def ancestor_mask(shape: TreeShape) -> Tensor:
    """Which node sees which: bool `[nodes, nodes]`, True where the column is the row's node or its ancestor."""
    mask = torch.zeros(len(shape), len(shape), dtype=torch.bool)
    for node in range(len(shape)):
        mask[node, list(shape.path(node))] = True
    return mask
