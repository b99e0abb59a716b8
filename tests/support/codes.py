"""What tests of quantised weights share: logits of a text, and a reference that reads inputs as products with codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.errors import ModelError
from truedraft.models import HuggingFaceModel, LanguageModel, Segment
from truedraft.models.quantized import GROUP


@torch.inference_mode()
def logits(model: LanguageModel, ids: Tensor | Sequence[int]) -> Tensor:
    """`[tokens, vocab]`, after each token of a text, in float32."""
    cache = model.new_cache()
    try:
        segment = Segment(cache, torch.as_tensor(ids), chain_shape(len(ids)), range(len(ids)))
        return model.forward([segment]).logits.float()
    finally:
        model.release_cache(cache)


def in_eight_bits(x: Tensor, order: Tensor | None = None) -> Tensor:
    """What products with codes read of inputs: groups of 32, in the weight's order, in 8 bits with a sign."""
    groups = (x.float() if order is None else x.float()[..., order]).unflatten(-1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True) / 127
    read = ((groups * torch.where(step > 0, 1 / step, 0.0)).round() * step).flatten(-2)
    return read if order is None else read[..., order.argsort()]


def read_in_eight_bits(
    model: HuggingFaceModel, orders: Mapping[str, Tensor] = {}, ends: tuple[str, ...] = ("",)
) -> None:
    """Let the linear layers with these ends of names read inputs as products with codes do."""
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ends):
            order = orders.get(name)
            module.register_forward_pre_hook(lambda _, given, order=order: (in_eight_bits(given[0], order),))


def assert_given_by_codes(found: Tensor, expected: Tensor) -> None:
    """An input on the border of two codes may become either, and changes its row; some rows meet none."""
    apart = (found - expected).std(-1) / expected.std(-1)
    assert apart.quantile(0.2) < 1e-5
    assert apart.max() < 0.05


def refusal_of(file: Path, error: type[Exception] = ModelError) -> str:
    """The one sentence that refuses a file, by its name."""
    with pytest.raises(error) as raised:
        load_model(file)
    said = str(raised.value)
    assert said.startswith(repr(str(file))) and "\n" not in said and said.count(". ") == 0
    return said
