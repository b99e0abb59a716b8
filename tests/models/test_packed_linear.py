"""Packed weights: the same product, whatever its shape; other families get them and answer as before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    NemotronHConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
)

from support.pairwise import pairwise
from support.tiny_models import FAMILIES, GROUPED, SMALL, WINDOW, build, stock, stock_logits
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.machine import has_bfloat16
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import PackedExperts, PackedLinear, can_pack, fuse, is_experts, pack_weights

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(CPU), reason="this CPU has no bfloat16 instructions")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]
pytestmark = needs_packing


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> float:
    """How far sums of 48 products of numbers of size 1 may be apart: they are of size 7 and rounded once at the end."""
    return 1e-5 if dtype == torch.float32 else 0.13


# --- the layer ---


@pytest.mark.parametrize(
    ("dtype", "with_bias", "shape"),
    pairwise(DTYPES, [False, True], [(48,), (1, 48), (2, 48), (9, 48), (40, 48), (2, 3, 48), (0, 48), (1, 0, 48)]),
)
def test_products_and_sums_are_those_of_a_linear_layer(
    shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    """Of strided inputs and weights, too; neither inputs nor residuals change."""
    weight, bias = drawn(48, 96, dtype=dtype).t(), drawn(96, seed=1, dtype=dtype) if with_bias else None
    x, wide = drawn(*shape, seed=2, dtype=dtype), drawn(*shape[:-1], 96, seed=4, dtype=dtype)
    packed = PackedLinear(weight, bias)
    assert (packed.in_features, packed.out_features) == (48, 96)
    for given in (x, wide[..., ::2], wide[..., 48:]):
        torch.testing.assert_close(packed(given), linear(given, weight, bias), rtol=0, atol=close(dtype))
        assert packed(given).dtype == dtype
    if len(shape) > 1:
        residual = drawn(*shape[:-1], 96, seed=3, dtype=dtype)
        before = x.clone(), residual.clone()
        exact = residual.float() + linear(x.float(), weight.float(), None if bias is None else bias.float())
        torch.testing.assert_close(packed.plus(x, residual), exact.to(dtype), rtol=0, atol=close(dtype))
        assert x.equal(before[0]) and residual.equal(before[1])


@needs_bfloat16
def test_a_residual_is_added_in_float32_and_rounded_once() -> None:
    """Whole numbers, so that every sum is exact in float32 and in the worked example below.

    256 + 1 + 1 in bfloat16, which has 8 bits: rounded after each sum it stays 256, rounded once it is 258.
    """
    x, weight, bias = torch.ones(1, 1), torch.ones(1, 1), torch.ones(1)
    residual = torch.full((1, 1), 256.0)
    kind = torch.bfloat16
    packed = PackedLinear(weight.to(kind), bias.to(kind))
    assert float(packed.plus(x.to(kind), residual.to(kind))) == 258.0
    assert 256.0 + torch.tensor(1.0, dtype=kind) == 256.0

    generator = torch.Generator().manual_seed(4)
    weight, bias = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((96, 48), (96,)))
    x, residual = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((7, 48), (7, 96)))
    exact = residual + linear(x, weight, bias)
    ours = PackedLinear(weight.to(kind), bias.to(kind)).plus(x.to(kind), residual.to(kind))
    assert ours.equal(exact.to(kind))
    twice = residual.to(kind) + linear(x, weight, bias).to(kind)
    assert not twice.equal(exact.to(kind)), "the example cannot tell one rounding from two"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (384, 288))]
    + [pytest.param(torch.bfloat16, shape, marks=needs_bfloat16) for shape in ((48, 96), (384, 1024), (1024, 384))],
)
def test_rows_do_not_depend_on_how_many_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """From 2 rows on; fewer than 4 are never run in bfloat16 (`Backend.least_rows`)."""
    packed = PackedLinear(drawn(*shape, dtype=dtype))
    x, residual = drawn(64, shape[1], seed=2, dtype=dtype), drawn(64, shape[0], seed=3, dtype=dtype)
    every, summed = packed(x), packed.plus(x, residual)
    for rows in (2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 48):
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            assert packed(x[part]).equal(every[part])
            assert packed.plus(x[part], residual[part]).equal(summed[part])


# --- fusing ---


@pytest.mark.parametrize(("biased", "outs"), [((), (48, 24, 8)), ((1, 2), (48, 24, 8)), ((0,), (8,))])
def test_layers_are_fused_one_behind_another(biased: tuple[int, ...], outs: tuple[int, ...]) -> None:
    """Outputs of different sizes; where some have no bias, theirs is 0."""
    layers = [nn.Linear(48, out, bias=i in biased) for i, out in enumerate(outs)]
    x = drawn(5, 48, seed=2)
    with torch.no_grad():
        expected = torch.cat([layer(x) for layer in layers], dim=-1)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        fused = fuse(layers)
        for bias in biases:
            bias.zero_()  # its own is a copy
        torch.testing.assert_close(fused(x), expected, rtol=0, atol=close(torch.float32))
    assert fused.out_features == sum(outs)
    assert all(layer.weight.numel() == 0 and layer.bias is None for layer in layers), "the originals are not freed"
    assert not list(fused.parameters()), "a packed weight cannot be copied or saved"


# --- where packing is possible ---


def test_other_dtypes_and_devices_are_not_packed() -> None:
    assert not any(can_pack(CPU, dtype) for dtype in (torch.float16, torch.float64, torch.int8))
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    assert not can_pack(torch.device("meta"), torch.float32)


def test_what_can_be_packed_can_be_on_a_processor_without_bfloat16() -> None:
    """oneDNN is told to use no more than AVX2; where it then refuses bfloat16, `can_pack` must say so."""
    program = """
import torch
from truedraft.models.packed_linear import PackedLinear, can_pack
for dtype in (torch.float32, torch.bfloat16):
    if can_pack(torch.device("cpu"), dtype):
        PackedLinear(torch.ones(8, 8, dtype=dtype))(torch.ones(2, 8, dtype=dtype))
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr.strip().splitlines()[-1]


# --- whole models of families that the fused loop does not know ---

GEMMA = GROUPED | {"head_dim": 16, "sliding_window": WINDOW}
OTHERS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": FAMILIES["gpt2"].config,
    "gpt_neox": FAMILIES["gpt_neox"].config,
    "mixtral": FAMILIES["mixtral"].config,
    "qwen3_moe": FAMILIES["qwen3_moe"].config,
    "gemma2, tied": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0),
    "olmo2": lambda: Olmo2Config(**GROUPED),
    "phi": lambda: PhiConfig(**SMALL, intermediate_size=64),
    "granite": lambda: GraniteConfig(**GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5),
    "opt with projections": lambda: OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=24, max_position_embeddings=128),
    "cohere with scaled logits": lambda: CohereConfig(**GROUPED, logit_scale=0.25),
}
TEXT = [5, 9, 11, 3, 60, 2, 31, 8, 44, 19, 71, 6, 90]
TREE = TreeShape((-1, 0, 0, 2))
"""Below 9 tokens of context: the path 0, 2, 3 holds the rest of the text."""


def rows_of(model: HuggingFaceModel) -> Tensor:
    """Logits of the whole text: a prompt, then a tree whose second branch goes on with it."""
    cache = model.new_cache()
    ids = torch.tensor(TEXT)
    first = model.forward([Segment(cache, ids[:10], chain_shape(10), range(10))]).logits
    cache.commit(range(10))
    nodes = torch.tensor([TEXT[10], 1, TEXT[11], TEXT[12]])
    second = model.forward([Segment(cache, nodes, TREE, (0, 2, 3))]).logits
    model.release_cache(cache)
    return torch.cat([first, second]).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_get_packed_weights_and_answer_as_by_themselves(name: str, dtype: torch.dtype) -> None:
    alone = build(OTHERS[name](), seed=0, dtype=dtype)
    model = HuggingFaceModel(build(OTHERS[name](), seed=0, dtype=dtype), None, name, fastest_backend)
    assert isinstance(model._backend, StockBackend)
    assert model.fast_paths == ("packed weights",)
    assert any(isinstance(module, PackedLinear) for module in model.module.modules())
    assert not any(type(module) is nn.Linear for module in model.module.modules())
    expected = stock_logits(alone, TEXT).float()
    difference = (rows_of(model) - expected) / expected.std()
    # float32: rounding, as for all families. bfloat16: in units of the spread; a wrong weight gives about 1.
    if dtype == torch.float32:
        assert float(difference.abs().max()) <= 2e-5
    else:
        assert float(difference.square().mean().sqrt()) <= 0.08


def test_packing_changes_what_a_forward_reads_by_nothing() -> None:
    """Reports divide by these: they are those of the loaded model, though its tensors are freed."""
    for family in ("gpt_neox", "gemma3", "llama"):
        plain, fast = (HuggingFaceModel(stock(family), None, family, kind) for kind in (StockBackend, fastest_backend))
        assert (plain.parameters, plain.weight_bytes) == (fast.parameters, fast.weight_bytes)
        assert plain.fast_paths == ()


def test_a_head_that_is_tied_to_the_embedding_leaves_it_intact() -> None:
    config = OTHERS["gemma2, tied"]()
    assert config.tie_word_embeddings
    model = build(config, seed=0)
    embedding = model.get_input_embeddings().weight.clone()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    loaded = HuggingFaceModel(model, None, "tied", fastest_backend)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert loaded.module.get_input_embeddings().weight.equal(embedding)


MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": FAMILIES["mixtral"].config,
    "gpt-oss: turned, every second a gate, biases": lambda: GptOssConfig(
        **GROUPED, head_dim=16, num_local_experts=6, num_experts_per_tok=3
    ),
    "nemotron: no gate": lambda: NemotronHConfig(
        **GROUPED, head_dim=16, layers_block_type=["attention", "moe"], n_routed_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=24, n_group=1, topk_group=1,
    ),
}  # fmt: skip


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(MIXTURES[name](), seed=1, dtype=dtype)
    return next(module for module in model.modules() if is_experts(module))


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_packed_experts_give_what_transformers_own_do(name: str) -> None:
    experts, x = experts_of(name), drawn(9, 48, seed=3)
    index = torch.stack([torch.randperm(experts.num_experts)[:3] for _ in range(9)])
    shares = torch.rand(9, 3)
    expected = experts(x, index, shares)
    packed = PackedExperts(experts)
    assert not any(weight.numel() for weight in experts.parameters()), "freed"
    torch.testing.assert_close(packed(x, index, shares), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert packed(x[:0], index[:0], shares[:0]).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_rows_of_experts_do_not_depend_on_those_beside_them(name: str, dtype: torch.dtype) -> None:
    packed, x = PackedExperts(experts_of(name, dtype)), drawn(40, 48, seed=3, dtype=dtype)
    index = torch.stack([torch.randperm(packed.num_experts)[:2] for _ in range(40)])
    shares = torch.rand(40, 2).to(dtype)
    every = packed(x, index, shares)
    for part in (slice(0, 1), slice(7, 9), slice(39, 40), slice(3, 20), torch.randperm(40)):
        assert packed(x[part], index[part], shares[part]).equal(every[part])


def test_experts_that_compute_something_else_are_left_alone() -> None:
    assert is_experts(experts_of("mixtral"))
    for change in ("hook", "parameter", "class", "parallel"):
        experts = experts_of("mixtral")
        if change == "hook":
            experts.register_forward_hook(lambda module, inputs, output: output)
        elif change == "parameter":
            experts.scale = nn.Parameter(torch.ones(4))
        elif change == "class":
            experts.__class__ = type("Louder", (type(experts),), {"forward": lambda self, x, *_: 2 * x})
        else:
            experts._is_expert_parallel = True
        assert not is_experts(experts), change


class _Shared(nn.Module):
    """Two layers with one weight, neither of which is the LM head, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.first, self.second, self.own = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_weight_that_is_used_twice_is_not_freed() -> None:
    model = _Shared()
    weight, embedding = model.first.weight.clone(), model.embedding.weight.clone()
    x = drawn(3, 8)
    with torch.no_grad():
        layers = (model.first, model.second, model.own, model.head)
        expected = [layer(x) for layer in layers]
        # Two sums of the same eight products and a bias, in whatever order, are at most so far apart (Higham, 3.1).
        terms = [x.abs() @ layer.weight.abs().T + (0 if layer.bias is None else layer.bias.abs()) for layer in layers]
        assert pack_weights(model) == 2  # type: ignore[arg-type]
        got = [layer(x) for layer in (model.first, model.second, model.own, model.head)]
    assert isinstance(model.own, PackedLinear)
    assert isinstance(model.head, PackedLinear)
    assert model.first.weight is model.second.weight
    assert model.first.weight.equal(weight)
    assert model.embedding.weight.equal(embedding)
    for ours, theirs, size in zip(got, expected, terms, strict=True):
        assert bool(((ours - theirs).abs() <= 2 * 9 * 2**-24 * size).all())


def test_nothing_to_pack_is_no_fast_path() -> None:
    """GPT-2's layers are not of the class `nn.Linear`; with the head replaced too, nothing is left."""
    model = stock("gpt2")
    model.get_output_embeddings().__class__ = type("Another", (nn.Linear,), {})
    assert HuggingFaceModel(model, None, "gpt2", fastest_backend).fast_paths == ()
