"""Triton's kernels compile for GPUs that need not be there, and fit them."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from support.paged_requests import Asked, lay_out
from truedraft.core.tree import chain_shape
from truedraft.models.backends.graphs import attention_kernel, layer_kernels
from truedraft.models.llama import RootMeanSquareNorm

AMPERE, HOPPER = 80, 90
SHARED = {
    AMPERE: 99 << 10,
    HOPPER: 227 << 10,
}  # bytes of a block: the smallest of Ampere and Ada, which run the same code
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def compiled(kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """A kernel whose pointers are aligned, as allocated ones are."""
    signature = types | dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(kernel.arg_names)
    ordered = {name: signature[name] for name in kernel.arg_names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(ordered) if ordered[name][0] == "*"}
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(ASTSource(kernel, ordered, constants, aligned), target=target, options=options)


def attend(
    arch: int, tile: int, *, joins: bool, words: int, heads: int = 32, kv_heads: int = 8, width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    """The main kernel as `paged_attention` calls it, by default for the heads of Llama 3.1 8B."""
    padded = triton.next_power_of_2(width)
    block_m, warps = attention_kernel.rows_and_warps(tile, heads // kv_heads, padded, dtype)
    types = dict.fromkeys(("query", "keys", "values"), POINTERS[dtype])
    types |= dict.fromkeys(("table", "tiles", "tile_end", "length", "until", "first", "path"), "*i32")
    types |= dict.fromkeys(("parts", "sums", "maxima"), "*fp32") | {"pages": "i32", "splits": "i32", "scale": "fp32"}
    constants = {
        "heads": heads, "kv_heads": kv_heads, "width": width, "padded": padded, "page_size": 16, "block_m": block_m,
        "block_n": attention_kernel.keys_at_once(padded, dtype), "split_size": attention_kernel.SPLIT, "words": words,
        "joins": joins,
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": attention_kernel.STAGES, "enable_fp_fusion": attention_kernel.FUSES}
    return compiled(attention_kernel._attend, arch, types, constants, **options)


def rounds_each(kernel: Any) -> bool:
    """Whether ptxas may make no product and sum one, which it may do in one kernel and not in another."""
    code = kernel.asm["ptx"]
    return "mul.rn.f32" in code and not any(f"{each}.f32" in code for each in ("mul", "add", "sub"))


@pytest.mark.parametrize("arch", [AMPERE, HOPPER])
@pytest.mark.parametrize(("tile", "joins"), [(1, False), (4, False), (16, False), (16, True), (64, True)])
def test_attention_of_an_8b_model(arch: int, tile: int, joins: bool) -> None:
    """Tiles for decoding have one kind of instruction whatever their rows, so that rows do not hang on the bucket."""
    kernel = attend(arch, tile, joins=joins, words=2)
    assert kernel.metadata.shared <= SHARED[arch]
    assert ("wgmma.mma_async" in kernel.asm["ptx"]) == (arch == HOPPER and tile == 64)
    assert "cp.async" in kernel.asm["ptx"]
    assert rounds_each(kernel)


@pytest.mark.parametrize(
    ("width", "dtype"), [(256, torch.bfloat16), (256, torch.float32), (128, torch.float32), (80, torch.bfloat16)]
)
def test_attention_of_other_heads_fits(width: int, dtype: torch.dtype) -> None:
    for tile in (16, 64):
        kernel = attend(HOPPER, tile, joins=True, words=0, width=width, dtype=dtype)
        assert kernel.metadata.shared <= SHARED[HOPPER]


@pytest.mark.parametrize("arch", [AMPERE, HOPPER])
def test_joining(arch: int) -> None:
    types = {"out": "*bf16"} | dict.fromkeys(("tiles", "length", "until", "first", "path"), "*i32")
    types |= dict.fromkeys(("parts", "sums", "maxima"), "*fp32") | {"splits": "i32"}
    constants = {"heads": 32, "width": 128, "padded": 128, "tile_rows": 4, "split_size": 256, "words": 2}
    kernel = compiled(
        attention_kernel._join, arch, types, constants, num_warps=1, enable_fp_fusion=attention_kernel.FUSES
    )
    assert rounds_each(kernel)


@pytest.mark.parametrize("arch", [AMPERE, HOPPER])
@pytest.mark.parametrize("normed", [False, True])
def test_kernels_of_a_layer(arch: int, normed: bool) -> None:
    fuses = {"enable_fp_fusion": layer_kernels.FUSES}
    floats = {"eps": "fp32", "offset": "fp32"}
    types = dict.fromkeys(("x", "weight", "out"), "*bf16") | floats
    compiled(layer_kernels._norm_rows, arch, types, {"width": 4096, "block": 4096}, num_warps=8, **fuses)
    types_of_gate = dict.fromkeys(("gate_up", "out"), "*bf16")
    compiled(layer_kernels._gate, arch, types_of_gate, {"inner": 14336}, num_warps=4, **fuses)
    names = ("qkv", "table", "query", "keys", "values", "query_weight", "key_weight")
    types = dict.fromkeys(names, "*bf16") | {"positions": "*i64", "target": "*i64"} | floats
    constants = {
        "heads": 32, "kv_heads": 8, "width": 128, "padded": 128, "rotated": 128, "normed": normed,
        "interleaved": not normed,
    }  # fmt: skip
    compiled(layer_kernels._rotate_and_write, arch, types, constants, num_warps=4, **fuses)


def test_launches_say_what_they_were_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's default changes with 3.10."""
    launched = MagicMock()
    for module, name in (
        (attention_kernel, "_attend"), (attention_kernel, "_join"),
        (layer_kernels, "_norm_rows"), (layer_kernels, "_rotate_and_write"), (layer_kernels, "_gate"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(launched, name))
    paged, norm = lay_out([Asked(3, chain_shape(1))]).with_span(1000), RootMeanSquareNorm(torch.ones(64), 1e-5)
    attention_kernel.paged_attention(*paged.arguments())  # type: ignore[arg-type]
    layer_kernels.rms_norm(torch.ones(2, 64), norm)
    layer_kernels.gated(torch.ones(2, 64))
    layer_kernels.rotate_and_write(
        torch.ones(2, 4 * 64), torch.ones(9, 96), torch.arange(2), torch.arange(2), paged.keys, paged.values
    )
    calls = {str(name).split(".")[0]: each for name, _, each in launched.mock_calls if each}
    assert {name: each["enable_fp_fusion"] for name, each in calls.items()} == {
        "_attend": False, "_join": False, "_norm_rows": True, "_rotate_and_write": True, "_gate": True,
    }  # fmt: skip
