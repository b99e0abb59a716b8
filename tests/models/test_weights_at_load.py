"""`load_model(..., weights=)`: what such weights are, that rows stay alike, what drafts for them, and refusals."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config

from support.codes import assert_given_by_codes, in_eight_bits, logits
from support.gguf_files import write
from support.rows import assert_rows_are_alike
from support.tiny_models import VECTORS, build
from truedraft import load_model
from truedraft.drafters import from_spec, specs
from truedraft.errors import UnknownOptionError, UnsupportedModelError
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import Weights

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)

SIZES = VECTORS | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2
}  # fmt: skip
FAMILIES = [
    pytest.param(LlamaConfig(**SIZES, tie_word_embeddings=True), id="llama-tied"),
    pytest.param(Qwen2Config(**SIZES, tie_word_embeddings=False), id="qwen2-untied"),
]
IDS = torch.arange(1, 60) * 37 % 101


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    build(config, seed=3, spread=0.15).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path / "llama")


def quantize_and_back(module: nn.Module, bits: int) -> None:
    """Give every linear layer the numbers of its weight in so many bits, and inputs of 8 bits; ties are kept."""
    library = built(torch.float32).library
    for layer in (each for each in module.modules() if isinstance(each, nn.Linear)):
        weights = Weights(library)
        linear = weights.quantized(weights.linear([layer.weight], None), bits)
        numbers = torch.zeros(layer.weight.shape)
        library.truedraft_decode(ctypes.byref(linear), ctypes.c_void_p(numbers.data_ptr()))
        layer.weight.data = numbers
        layer.register_forward_pre_hook(lambda _, given: (in_eight_bits(given[0]),))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", FAMILIES)
def test_answers_are_those_of_the_weights_in_fewer_bits(config: PretrainedConfig, bits: int, tmp_path: Path) -> None:
    folder = folder_of(config, tmp_path / "model")
    model = load_model(folder, dtype="float32", weights=f"q{bits}")
    numbers = load_model(folder, dtype="float32", fast_paths=False)
    exact = logits(numbers, IDS)
    quantize_and_back(numbers.module, bits)
    expected, found = logits(numbers, IDS), logits(model, IDS)
    assert_given_by_codes(found, expected)
    apart = (found - expected).std(-1) / expected.std(-1)
    assert (found - exact).std() > 10 * apart.median() * expected.std()
    assert model.embed(IDS[:5]).equal(numbers.embed(IDS[:5]))
    assert model.equality == "bit for bit"


def test_memory_is_that_of_the_fewer_bits_and_all_is_said(folder: Path) -> None:
    plain, model = (load_model(folder, dtype="float32", weights=weights) for weights in (None, "q8"))
    assert model.weight_bytes < 0.35 * plain.weight_bytes
    assert model.fast_paths == ("native forward", "weights of 8 bits")
    assert model.name == plain.name
    assert model.fingerprint == plain.fingerprint
    held = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.module.parameters()
    }
    assert sum(held.values()) < 0.02 * plain.weight_bytes, "what they were is freed"


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_a_row_has_the_same_bits_in_any_company(weights: str, folder: Path) -> None:
    assert_rows_are_alike(load_model(folder, weights=weights))


def test_experts_may_have_fewer_bits(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)
    folder = folder_of(config, tmp_path / "mixtral")
    exact, near = (logits(load_model(folder, dtype="float32", weights=weights), IDS) for weights in (None, "q8"))
    assert 0.0 < (near - exact).std() < 0.1 * exact.std()


def test_a_target_of_four_bits_needs_no_copy_of_four_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    said: list[str] = []
    wide, narrow = (load_model(folder, weights=weights) for weights in ("q8", "q4"))
    assert set(from_spec("auto", wide, tell=said.append).members) == {"self", "prompt-lookup"}
    assert set(from_spec("auto", narrow, tell=said.append).members) == {"prompt-lookup"}
    assert not said, "nobody asked for one"
    with pytest.raises(UnsupportedModelError, match="its own are quantised, and such a copy has 100% of their bytes"):
        from_spec("self:int4", narrow)
    with pytest.raises(UnsupportedModelError, match=r"such a copy has 1\d\d% of their bytes"):
        from_spec("self:int8", narrow)
    draft = wide.quantized(4)
    assert 0.0 < (logits(draft, IDS) - logits(wide, IDS)).std() < 0.6 * logits(wide, IDS).std()


def test_what_cannot_be_quantised_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError, match=r"^unknown weights 'q6'; did you mean 'q8'\? valid: q4, q8|q4"):
        load_model(folder, weights="q6")
    with pytest.raises(UnsupportedModelError, match=r"cannot be given weights of 8 bits: .*leave --weights out$"):
        load_model(folder, weights="q8", fast_paths=False)
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_1"})
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be given weights of 4 bits: its own are quantised already; leave"
    ):
        load_model(file, weights="q4")


def test_a_file_of_numbers_can_be_quantised(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "F16"})
    exact, near = (logits(load_model(file, dtype="float32", weights=weights), IDS) for weights in (None, "q8"))
    assert 0.0 < (near - exact).std() < 0.1 * exact.std()
