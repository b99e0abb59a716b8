"""GGUF files: every type's numbers by the `gguf` package, the native forward over their codes, and broken files."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import BloomConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from support.backends import as_function, library_for
from support.codes import assert_given_by_codes, in_eight_bits, logits, read_in_eight_bits
from support.gguf_files import TYPES, random_blocks, write
from support.pairwise import some_of
from support.rows import assert_rows_are_alike
from truedraft import load_model
from truedraft.compiled import processor
from truedraft.errors import ModelNotFoundError, UnsupportedModelError
from truedraft.models import gguf as gguf_files
from truedraft.models.backends.native import backend as native
from truedraft.models.backends.native.build import Built, built
from truedraft.models.backends.native.memory import UNIT, CLinear, CModel, Weights, pieces
from truedraft.models.gguf import quantized_of
from truedraft.models.quantized import GROUP, QuantizedWeight, StoredWeight

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
SHAPES = [(130, 512), (64, 256), (17, 768)]
DTYPES = [torch.float32, torch.bfloat16]
MIXED = {"token_embd": "Q8_0", "attn_v": "Q6_K", "ffn_down": "Q6_K", "": "Q4_K"}
FILES = [
    pytest.param("llama", {"": "Q4_0"}, True, id="llama-Q4_0"),
    pytest.param("llama", MIXED, False, id="llama-Q4_K_M-untied"),
    pytest.param("qwen2", {"": "Q5_1"}, True, id="qwen2-Q5_1"),
    pytest.param("qwen3", {"attn_v": "Q8_0", "": "Q5_K"}, True, id="qwen3-Q5_K"),
    pytest.param("gemma3", {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q6_K", "": "Q5_0"}, True, id="gemma3"),
]
IDS = torch.arange(1, 40) * 37 % 256


def reference(kind: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    return torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType[kind]))


def kept(weight: QuantizedWeight, together: int | None = None) -> StoredWeight:
    """As a file's reader would give it."""
    return StoredWeight(weight.form, weight.rows, (len(weight), weight.codes.shape[1]), weight.order, together)


def decoded(weights: Weights, library: Any, linear: CLinear) -> Tensor:
    """The weights that a layer's memory says, all its pieces one behind another."""
    found: list[Tensor] = []
    for piece in pieces(linear):
        outputs = linear.outputs - sum(map(len, found))
        part = CLinear.from_buffer_copy(piece)
        part.outputs = min(outputs, piece.own * UNIT) if piece.more else outputs
        numbers = torch.zeros(part.outputs, part.inputs)
        library.truedraft_decode(ctypes.byref(part), ctypes.c_void_p(numbers.data_ptr()))
        found.append(numbers)
    return torch.cat(found)


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_bit_equal_to_those_of_the_gguf_package(kind: str) -> None:
    for seed, shape in enumerate(SHAPES):
        data = random_blocks(kind, *shape, seed, scale=3.0)
        weight = quantized_of(kind, data)
        assert torch.equal(weight.dequantized(), reference(kind, data))
        order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(weight.rows(order).dequantized(), reference(kind, data)[order])
        for dtype in DTYPES:
            library = library_for(dtype)
            weights = Weights(library)
            for together in (None, UNIT):  # read whole, and a unit at a time
                linear = weights._coded([kept(weight, together)], None, False)
                assert torch.equal(decoded(weights, library, linear), reference(kind, data))
            some = order[: len(order) // 2 + 3]
            assert torch.equal(decoded(weights, library, weights.outputs(linear, some)), reference(kind, data)[some])


@pytest.mark.parametrize("dtype", [*DTYPES, None], ids=str)
def test_a_narrowed_model_has_the_logits_of_its_ids_bit_for_bit(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = load_model("embedded:draft" if dtype else write(tmp_path / "a.gguf", "llama", MIXED), dtype=dtype or "auto")
    ids = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(2))[:37]
    whole, some = (logits(each, IDS[:9]) for each in (model, model.narrowed(ids)))
    assert some.shape == (9, 37)
    assert torch.equal(some, whole[:, ids])


def test_parts_that_are_quantised_in_other_ways_lie_behind_each_other() -> None:
    library = library_for(torch.float32)
    kinds = ("Q4_K", "Q4_K", "Q6_K", "Q8_0")
    data = [random_blocks(kind, out, 256, out) for kind, out in zip(kinds, (80, 48, 64, 16), strict=True)]
    weights = Weights(library)
    linear = weights._coded([kept(quantized_of(*each)) for each in zip(kinds, data, strict=True)], None, False)
    assert [piece.bits for piece in pieces(linear)] == [4, 6, 8]
    expected = torch.cat([reference(*each) for each in zip(kinds, data, strict=True)])
    assert torch.equal(decoded(weights, library, linear), expected)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    found = as_function(library, weights, linear, torch.float32).logits(x)
    whole = torch.cat([products(quantized_of(*each), x) for each in zip(kinds, data, strict=True)], dim=1)
    torch.testing.assert_close(found.double(), whole, rtol=1e-4, atol=1e-4)


def products(weight: QuantizedWeight, x: Tensor) -> Tensor:
    """`x W^T` in float64."""
    return in_eight_bits(x).double() @ weight.dequantized().double().T


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_a_reference(kind: str, dtype: torch.dtype) -> None:
    library = library_for(dtype)
    for seed, (out, inputs) in enumerate(SHAPES):
        weight = quantized_of(kind, random_blocks(kind, out, inputs, seed))
        weights = Weights(library)
        head = as_function(library, weights, weights._coded([kept(weight)], None, False), dtype)
        x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x[0, :GROUP] = 0.0
        expected = products(weight, x)
        # An input on the border of two codes may become either: a step of it, times its weight.
        steps = x.float().view(9, -1, GROUP).abs().amax(-1).max() / 127
        border = steps.double() * weight.dequantized().double().abs().amax() * 2
        near = border + 2e-6 * (x.double().abs() @ weight.dequantized().double().abs().T)
        for rows in range(1, 10):
            found = head.logits(x[:rows]).double()
            rounding = 2**-8 * expected[:rows].abs() if dtype is torch.bfloat16 else 0.0
            assert bool(((found - expected[:rows]).abs() <= near[:rows] + rounding).all())
            assert torch.equal(head.logits(x[rows - 1 : rows])[0], head.logits(x[:rows])[-1]), "a row is its own"


@pytest.mark.parametrize(("architecture", "kinds", "tied"), FILES)
def test_a_file_is_run_by_its_codes(architecture: str, kinds: dict[str, str], tied: bool, tmp_path: Path) -> None:
    """Its forward is that of its numbers by transformers' modules, where these read inputs of 8 bits."""
    file = write(tmp_path / "model.gguf", architecture, kinds, tied=tied)
    model, numbers = (load_model(file, dtype="float32", fast_paths=fast) for fast in (True, False))
    assert model.fast_paths[0] == "native forward"
    assert "bits" in model.fast_paths[1]
    assert model.equality == "bit for bit"
    read_in_eight_bits(numbers)
    assert_given_by_codes(logits(model, IDS), logits(numbers, IDS))
    assert torch.equal(model.embed(IDS[:5]), numbers.embed(IDS[:5]))
    assert model.fingerprint == numbers.fingerprint
    assert model.weight_bytes < 0.4 * numbers.weight_bytes


def test_a_forward_that_differs_from_the_models_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "model.gguf", "gemma3", {"token_embd": "Q8_0", "": "Q5_0"})
    made = native._model

    def of_another_scale(*given: Any) -> CModel:
        model = made(*given)
        model.scale = 1.0
        return model

    monkeypatch.setattr(native, "_model", of_another_scale)
    with pytest.raises(UnsupportedModelError, match="gives other logits by its codes than by their numbers"):
        load_model(file)


def test_layers_in_numbers_may_stand_beside_quantised_ones(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"attn_q": "F32", "ffn_down": "BF16", "": "Q4_1"})
    model, numbers = (load_model(file, dtype="float32", fast_paths=fast) for fast in (True, False))
    read_in_eight_bits(numbers, ends=("o_proj", "gate_proj", "up_proj", "lm_head"))
    expected = logits(numbers, IDS)
    assert ((logits(model, IDS) - expected).std(-1) / expected.std(-1)).median() < 1e-5


def test_a_files_tokenizer_and_chat_template_are_read(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "model.gguf", "llama", {"": "Q4_0"}))
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("the thin\n")) == "the thin\n"
    chat = model.tokenizer.chat([{"role": "user", "content": "hi"}])
    assert [model.tokenizer.token_text(token) for token in chat] == ["<|user|>", "h", "i", "<|end|>", "<|assistant|>"]
    assert model.tokenizer.token_text(model.eos_token_ids[0]) == "<|end|>"


def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    assert_rows_are_alike(load_model(write(tmp_path / "model.gguf", "llama", MIXED), dtype="float32"))


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q8_0"})
    assert torch.equal(logits(load_model(tmp_path), IDS), logits(load_model(file), IDS))
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files; name one of them: model\.gguf, other\.gguf"):
        load_model(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_a_file_is_in_memory_once_and_is_read_on_from_what_it_was(tmp_path: Path) -> None:
    """Its codes are laid out anew for the forward; the file itself is mapped while it is read, and no longer."""
    file = write(tmp_path / "wide.gguf", "llama", {"": "Q8_0"})
    model = load_model(file, dtype="float32")
    assert str(file) not in Path("/proc/self/maps").read_text()
    expected = logits(model, IDS)
    file.unlink()
    write(file, "llama", {"": "Q4_0"})
    assert torch.equal(logits(model, IDS), expected)
    apart = (logits(model.quantized(4), IDS) - expected).std()
    assert 0 < apart < 0.6 * expected.std(), "the copy is made of the file that was loaded"


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3MoeConfig, BloomConfig])
def test_names_are_those_of_transformers_and_looked_up_once_for_each_part(
    config: type[PreTrainedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 50}
    layers = {"num_hidden_layers": 3, "n_layer": 3, "num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 2}
    model = gguf_files.without_weights(config(**sizes, **layers, pad_token_id=0), torch.float32)
    kind = TENSOR_PROCESSORS.get(model.config.model_type.replace("_", ""), TensorProcessor)
    processor, tables = kind(config=model.config.to_dict()), []
    expected, real = get_gguf_hf_weights_map(model, processor), gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *given: tables.append(given) or real(*given))
    assert gguf_files._places(model, processor) == expected and len(expected) > 20
    assert len(tables) == 1 + len(list(model.children()))


PATHS = {
    "by vectors, for want of AMX": "",
    "in pairs, for want of VNNI": "-mno-avx512vnni -mno-avxvnni",
    "in pairs, on vectors of 8": "-mno-avx512f",
    "one by one, for want of AVX2": "-mno-avx",
}


X86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("gcc") is None, reason="needs x86 and gcc's options"
)


@pytest.fixture(scope="module", params=some_of(PATHS, [*PATHS][:1] + [*PATHS][2:]))
def slower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A library compiled without some instructions."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CC", f"gcc {PATHS[request.param]}")
        monkeypatch.setattr("truedraft.machine.may_use_tiles", lambda: False)
        monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path_factory.mktemp("native")))
        made = built.__wrapped__(torch.float32)
    assert made.library is not None, made.reason
    yield request.param, made.library


@X86
@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_the_fastest_path(slower: tuple[str, Any], kind: str) -> None:
    named, library = slower
    weight = quantized_of(kind, random_blocks(kind, 130, 512, 0))
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    found = []
    for each in (built(torch.float32).library, library):
        weights = Weights(each)
        found.append(as_function(each, weights, weights._coded([kept(weight)], None, False), torch.float32).logits(x))
    if "one by one" in named:  # such processors add and multiply in two steps
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    else:
        assert found[1].equal(found[0])


@X86
def test_the_path_is_named(slower: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, library = slower
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_1"})
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "built", lambda dtype: Built(library))
    pairs = ", multiplied in pairs, for want of VNNI"
    whole = "" if re.search("avx(512)?_vnni", processor()) else pairs
    said = {"in": pairs, "by": whole}.get(named.split()[0], f", multiplied {named}")
    assert load_model(file, dtype="float32").fast_paths == ("native forward", f"weights of 4 bits{said}")
