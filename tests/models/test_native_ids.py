"""The native forward refuses ids that are not there: it would read foreign memory."""

from __future__ import annotations

import pytest
import torch

from truedraft import load_model
from truedraft.core.trees import chain_shape
from truedraft.errors import ModelError
from truedraft.models.base import Segment
from truedraft.models.native import NativeBody


@pytest.mark.parametrize("token", [-1, 8192, 2**40])
def test_an_unknown_token_is_refused_and_the_next_forward_runs(token: int) -> None:
    model = load_model("embedded:draft", dtype="float32")
    if not isinstance(model._body, NativeBody):
        pytest.skip("there is no C compiler on this machine")
    cache = model.new_cache()
    with pytest.raises(ModelError, match="outside 0 to 8191"):
        model.forward([Segment(cache, torch.tensor([5, token]), chain_shape(2), (1,))])
    cache.rollback(0)
    assert model.forward([Segment(cache, torch.tensor([5, 6]), chain_shape(2), (1,))]).logits.isfinite().all()
