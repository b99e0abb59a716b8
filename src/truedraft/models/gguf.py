"""GGUF files: their tensors, quantised or as numbers, and their model configuration and tokenizer.

The blocks of quantised types are those of ggml (ggml-common.h); the `gguf` package reads the file and returns each
tensor as rows of such blocks.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from truedraft.errors import ModelError, UnsupportedModelError, first_line
from truedraft.files import cache_folder, could_not_be_kept, written_whole
from truedraft.models.gguf_config import Said, hold_positions, read_config
from truedraft.models.gguf_header import Header, StoredTensor, parts_of, read_header
from truedraft.models.quantized import QuantizedWeight, Scheme, StoredWeight
from truedraft.progress import log_stage
from truedraft.text.gguf_tokenizer import read_tokenizer

INDEX = "gguf.json"
_FORMAT = 6
_PIECE, _WHOLE = 1 << 20, 64  # codes that are read at a time, of outputs in whole units of the native products
_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
_BY_ROWS = (TensorProcessor, LlamaTensorProcessor, Gemma2TensorProcessor)  # these at most permute rows of matrices
_HAS_OTHERS = "has tensors that its model has not"
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # GGUF's names of special tokens, by those of configurations
_log = logging.getLogger(__name__)

Blocks = NDArray[np.uint8]
"""`[out, blocks of a row, bytes of a block]`."""


def _float16(blocks: Blocks, first: int, count: int = 1) -> Tensor:
    """Numbers from byte `first` of each block: `[out, blocks * count]`."""
    part = np.ascontiguousarray(blocks[..., first : first + 2 * count])
    return torch.from_numpy(part.view("<f2").astype(np.float16).reshape(len(blocks), -1))


def _codes(codes: NDArray[Any], out: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes).reshape(out, -1))


def _nibbles(blocks: Blocks, first: int, count: int) -> NDArray[np.uint8]:
    """`[out, blocks, 2 * count]`: lower halves of bytes, then upper ones."""
    part = blocks[..., first : first + count]
    both = np.empty((*part.shape[:-1], 2 * count), np.uint8)
    np.bitwise_and(part, 15, out=both[..., :count])
    np.right_shift(part, 4, out=both[..., count:])
    return both


def _fifth_bits(blocks: Blocks, first: int) -> NDArray[np.uint8]:
    """`[out, blocks, 32]`, 0 or 16: bit i of four bytes belongs to code i."""
    return np.unpackbits(blocks[..., first : first + 4], axis=-1, bitorder="little") * np.uint8(16)


def _q8_0(blocks: Blocks) -> QuantizedWeight:
    return QuantizedWeight(8, Scheme.ONE, _codes(blocks[..., 2:] ^ 128, len(blocks)), _float16(blocks, 0))


def _q4_0(blocks: Blocks) -> QuantizedWeight:
    return QuantizedWeight(4, Scheme.ONE, _codes(_nibbles(blocks, 2, 16), len(blocks)), _float16(blocks, 0))


def _q4_1(blocks: Blocks) -> QuantizedWeight:
    codes = _codes(_nibbles(blocks, 4, 16), len(blocks))
    return QuantizedWeight(4, Scheme.SHIFTED, codes, _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Blocks) -> QuantizedWeight:
    codes = _codes(_nibbles(blocks, 6, 16) | _fifth_bits(blocks, 2), len(blocks))
    return QuantizedWeight(5, Scheme.ONE, codes, _float16(blocks, 0))


def _q5_1(blocks: Blocks) -> QuantizedWeight:
    codes = _codes(_nibbles(blocks, 8, 16) | _fifth_bits(blocks, 4), len(blocks))
    return QuantizedWeight(5, Scheme.SHIFTED, codes, _float16(blocks, 0), _float16(blocks, 2))


def _inner(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Inner scales and shifts of Q4_K and Q5_K, `[out, groups]`: 6 bits each of 8 groups, in 12 bytes from byte 4 on.

    Those of the first four groups are the lower 6 bits of the first 8 bytes. Those of the others have their lower 4
    bits in the last 4 bytes, and their upper 2 in the free bits of the first 8.
    """
    scales, shifts, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    first = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=-1)
    second = np.concatenate([shifts & 63, rest >> 4 | shifts >> 6 << 4], axis=-1)
    return _codes(first, len(blocks)), _codes(second, len(blocks))


def _in_eighths(blocks: Blocks, first: int) -> NDArray[np.uint8]:
    """Lower 4 bits of Q4_K's and Q5_K's codes, `[out, blocks, 256]`: 32 bytes hold those of two groups."""
    part = blocks[..., first : first + 128].reshape(*blocks.shape[:2], 4, 1, 32)
    return np.concatenate([part & 15, part >> 4], axis=3).reshape(*blocks.shape[:2], 256)


def _q4_k(blocks: Blocks) -> QuantizedWeight:
    codes = _codes(_in_eighths(blocks, 16), len(blocks))
    return QuantizedWeight(4, Scheme.NESTED, codes, _float16(blocks, 0), _float16(blocks, 2), *_inner(blocks))


def _q5_k(blocks: Blocks) -> QuantizedWeight:
    group = np.arange(8, dtype=np.uint8)[:, None]  # its fifth bits are the bits with this number
    fifth = blocks[..., None, 16:48] >> group & 1
    codes = _codes(_in_eighths(blocks, 48) | fifth.reshape(*blocks.shape[:2], 256) << 4, len(blocks))
    return QuantizedWeight(5, Scheme.NESTED, codes, _float16(blocks, 0), _float16(blocks, 2), *_inner(blocks))


def _q6_k(blocks: Blocks) -> QuantizedWeight:
    out, many = blocks.shape[:2]
    low = blocks[..., :128].reshape(out, many, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(out, many, 2, 4, 32)
    high = blocks[..., 128:192].reshape(out, many, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    inner = torch.from_numpy(np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(out, -1))
    return QuantizedWeight(6, Scheme.HALVES, _codes(low | high << 4, out), _float16(blocks, 208), None, inner)


# For each type: its reader, bytes of a block, and the resulting bits and scheme.
_READERS: dict[str, tuple[Callable[[Blocks], QuantizedWeight], int, tuple[int, Scheme]]] = {
    "Q4_0": (_q4_0, 18, (4, Scheme.ONE)),
    "Q4_1": (_q4_1, 20, (4, Scheme.SHIFTED)),
    "Q5_0": (_q5_0, 22, (5, Scheme.ONE)),
    "Q5_1": (_q5_1, 24, (5, Scheme.SHIFTED)),
    "Q8_0": (_q8_0, 34, (8, Scheme.ONE)),
    "Q4_K": (_q4_k, 144, (4, Scheme.NESTED)),
    "Q5_K": (_q5_k, 176, (5, Scheme.NESTED)),
    "Q6_K": (_q6_k, 210, (6, Scheme.HALVES)),
}
_NUMBERS: dict[str, tuple[str, int]] = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<i2", 2)}


def quantized_of(kind: str, data: NDArray[np.uint8]) -> QuantizedWeight:
    """The weight of a quantised tensor.

    Args:
        kind: ggml's name of its type.
        data: `[out, bytes of an output]`.
    """
    reader, size, _ = _READERS[kind]
    return reader(data.reshape(len(data), -1, size))


def numbers_of(kind: str, data: NDArray[np.uint8]) -> Tensor:
    """A tensor that is not quantised, in float32; arguments as for `quantized_of`."""
    of_type = np.ascontiguousarray(data).view(_NUMBERS[kind][0])
    if kind == "BF16":
        return torch.from_numpy(of_type.astype(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(of_type.astype(np.float32))


def models_in(folder: Path) -> list[Path]:
    """A folder's GGUF files, in order; only the first of a model that is in several."""
    files = sorted(folder.glob("*.gguf"))
    return [file for file in files if parts_of(file)[0] == file or parts_of(file)[0] not in files]


def _key(seen: Iterable[tuple[Path, os.stat_result]]) -> str:
    known = "".join(f"{file} {about.st_size} {about.st_mtime_ns} " for file, about in seen)
    return hashlib.sha256(f"{known}{_FORMAT}".encode()).hexdigest()[:24]


def folder_of(path: Path) -> Path:
    """A cache folder with the configuration and the tokenizer of a GGUF file, and an index of its tensors.

    It is made when the file is first read, and kept, because converting a large vocabulary into a tokenizer takes long.

    Raises:
        ModelError: the file cannot be read, or is broken.
        UnsupportedModelError: it is of a kind that cannot be run.
        MissingExtraError: the package `gguf` is not installed.
    """
    path = path.resolve()
    key = _key((file, file.stat()) for file in parts_of(path) if file.is_file())
    folder = cache_folder() / "gguf" / key
    if (folder / INDEX).is_file():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        folder = _of_this_process(cache_folder(), error.strerror or str(error)) / key
        folder.mkdir(exist_ok=True)
    if not (folder / INDEX).is_file():
        _convert(path, folder)
    return folder


@cache
def _of_this_process(cannot_be_written: Path, reason: str) -> Path:
    """A temporary folder, removed at exit, for a cache folder that cannot be written."""
    _log.warning(could_not_be_kept(cannot_be_written, reason))
    folder = tempfile.mkdtemp(prefix="truedraft-gguf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class _WithoutMemory(TorchFunctionMode):
    """New modules get matrices without memory and without initialisation, because weights replace them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_) and args[0].dim() > 1:
            return args[0]
        if func is Tensor.copy_ and not any(args[0].stride()):  # in the constructor of a convolution
            return args[0]
        if func is torch.empty and isinstance(args[0], tuple) and len(args[0]) > 1:
            return torch.zeros((), **(kwargs or {})).expand(*args[0])
        return func(*args, **(kwargs or {}))


def _convert(path: Path, folder: Path) -> None:
    log_stage(f"loading: converting what {path.name} says of its model and tokenizer, once")
    header = _header(path)
    said = Said(str(path), header.fields, {each.name: each.shape for each in header.tensors})
    tokens = {f"{name}_token_id": _token(header, kind) for name, kind in _TOKENS.items()}
    try:
        tokenizer = _tokenizer(path, header)
        config = read_config(said, len(header.fields["tokenizer.ggml.tokens"]), tokens)
        model = without_weights(config, torch.float32)
        kind: type[TensorProcessor] = TENSOR_PROCESSORS.get(said.architecture, TensorProcessor)
        places = _places(model, kind(config=config.to_dict()))
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not say {error.args[0]!r} of its model; fetch it again") from error
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise UnsupportedModelError(f"{str(path)!r} cannot be read by transformers: {first_line(error)}") from error
    hold_positions(said, model)
    index = {
        "files": [str(file) for file in header.files],
        "architecture": said.architecture,
        "tensors": [asdict(replace(each, place=places.get(each.name, ""))) for each in header.tensors],
    }
    if kind not in _BY_ROWS:
        _hold_for_transformers(path, said, header, places)
    try:
        config.save_pretrained(folder)
        _keep_tokenizer(tokenizer, folder)
        with written_whole(folder / INDEX) as file:  # the last file: its existence marks a complete folder
            file.write(json.dumps(index).encode())
    except OSError as error:
        raise ModelError(f"what was converted of {str(path)!r} cannot be written: {first_line(error)}") from error


def _places(model: PreTrainedModel, processor: TensorProcessor) -> dict[str, str]:
    """Names of parameters by the names of a file's tensors. transformers itself would search every submodule
    recursively and build the table of all names again for each."""
    places: dict[str, str] = {}
    about = model.config.get_text_config()
    for prefix, part in (("", model), *((f"{name}.", child) for name, child in model.named_children())):
        single = SimpleNamespace(state_dict=part.state_dict, named_children=tuple)
        places = (
            get_gguf_hf_weights_map(single, processor, about.model_type, about.num_hidden_layers, qual_name=prefix)
            | places
        )
    return places


def _hold_for_transformers(path: Path, said: Said, header: Header, places: Mapping[str, str]) -> None:
    """Check a model that transformers dequantises itself: it reads one file, and ignores unknown tensors."""
    if len(header.files) > 1:
        raise UnsupportedModelError(
            f"{str(path)!r} is a part of a model of the architecture {said.architecture!r}, which truedraft reads of "
            "whole files alone; merge them with llama.cpp's llama-gguf-split --merge"
        )
    others = [each.name for each in header.tensors if not {each.name, each.name.removesuffix(".weight")} & {*places}]
    if others:
        raise ModelError(f"{str(path)!r} {_HAS_OTHERS}: {len(others)}, the first {others[0]!r}; get another file")


def _tokenizer(path: Path, header: Header) -> Any:
    said = {name: value for name, value in header.fields.items() if name.startswith("tokenizer.")}
    built = read_tokenizer(str(path), said)
    if built is not None:
        return built
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that it loads as it is: a family's own class would rebuild its rules at every load. Added
    tokens are saved separately, too, because its large file would otherwise be read twice."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    parts = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    about["added_tokens_decoder"] = {
        str(number): {part: getattr(token, part) for part in parts}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    file.write_text(json.dumps(about), encoding="utf-8")


def _header(path: Path) -> Header:
    header = read_header(path)
    unknown = sorted({each.kind for each in header.tensors} - {*_READERS, *_NUMBERS})
    if unknown:
        raise UnsupportedModelError(
            f"{str(path)!r} has weights of type {', '.join(unknown)}, which truedraft does not read; get one of "
            f"{', '.join(_READERS)}"
        )
    for name, value in header.fields.items():
        if name.startswith("tokenizer.ggml.") and not _is_of_kind(name.removeprefix("tokenizer.ggml."), value):
            raise ModelError(
                f"{str(path)!r} says {name[:100]} = {str(value)[:100]!r}, which that cannot be; fetch it again"
            )
    vocabulary, end = header.fields.get("tokenizer.ggml.tokens"), _token(header, "eos")
    if vocabulary is None or end is None or not 0 <= end < len(vocabulary):
        lacks = "has no vocabulary" if vocabulary is None else f"names no token of it that ends a text (got {end})"
        raise ModelError(f"{str(path)!r} {lacks}; get one that llama.cpp's convert_hf_to_gguf.py wrote")
    rows = next((each.shape[0] for each in header.tensors if each.name == "token_embd.weight"), 0)
    if rows != len(vocabulary):
        raise ModelError(f"{str(path)!r} has {len(vocabulary)} tokens and embeddings of {rows}; fetch it again")
    return header


def _is_of_kind(name: str, value: Any) -> bool:
    if name.endswith("_token_id"):
        return type(value) is int
    if name in ("model", "pre"):
        return isinstance(value, str)
    kind = {"tokens": str, "merges": str, "scores": float, "token_type": int}.get(name)
    return kind is None or (isinstance(value, list) and all(type(each) is kind for each in value))


def _token(header: Header, name: str) -> int | None:
    """The id of a special token; None if the file names none."""
    found: int | None = header.fields.get(f"tokenizer.ggml.{name}_token_id")
    return found


def without_weights(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with matrices that take no memory and have no values yet."""
    with _WithoutMemory(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def is_read_here(source: str) -> bool:
    """Whether a resolved source is a GGUF file for `load_weights`."""
    return is_one(source) and _processor(_index(source)) in _BY_ROWS


def is_one(source: str) -> bool:
    """Whether a resolved source is a GGUF file."""
    return (Path(source) / INDEX).is_file()


def licence_of(source: str) -> str | None:
    """The licence that a file names."""
    named = read_header(Path(_index(source)["files"][0])).fields.get("general.license")
    return named if isinstance(named, str) else None


def place_of(source: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that locate a resolved source. transformers itself dequantises GGUF files of
    families with tensors that are not rows of the file's."""
    if not is_one(source):
        return {"pretrained_model_name_or_path": source}
    file = Path(_index(source)["files"][0])
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


def files_of(source: str) -> list[Path]:
    """The GGUF files of a resolved source."""
    return [Path(each) for each in _index(source)["files"]]


def _index(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))
    return found


def _processor(index: dict[str, Any]) -> type[TensorProcessor]:
    found: type[TensorProcessor] = TENSOR_PROCESSORS.get(index["architecture"], TensorProcessor)
    return found


def load_weights(folder: Path, config: Any, name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with matrices that take no memory: their `quantized` reads the file's tensors.

    Raises:
        ModelError: the file is missing, lacks tensors, or has others.
    """
    index = _index(folder)
    try:
        # Kept open as long as any tensor may be read, because another file may take its name.
        files = [Path(each).open("rb") for each in index["files"]]  # noqa: SIM115
    except OSError as error:
        raise ModelError(f"cannot read the weights of {name!r}: {first_line(error)}") from error
    if _key((Path(file.name), os.fstat(file.fileno())) for file in files) != folder.name:
        raise ModelError(f"{index['files'][0]!r} was changed since its tensors were looked up; load it again")
    model = without_weights(config, dtype)
    processor = _processor(index)(config=config.to_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = set(dict(model.named_parameters()))
    tensors = [StoredTensor(**each) for each in index["tensors"]]
    others = [each.name for each in tensors if not each.place and each.name != _FACTORS]
    for stored in tensors:
        if stored.place:
            missing.discard(stored.place)
            _fill(parameters[stored.place], stored, files, processor, name)
        elif stored.name == _FACTORS:
            _divide_frequencies(model, stored, files)
    for what, which in (
        ("lacks tensors of its model", sorted(missing)),
        (_HAS_OTHERS, others),
    ):
        if which:
            raise ModelError(f"{name!r} {what}: {len(which)}, the first {which[0]!r}; get another file")
    return model


def _divide_frequencies(model: PreTrainedModel, stored: StoredTensor, files: Sequence[BinaryIO]) -> None:
    """Scale the rotary frequencies, as Llama 3.1 and later need."""
    factors = numbers_of(stored.kind, stored.data(files))
    for buffer, values in model.named_buffers():
        if buffer.endswith("inv_freq") and values.shape == factors.shape:
            values.div_(factors)


def _fill(weight: nn.Parameter, stored: StoredTensor, files: Sequence[BinaryIO], processor: Any, name: str) -> None:
    if tuple(weight.shape) != tuple(stored.shape):
        raise ModelError(
            f"{name!r} has {stored.name!r} of the shape {list(stored.shape)}, and its model asks for "
            f"{list(weight.shape)}; fetch it again"
        )

    def whole(values: NDArray[Any]) -> NDArray[Any]:
        return processor.process(weights=values, name=stored.name).weights

    if stored.kind in _NUMBERS:
        numbers = torch.from_numpy(whole(numbers_of(stored.kind, stored.data(files)).numpy()))
        weight.data = numbers.view(weight.shape).to(weight.dtype)
        return
    order = np.ascontiguousarray(whole(np.arange(stored.shape[0])[:, None])[:, 0])

    def rows(index: Tensor | slice) -> QuantizedWeight:
        which = order[index.numpy() if isinstance(index, Tensor) else index]
        if not len(which):
            return quantized_of(stored.kind, stored.data(files, 0, 0))
        first, end = int(which.min()), int(which.max()) + 1  # those of a piece are neighbours, so each is read once
        return quantized_of(stored.kind, stored.data(files, first, end)[which - first])

    out, inputs = stored.shape[0], stored.shape[-1]
    together = max(_PIECE // inputs // _WHOLE * _WHOLE, _WHOLE)
    form = _READERS[stored.kind][2]
    weight.quantized = StoredWeight(form, rows, (out, inputs), together=together)  # type: ignore[attr-defined]
