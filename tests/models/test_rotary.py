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


def parts(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[rows, head]` as the rotation applies them, read off what it makes of two heads."""
    rows = rotation._cosines.shape[0]
    one = torch.ones(rows, 1, HEAD, dtype=rotation._cosines.dtype)
    first, second = one.clone(), one.clone()
    first[..., HEAD // 2 :] = 0
    second[..., : HEAD // 2] = 0
    turned, other = rotation(first)[:, 0], rotation(second)[:, 0]
    half = HEAD // 2
    cosines = torch.cat([turned[:, :half], other[:, half:]], dim=-1)
    sines = torch.cat([-other[:, :half], turned[:, half:]], dim=-1)
    return cosines, sines


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCALINGS)
def test_bits_are_those_of_the_module(kind: str, dtype: torch.dtype) -> None:
    """At positions in any order, repeated, and on both sides of where the table grows."""
    module, like = rotary(kind), torch.empty(0, dtype=dtype)
    positions = torch.tensor([0, 7, 7, 3, 255, 510, 511, 512, 513, 1023, 1024, 2047, 4999, 1])
    table = RotaryTable(module, like)
    assert table.width == HEAD
    cosines, sines = parts(at(table, positions, int(positions.max())))
    expected_cosines, expected_sines = module(like, positions[None])
    assert cosines.dtype == dtype
    assert cosines.equal(expected_cosines[0])
    assert sines.equal(expected_sines[0])


def test_bits_do_not_depend_on_how_far_the_table_has_grown() -> None:
    """A row of a long request, and the same row before anything was that long."""
    table = RotaryTable(rotary("yarn"), torch.empty(0))
    near = torch.arange(512)
    before = parts(at(table, near, 511))
    far = torch.tensor([9000, 100, 8191, 8192])
    cosines, _ = parts(at(table, far, 9000))
    after = parts(at(table, near, 511))
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    assert cosines[1].equal(before[0][100])


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


def test_worked_example() -> None:
    """A head (1, 2, 3, 4) has the halves a = (1, 2) and b = (3, 4); the angles are those of 3-4-5 and 5-12-13."""
    cosines, sines = [0.6, 5 / 13, 0.6, 5 / 13], [0.8, 12 / 13]
    rotation = Rotation(torch.tensor([[[*cosines, *sines]]], dtype=torch.float64), 4)
    turned = rotation(torch.tensor([[[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0]]], dtype=torch.float64))
    first = [0.6 - 3 * 0.8, (2 * 5 - 4 * 12) / 13, 3 * 0.6 + 0.8, (4 * 5 + 2 * 12) / 13]
    second = [0.0, 5 / 13, 0.0, 12 / 13]
    torch.testing.assert_close(turned, torch.tensor([[first, second]], dtype=torch.float64), rtol=0, atol=1e-15)


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
