"""Triton's kernels of a layer, and forwards by them, against what torch does: `make test-kernels`, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from support.backends import HostRecorder, graph_backend
from support.loops import SMALL, TREE, assert_equal_up_to_rounding
from support.tiny_models import VOCAB, build
from support.triton_kernels import DEVICE, why_not
from truedraft.core.tree import chain_shape
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.graphs.attention import gathered_attention
from truedraft.models.llama import RootMeanSquareNorm, Rotation

kernels = pytest.importorskip("truedraft.models.backends.graphs.layer_kernels")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# A norm is off by the error of a mean of up to 300 squares, a rotation by two products: some times 2^-24 of numbers
# up to 10.
BOUND = 4e-6


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(
    width: int, *, offset: float = 0.0, seed: int = 7, dtype: torch.dtype = torch.float32
) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(random(width, seed=seed, dtype=dtype), 1e-5, offset, rounds_once=offset != 0)


def almost_all_equal(found: Tensor, expected: Tensor) -> None:
    """Equal, but for ties between half-precision numbers that a sum in another order decided otherwise."""
    assert found.dtype == expected.dtype
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=2**-20)


@pytest.mark.parametrize("width", [64, 300])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(width: int, offset: float) -> None:
    x, norm = random(3, width), norm_of(width, offset=offset)
    torch.testing.assert_close(kernels.rms_norm(x, norm), norm(x), rtol=0, atol=BOUND)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_rounds_as_torch_does(offset: float) -> None:
    x, norm = random(8, 128, dtype=torch.float16), norm_of(128, offset=offset, dtype=torch.float16)
    almost_all_equal(kernels.rms_norm(x, norm), norm(x))


def test_a_normed_row_does_not_depend_on_others() -> None:
    x, norm = random(5, 96), norm_of(96)
    assert torch.equal(kernels.rms_norm(x, norm)[3:4], kernels.rms_norm(x[3:4].clone(), norm))


def test_gated() -> None:
    x = 5 * random(3, 2 * 1100)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(kernels.gated(x), silu(gate) * up, rtol=1e-6, atol=BOUND)


def test_gated_rounds_as_torch_does() -> None:
    x = 3 * random(4, 2 * 256, dtype=torch.float16)
    gate, up = x.chunk(2, -1)
    almost_all_equal(kernels.gated(x), silu(gate) * up)


class Heads:
    """Rows whose heads are normed, turned and written, by torch."""

    def __init__(
        self, heads: int, kv_heads: int, width: int, *, rotated: int, rows: int = 5, dtype: torch.dtype = torch.float32
    ) -> None:
        self.heads, self.kv_heads, self.width, self.rotated = heads, kv_heads, width, rotated
        self.qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
        angles = random(40, rotated // 2, seed=1)
        self.table = torch.cat([angles.cos(), angles.cos(), angles.sin()], -1)[:, None].to(dtype)
        generator = torch.Generator().manual_seed(2)
        self.positions = torch.randint(40, (rows,), generator=generator).to(DEVICE)
        self.target = torch.randperm(64, generator=generator)[:rows].to(DEVICE)
        self.pages = torch.full((2, 4, 16, kv_heads, width), 9.0, dtype=dtype, device=DEVICE)

    def by_kernel(self, *norms: RootMeanSquareNorm, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Queries, and all pages."""
        pages = self.pages.clone()
        query = kernels.rotate_and_write(
            self.qkv, self.table, self.positions, self.target, pages[0], pages[1], *norms, interleaved=interleaved
        )
        return query, pages

    def by_torch(self, *norms: RootMeanSquareNorm, interleaved: bool) -> tuple[Tensor, Tensor]:
        """As `LlamaLayer.run` has it."""
        query, key, value = self.qkv.view(len(self.qkv), -1, self.width).split(
            [self.heads, self.kv_heads, self.kv_heads], 1
        )
        if norms:
            query, key = norms[0](query), norms[1](key)
        turn = Rotation(self.table[self.positions], self.rotated, interleaved)
        pages = self.pages.clone()
        for part, new in zip(pages.flatten(1, 2), (turn(key), value), strict=True):
            part[self.target] = new
        return turn(query), pages


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotated"), [(6, 2, 80, 80), (4, 4, 64, 32), (8, 1, 96, 96), (32, 8, 128, 128)]
)
def test_heads_are_normed_turned_and_written(
    heads: int, kv_heads: int, width: int, rotated: int, normed: bool, interleaved: bool
) -> None:
    example = Heads(heads, kv_heads, width, rotated=rotated)
    norms = [norm_of(width, offset=1.0, seed=3), norm_of(width, offset=1.0, seed=4)] if normed else []
    found = example.by_kernel(*norms, interleaved=interleaved)
    for one, expected in zip(found, example.by_torch(*norms, interleaved=interleaved), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rounded_as_torch_rounds_them(normed: bool, interleaved: bool) -> None:
    example = Heads(8, 2, 64, rotated=64, dtype=torch.float16)
    norms = [norm_of(64, seed=seed, dtype=torch.float16) for seed in (3, 4)] if normed else []
    found = example.by_kernel(*norms, interleaved=interleaved)
    for one, expected in zip(found, example.by_torch(*norms, interleaved=interleaved), strict=True):
        almost_all_equal(one, expected)


def test_no_rows() -> None:
    example = Heads(2, 1, 64, rotated=64, rows=0)
    query, pages = example.by_kernel(interleaved=False)
    assert query.shape == (0, 2, 64)
    assert torch.equal(pages, example.pages)
    assert kernels.gated(random(0, 8)).shape == (0, 4)
    assert kernels.rms_norm(random(0, 64), norm_of(64)).shape == (0, 64)


SHALLOW = SMALL | {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHALLOW),
    "mistral with a window": MistralConfig(**SHALLOW, sliding_window=9),
    "qwen3, with gelu": Qwen3Config(**SHALLOW, head_dim=32, hidden_act="gelu"),
}


def model_of(name: str, *, kernels: bool) -> HuggingFaceModel:
    module = build(CONFIGS[name], seed=0, spread=0.15).to(DEVICE)  # type: ignore[arg-type]
    model = HuggingFaceModel(module, None, name, lambda given: graph_backend(given, HostRecorder()))
    if not kernels:
        model._backend._attention = gathered_attention  # type: ignore[attr-defined]
        model._backend._paged._together = False  # type: ignore[attr-defined]
    return model


def forwards(model: HuggingFaceModel) -> list[torch.Tensor]:
    """A part of a prompt beside a short text, all packed; then a tree beside a chain, recorded and replayed."""
    first, second = model.new_cache(), model.new_cache()
    found = []

    def ids(count: int, seed: int) -> torch.Tensor:
        return (torch.arange(count) * 7 + seed) % VOCAB

    segments = [Segment(first, ids(70, 1), chain_shape(70), (0, 69)), Segment(second, ids(3, 2), chain_shape(3), (2,))]
    found.append(model.forward(segments).logits)
    first.commit(range(70))
    second.commit(range(3))
    for seed in range(3):
        tree = Segment(first, ids(len(TREE), seed), TREE, range(len(TREE)))
        found.append(model.forward([Segment(second, ids(2, seed), chain_shape(2), (0, 1)), tree]).logits)
        first.commit((0, 2, 4, 6))
        second.commit((0,))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_forwards_by_kernels_are_those_by_torch(name: str) -> None:
    model = model_of(name, kernels=True)
    assert "Triton kernels" in model.fast_paths
    ours, theirs = forwards(model), forwards(model_of(name, kernels=False))
    for one, other in zip(ours, theirs, strict=True):
        assert_equal_up_to_rounding(one, other)


def test_a_row_does_not_notice_its_neighbours() -> None:
    """Up to rounding: products of float32 may sum otherwise for other numbers of rows."""
    model = model_of("llama", kernels=True)
    cache = model.new_cache()
    model.forward([Segment(cache, torch.arange(40), chain_shape(40), ())])
    cache.commit(range(40))
    one = Segment(cache, torch.tensor([5]), chain_shape(1), (0,))
    alone = model.forward([one]).logits
    cache.commit(())
    beside = model.forward([Segment(model.new_cache(), torch.arange(9), chain_shape(9), (8,)), one]).logits[1:]
    assert_equal_up_to_rounding(alone, beside)
