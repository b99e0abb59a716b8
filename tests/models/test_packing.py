"""The plan of a packed forward: tokens go to the device together, and chains share what they may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import chain_shape
from truedraft.models import Segment, attention
from truedraft.models.attention import ChainLayout, ForwardPlan, Full, layout_of
from truedraft.models.cache import RequestCache, key_span

FAR = torch.device("cpu", 0)
"""The CPU by its number stands for another device: tensors made without a number do not lie there."""


def test_tokens_of_the_host_go_up_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[list[int]] = []
    upload = transfers.upload

    def counted(numbers: Sequence[int], *others: Any) -> Tensor:
        uploads.append(list(numbers))
        return upload(numbers, *others)

    monkeypatch.setattr(transfers, "waits", lambda device: device == FAR)
    monkeypatch.setattr(attention.transfers, "upload", counted)
    texts = ([5, 6, 7], [8], [9, 10])
    segments = [Segment(RequestCache(64), torch.tensor(text), chain_shape(len(text)), (0,)) for text in texts]
    made = ForwardPlan.of(segments, FAR, 8)
    assert made.tokens.tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert made.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert made.rows.tolist()[:3] == [0, 3, 4]
    assert uploads.count([5, 6, 7, 8, 9, 10]) == 1
    assert len(uploads) == 3  # tokens, positions, rows
    assert all(part.device == FAR for part in made.segments)


def test_on_the_cpu_tokens_are_taken_as_they_are() -> None:
    segment = Segment(RequestCache(64), torch.tensor([4, 3]), chain_shape(2), ())
    made = ForwardPlan.of([segment], torch.device("cpu"), 1)
    assert made.tokens.data_ptr() == segment.tokens.data_ptr()


def test_chains_of_all_lengths_share_their_masks() -> None:
    """Lengths to 512 are kept. One mask for each would take 120 MB."""
    kept: dict[int, int] = {}
    held = []  # so that no address is used again
    for length in range(1, 701):
        for cached, written in ((0, 0), (100, length // 2), (513, length - 1)):
            layout = layout_of(chain_shape(length), written, cached, Full(), torch.device("cpu"))
            assert isinstance(layout, ChainLayout)
            mask, first = layout.blocked.mask, layout.blocked.first
            slots = torch.arange(first, key_span(cached + length))
            assert torch.equal(mask, slots > torch.arange(cached + written, cached + length)[:, None])
            if length <= 512:
                storage = mask.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(mask)
    assert sum(kept.values()) < 2_000_000
