"""Rows whose bits hang on nothing but their own text."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models import HuggingFaceModel, Segment

PATH = 8


def assert_rows_are_alike(model: HuggingFaceModel) -> None:
    """A path's logits, all at once, beside a neighbour, one by one, and in a tree with siblings between."""
    ids = torch.randint(model.vocab_size, (60,), generator=torch.Generator().manual_seed(3))
    context, path, other = ids[:40], ids[40 : 40 + PATH], ids[40 + PATH :]

    def forward(*segments: Segment) -> Tensor:
        return model.forward(list(segments)).logits.clone()

    with model.trying() as cache, model.trying() as beside:
        forward(Segment(cache, context, chain_shape(40), ()))
        cache.commit(range(40))
        forward(Segment(beside, ids[:20], chain_shape(20), ()))
        beside.commit(range(20))
        expected = forward(Segment(cache, path, chain_shape(PATH), range(PATH)))
        neighbour = Segment(beside, other, chain_shape(len(other)), range(len(other)))
        assert forward(neighbour, Segment(cache, path, chain_shape(PATH), range(PATH)))[-PATH:].equal(expected)
        # Node 2 i is the path's, node 2 i + 1 its sibling.
        tree = TreeShape(tuple(parent for i in range(PATH) for parent in [2 * i - 2 if i else -1] * 2))
        mixed = torch.stack([path, other[:PATH]], dim=1).flatten()
        assert forward(Segment(cache, mixed, tree, range(0, 2 * PATH, 2))).equal(expected)
        cache.commit(range(0, 2 * PATH, 2)[:4])
        for place in range(4, PATH):
            row = forward(Segment(cache, path[place : place + 1], chain_shape(1), (0,)))
            assert row[0].equal(expected[place]), place
            cache.commit((0,))
