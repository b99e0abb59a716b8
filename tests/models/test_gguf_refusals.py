"""GGUF files that are broken, of other kinds, or cannot be kept: one sentence each, or loaded all the same."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

from support.gguf_files import add_tokenizer, vocabulary, write
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.base import LanguageModel, Segment

IDS = torch.arange(1, 30) * 37 % 256


@pytest.fixture(autouse=True)
def _conversions_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of files goes with the tests."""
    folder = tmp_path_factory.getbasetemp() / "conversions"
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: folder)


def logits(model: LanguageModel) -> torch.Tensor:
    cache = model.new_cache()
    return model.forward([Segment(cache, IDS, chain_shape(len(IDS)), range(len(IDS)))]).logits.float()


def said_of(file: Path, error: type[Exception]) -> str:
    """The one sentence that refuses a file, by its name."""
    with pytest.raises(error) as raised:
        load_model(file)
    said = str(raised.value)
    assert said.startswith(repr(str(file))) and "\n" not in said and said.count(". ") == 0
    return said


@pytest.mark.parametrize("kept", [10, 30, 200, 3000, 0.5, -1])
def test_a_cut_file_is_refused_wherever_it_ends(kept: float, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    assert said_of(file, ModelError).endswith("is cut off or damaged; fetch it again")


def changed(at: int, to: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + to + content[at + len(to) :]


def of_an_unknown_type(content: bytes) -> bytes:
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes and two sizes
    return changed(at, struct.pack("<I", 200))(content)


@pytest.mark.parametrize(
    ("broken", "error", "ends"),
    [
        (lambda _: b"", ModelError, "is no GGUF file: it begins with b''; fetch it again"),
        (changed(0, b"GGML"), ModelError, "is no GGUF file: it begins with b'GGML'; fetch it again"),
        (changed(4, b"\x63"), ModelError, "is of version 99, cut off or damaged; fetch it again"),
        (changed(8, struct.pack("<Q", 2**62)), ModelError, "is cut off or damaged; fetch it again"),
        (of_an_unknown_type, UnsupportedModelError, "get one of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"),
    ],
)
def test_a_damaged_file_is_refused(
    broken: Callable[[bytes], bytes], error: type[Exception], ends: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    file.write_bytes(broken(file.read_bytes()))
    assert said_of(file, error).endswith(ends)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ2_XXS", "TQ1_0"])
def test_types_that_are_not_read_are_named(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": kind})
    assert f"has weights of type {kind}, which truedraft does not read; get one of Q4_0" in said_of(
        file, UnsupportedModelError
    )


def test_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    turned = write(tmp_path / "turned.gguf", "llama", {"": "F32"}, endian=GGUFEndian.BIG)
    assert "is written for big-endian machines; turn it by" in said_of(turned, UnsupportedModelError)


def without(*names: str) -> Callable[[GGUFWriter, list[str]], None]:
    """Writes a tokenizer that lacks some fields."""

    def write_rest(writer: GGUFWriter, vocab: list[str]) -> None:
        add_tokenizer(writer, vocab)
        for name in names:
            del writer.kv_data[0][f"tokenizer.ggml.{name}"]

    return write_rest


def beyond(writer: GGUFWriter, vocab: list[str]) -> None:
    without("eos_token_id")(writer, vocab)
    writer.add_eos_token_id(5000)


@pytest.mark.parametrize(
    ("tokenizer", "part"),
    [
        (without("eos_token_id"), "names no token of it that ends a text (got None)"),
        (beyond, "names no token of it that ends a text (got 5000)"),
        (without("tokens"), "has no vocabulary"),
        (without("merges"), "does not say which pieces merge"),
    ],
)
def test_a_tokenizer_without_what_it_needs_is_refused(
    tokenizer: Callable[[GGUFWriter, list[str]], None], part: str, tmp_path: Path
) -> None:
    assert part in said_of(write(tmp_path / "model.gguf", "llama", {"": "Q4_0"}, tokenizer=tokenizer), ModelError)


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    lacks = write(tmp_path / "lacks.gguf", "llama", {"": "Q4_0"}, leave_out="blk.1.ffn_up.weight")
    said = said_of(lacks, ModelError)
    assert "lacks tensors of its model: 1, the first 'model.layers.1.mlp.up_proj.weight'" in said
    extra = np.zeros((4, 4), np.float32)
    more = write(
        tmp_path / "more.gguf", "llama", {"": "Q4_0"}, more=lambda writer: writer.add_tensor("blk.7.new", extra)
    )
    assert "has tensors that its model has not: 1, the first 'blk.7.new'" in said_of(more, ModelError)


def test_rotary_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    file = write(
        tmp_path / "factors.gguf", "llama", {"": "F32"}, more=lambda each: each.add_tensor("rope_freqs.weight", factors)
    )
    plain = load_model(write(tmp_path / "plain.gguf", "llama", {"": "F32"}), dtype="float32", fast_paths=False)
    model = load_model(file, dtype="float32")
    assert (logits(model) - logits(plain)).abs().max() > 0.1
    plain.module.model.rotary_emb.inv_freq.div_(torch.from_numpy(factors))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


def test_a_cache_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    expected = logits(load_model(file))
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("no folder")
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: in_the_way)
    assert logits(load_model(file)).equal(expected)
    assert logits(load_model(file)).equal(expected)
    told = [each for each in caplog.messages if "set TRUEDRAFT_CACHE to a folder that can be written" in each]
    assert len(set(told)) == 1


def test_a_file_that_goes_while_it_is_loaded_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    model = load_model(file)
    before = logits(model)
    file.unlink()
    assert logits(model).equal(before)
    with pytest.raises(ModelError, match=r"cannot read the weights of .*model\.gguf'"):
        _ = model.fingerprint


def write_gpt2(stock: PreTrainedModel, file: Path, more: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    vocab = vocabulary()
    writer = GGUFWriter(file, "gpt2")
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    add_tokenizer(writer, vocab)
    weights = stock.state_dict()
    for name, place in get_gguf_hf_weights_map(stock, TENSOR_PROCESSORS["gpt2"](config={})).items():
        turned = "weight" in name and name.split(".")[-2] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        if name != "output.weight":
            values = weights[place].T if turned else weights[place]
            writer.add_tensor(name, np.ascontiguousarray(values))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_families_whose_tensors_lie_otherwise_are_dequantised_by_transformers(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=len(vocabulary()), n_embd=64, n_layer=2, n_head=4, n_positions=1024)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).eval()
    model = load_model(write_gpt2(stock, tmp_path / "model.gguf"), dtype="float32")
    with torch.inference_mode():
        torch.testing.assert_close(logits(model), stock(IDS[None]).logits[0], rtol=1e-4, atol=1e-4)
    factors = np.ones(8, np.float32)
    more = write_gpt2(stock, tmp_path / "more.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert "has tensors that its model has not: 1, the first 'rope_freqs.weight'" in said_of(more, ModelError)
