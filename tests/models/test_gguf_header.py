"""Headers of GGUF files: models in several parts, and files whose lengths and counts are not to be believed."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue

from support.gguf_files import write
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.errors import ModelError, TruedraftError
from truedraft.models.base import Segment
from truedraft.models.gguf import folder_of
from truedraft.models.gguf_header import read_header

KINDS = {"token_embd": "Q8_0", "": "Q4_0"}
IDS = torch.arange(1, 30) * 37 % 256


@pytest.fixture(autouse=True)
def _conversions_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of files goes with the tests."""
    folder = tmp_path_factory.getbasetemp() / "conversions"
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: folder)


def logits(file: Path) -> torch.Tensor:
    model = load_model(file)
    cache = model.new_cache()
    return model.forward([Segment(cache, IDS, chain_shape(len(IDS)), range(len(IDS)))]).logits.float()


def said_of(file: Path) -> str:
    """The one sentence that refuses a file."""
    with pytest.raises(ModelError) as raised:
        folder_of(file)
    said = str(raised.value)
    assert "\n" not in said and said.count(". ") == 0
    return said


def in_parts(folder: Path, tensors: int = 8, kinds: dict[str, str] = KINDS) -> list[Path]:
    folder.mkdir(exist_ok=True)
    write(folder / "model.gguf", "llama", kinds, tied=False, tensors_of_a_part=tensors)
    return sorted(folder.glob("*.gguf"))


def test_a_model_in_parts_is_read_whole_by_the_name_of_any(tmp_path: Path) -> None:
    expected = logits(write(tmp_path / "whole.gguf", "llama", KINDS, tied=False))
    parts = in_parts(tmp_path / "parts")
    assert len(parts) == 3
    for named in (*parts, parts[0].parent):
        assert torch.equal(logits(named), expected)
    assert not load_model(parts[1]).module.config.tie_word_embeddings, "that the LM head is stored says another part"


def test_parts_that_are_missing_or_of_other_models_are_named(tmp_path: Path) -> None:
    first, second, third = in_parts(tmp_path / "missing")
    third.unlink()
    assert f"is a part of a model in 3 files, and {third.name!r} is not beside it" in said_of(second)
    second.rename(second.with_name("alone.gguf"))
    assert "is one of 3 parts of a model" in said_of(second.with_name("alone.gguf"))
    assert "is a part of a model in 3 files" in said_of(first)

    first, second, third = in_parts(tmp_path / "swapped")
    shutil.copy(second, third)
    assert f"{third.name!r} says that it is part 1 (from 0) of 3; fetch that again" in said_of(first)

    foreign = in_parts(tmp_path / "foreign", tensors=9)
    mixed = in_parts(tmp_path / "mixed")
    shutil.copy(foreign[1], mixed[1])
    assert "is of another; fetch that again" in said_of(mixed[0])
    mixed = in_parts(tmp_path / "mixed")
    shutil.copy(foreign[2], mixed[2])
    assert "is a part of a model of 21 tensors, and its parts have 19, so one is of another model" in said_of(mixed[0])


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
    assert "says more than 4194304 values, which no model does" in said_of(file_of(tmp_path, array(kind, count)))
    assert "is cut off or damaged" in said_of(file_of(tmp_path, array(kind, 4_000_000, bytes(1000))))


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
    assert part in said_of(file_of(tmp_path, *values))


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
    assert part in said_of(file)
    file = file_of(tmp_path, tensors=b"".join(tensors), count=2**62)
    assert "is cut off or damaged" in said_of(file) or part in said_of(file)


def test_keys_are_said_once(tmp_path: Path) -> None:
    file = tmp_path / "twice.gguf"
    entry = text("key") + struct.pack("<IB", 0, 1)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry)
    assert "says 'key' twice" in said_of(file)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31, -1, "32", 32.0])
def test_an_alignment_that_no_file_has_is_refused(alignment: object, tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        kind = {int: GGUFValueType.INT64, str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}[type(alignment)]
        writer.kv_data[0]["general.alignment"] = GGUFValue(alignment, kind)

    said = said_of(write(tmp_path / "model.gguf", "llama", {"": "Q4_0"}, more=more))
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
