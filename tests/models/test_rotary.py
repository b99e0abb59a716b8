"""The table of rotary positions holds the very numbers of the model's own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from truedraft.models.llama import RotaryTable, Rotation

HEAD = 16
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    # The only one of these that also scales cosines and sines, here by 1.14.
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
DTYPES = [torch.float32, torch.bfloat16]


def rotary(kind: str = "default", head: int = HEAD) -> nn.Module:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=head, max_position_embeddings=256, rope_parameters=parameters
    )
    return LlamaRotaryEmbedding(config)


def at(table: RotaryTable, positions: Tensor, furthest: int) -> Rotation:
    """The rotation of a forward's rows."""
    table.reach(furthest)
    return table.at(positions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCALINGS)
def test_bits_are_those_of_the_module(kind: str, dtype: torch.dtype) -> None:
    """On both sides of where the table grows, and however far it has grown."""
    module, like = rotary(kind), torch.empty(0, dtype=dtype)
    table = RotaryTable(module, like)
    first, positions = table.table.clone(), torch.tensor([0, 7, 255, 511, 512, 513, 1023, 1024, 2047, 4999])
    table.reach(4999)
    cosines, sines = module(like, positions[None])
    assert table.width == HEAD and table.table.dtype == dtype
    assert table.table[positions, 0].equal(torch.cat([cosines[0], sines[0, :, : HEAD // 2]], dim=-1))
    assert table.table[: len(first)].equal(first)


def test_growth_is_by_doubling() -> None:
    """A text that grows by a token at a time rebuilds its table a few times, not at every token."""
    calls: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = rotary()

        def forward(self, like: Tensor, positions: Tensor) -> Any:
            calls.append(positions.shape[1])
            return self.inner(like, positions)

    table = RotaryTable(Counted(), torch.empty(0))
    for position in range(3000):
        at(table, torch.tensor([position]), position)
        assert len(table.table) > position
    assert len(calls) == 4  # 512, 1,024, 2,048 and 4,096 positions
    assert calls == sorted(calls) and calls[-1] >= 3000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turns_as_transformers_does(dtype: torch.dtype) -> None:
    """Several heads, and heads that are a view of something wider, as the product of a fused layer gives them."""
    module, positions = rotary(), torch.tensor([0, 5, 300, 511])
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(4, 5, HEAD, generator=generator).to(dtype)
    heads = wide[:, :3]
    before = wide.clone()
    ours = at(RotaryTable(module, torch.empty(0, dtype=dtype)), positions, 511)(heads)
    cosines, sines = module(torch.empty(0, dtype=dtype), positions[None])
    theirs, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cosines, sines)
    # Two products and a sum, each rounded once at most, of numbers below 4.
    close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.04}[dtype]
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=0, atol=close)
    assert wide.equal(before), "its input was changed"
