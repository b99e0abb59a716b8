"""What new tokens of a chain may see, and how much is kept of it."""

from __future__ import annotations

import torch

from truedraft.core.tree import chain_shape
from truedraft.models.attention import ChainLayout, Full, layout_of
from truedraft.models.cache import key_span

CPU = torch.device("cpu")


def test_chains_of_all_lengths_share_their_masks() -> None:
    """Lengths to 512 are kept. One mask for each would take 120 MB."""
    kept: dict[int, int] = {}
    held = []  # so that no address is used again
    for length in range(1, 701):
        for cached, written in ((0, 0), (100, length // 2), (513, length - 1)):
            layout = layout_of(chain_shape(length), written, cached, Full(), CPU)
            assert isinstance(layout, ChainLayout)
            mask, first = layout.blocked.mask, layout.blocked.first
            slots = torch.arange(first, key_span(cached + length))
            assert torch.equal(mask, slots > torch.arange(cached + written, cached + length)[:, None])
            if length <= 512:
                storage = mask.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(mask)
    assert sum(kept.values()) < 2_000_000
