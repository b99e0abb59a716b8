"""GGUF files: their tensors, in ggml's blocks (ggml-common.h) or as numbers, their configuration and tokenizer."""

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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
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
from truedraft.models.gguf_config import ModelKeys, check_positions, read_config
from truedraft.models.gguf_header import Header, StoredTensor, parts_of, read_header
from truedraft.models.quantized import QuantizedWeight, Scheme, StoredWeight
from truedraft.progress import log_stage
from truedraft.text.gguf_tokenizer import read_tokenizer

INDEX = "gguf.json"
_FORMAT = 6
_PIECE, _WHOLE = 1 << 20, 64  # codes that are read at a time, of outputs in whole units of the native products
_FACTORS = "rope_freqs.weight"
_BY_ROWS = (TensorProcessor, LlamaTensorProcessor, Gemma2TensorProcessor)  # these at most permute rows of matrices
_HAS_OTHERS = "has tensors that its model has not"
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # GGUF's names of special tokens, by those of configurations
_log = logging.getLogger(__name__)

Blocks = NDArray[np.uint8]
"""`[out, blocks of a row, bytes of a block]`."""


def _float16(blocks: Blocks, first: int) -> Tensor:
    """The number at byte `first` of each block: `[out, blocks]`."""
    part = np.ascontiguousarray(blocks[..., first : first + 2])
    return torch.from_numpy(part.view("<f2").astype(np.float16).reshape(len(blocks), -1))


def _codes(codes: NDArray[Any], out: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes).reshape(out, -1))


def _bytes(blocks: Blocks, bits: int, scheme: Scheme) -> QuantizedWeight:
    """Q8_0: a scale, and 32 signed codes."""
    return QuantizedWeight(bits, scheme, _codes(blocks[..., 2:] ^ 128, len(blocks)), _float16(blocks, 0))


def _nibbles(blocks: Blocks, bits: int, scheme: Scheme) -> QuantizedWeight:
    """Q4_0 to Q5_1: a scale, in SHIFTED a shift, with 5 bits 4 bytes with a bit of each code, and 16 bytes with the
    lower 4 bits of codes: those of the first 16 codes are their lower halves.
    """
    part = blocks[..., -16:]
    codes = np.empty((*part.shape[:-1], 32), np.uint8)
    np.bitwise_and(part, 15, out=codes[..., :16])
    np.right_shift(part, 4, out=codes[..., 16:])
    if bits == 5:
        codes |= np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little") * np.uint8(16)
    shifts = _float16(blocks, 2) if scheme is Scheme.SHIFTED else None
    return QuantizedWeight(bits, scheme, _codes(codes, len(blocks)), _float16(blocks, 0), shifts)


def _in_eighths(blocks: Blocks, bits: int, scheme: Scheme) -> QuantizedWeight:
    """Q4_K and Q5_K: a scale and a shift, 12 bytes with inner ones, with 5 bits 32 bytes with a bit of each code of 8
    groups, and 128 bytes with lower 4 bits of codes, 32 bytes for two groups.

    Inner scales and shifts have 6 bits. Those of the first four groups are the lower 6 bits of the first 8 bytes. Those
    of the others have their lower 4 bits in the last 4 bytes, and their upper 2 in the free bits of the first 8.
    """
    out, many = blocks.shape[:2]
    part = blocks[..., -128:].reshape(out, many, 4, 1, 32)
    codes = np.concatenate([part & 15, part >> 4], axis=3).reshape(out, many, 256)
    if bits == 5:
        group = np.arange(8, dtype=np.uint8)[:, None]  # its fifth bits are the bits with this number
        codes |= (blocks[..., None, 16:48] >> group & 1).reshape(out, many, 256) << 4
    scales, shifts, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    inner = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=-1)
    lesser = np.concatenate([shifts & 63, rest >> 4 | shifts >> 6 << 4], axis=-1)
    outer = _float16(blocks, 0), _float16(blocks, 2)
    return QuantizedWeight(bits, scheme, _codes(codes, out), *outer, _codes(inner, out), _codes(lesser, out))


def _in_sixteenths(blocks: Blocks, bits: int, scheme: Scheme) -> QuantizedWeight:
    """Q6_K: 128 bytes with the lower 4 bits of codes, 64 with the upper 2, 16 signed inner scales, and a scale."""
    out, many = blocks.shape[:2]
    low = blocks[..., :128].reshape(out, many, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(out, many, 2, 4, 32)
    high = blocks[..., 128:192].reshape(out, many, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    inner = torch.from_numpy(np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(out, -1))
    return QuantizedWeight(bits, scheme, _codes(low | high << 4, out), _float16(blocks, 208), None, inner)


# For each type: its reader, bytes of a block, and the bits and scheme of its codes.
_READERS: dict[str, tuple[Callable[[Blocks, int, Scheme], QuantizedWeight], int, tuple[int, Scheme]]] = {
    "Q4_0": (_nibbles, 18, (4, Scheme.ONE)),
    "Q4_1": (_nibbles, 20, (4, Scheme.SHIFTED)),
    "Q5_0": (_nibbles, 22, (5, Scheme.ONE)),
    "Q5_1": (_nibbles, 24, (5, Scheme.SHIFTED)),
    "Q8_0": (_bytes, 34, (8, Scheme.ONE)),
    "Q4_K": (_in_eighths, 144, (4, Scheme.NESTED)),
    "Q5_K": (_in_eighths, 176, (5, Scheme.NESTED)),
    "Q6_K": (_in_sixteenths, 210, (6, Scheme.HALVES)),
}
_NUMBERS = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}  # types that are not quantised


def quantized_of(kind: str, data: NDArray[np.uint8]) -> QuantizedWeight:
    """The weight of a tensor of a quantised type, by ggml's name of it; `data` is `[out, bytes of an output]`."""
    reader, size, form = _READERS[kind]
    return reader(data.reshape(len(data), -1, size), *form)


def numbers_of(kind: str, data: NDArray[np.uint8]) -> Tensor:
    """A tensor that is not quantised, in float32; arguments as for `quantized_of`."""
    of_type = np.ascontiguousarray(data).view(_NUMBERS[kind])
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

    It is kept, because converting a large vocabulary into a tokenizer takes long. Raises ModelError: the file cannot be
    read, or is broken; UnsupportedModelError: its kind cannot be run; MissingExtraError: `gguf` is not installed.
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
    said = ModelKeys(str(path), header.fields, {each.name: each.shape for each in header.tensors})
    tokens = {f"{name}_token_id": _token(header, kind) for name, kind in _TOKENS.items()}
    try:
        fields = {key: value for key, value in header.fields.items() if key.startswith("tokenizer.")}
        tokenizer = read_tokenizer(str(path), fields)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        config = read_config(said, len(header.fields["tokenizer.ggml.tokens"]), tokens)
        model = without_weights(config, torch.float32)
        kind = _processor(said.architecture)
        places = _places(model, kind(config=config.to_dict()))
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not say {error.args[0]!r} of its model; fetch it again") from error
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise UnsupportedModelError(f"{str(path)!r} cannot be read by transformers: {first_line(error)}") from error
    check_positions(said, model)
    index = {
        "files": [str(file) for file in header.files],
        "architecture": said.architecture,
        "tensors": [asdict(replace(each, place=places.get(each.name, ""))) for each in header.tensors],
    }
    if kind not in _BY_ROWS:
        _check_for_transformers(path, said, header, places)
    try:
        config.save_pretrained(folder)
        _keep_tokenizer(tokenizer, folder)
        with written_whole(folder / INDEX) as file:  # the last file: its existence marks a complete folder
            file.write(json.dumps(index).encode())
    except OSError as error:
        raise ModelError(f"what was converted of {str(path)!r} cannot be written: {first_line(error)}") from error


def _places(model: PreTrainedModel, processor: TensorProcessor) -> dict[str, str]:
    """Names of parameters by the names of a file's tensors; transformers searches and rebuilds for each submodule."""
    places: dict[str, str] = {}
    about = model.config.get_text_config()
    for prefix, part in (("", model), *((f"{name}.", child) for name, child in model.named_children())):
        single = SimpleNamespace(state_dict=part.state_dict, named_children=tuple)
        found = get_gguf_hf_weights_map(single, processor, about.model_type, about.num_hidden_layers, qual_name=prefix)
        places = found | places
    return places


def _check_for_transformers(path: Path, said: ModelKeys, header: Header, places: Mapping[str, str]) -> None:
    """Check a model that transformers dequantises itself: it reads one file, and ignores unknown tensors."""
    if len(header.files) > 1:
        raise UnsupportedModelError(
            f"{str(path)!r} is a part of a model, and truedraft reads {said.architecture!r} from single files only; "
            "merge them with llama.cpp's llama-gguf-split --merge"
        )
    others = [each.name for each in header.tensors if not {each.name, each.name.removesuffix(".weight")} & {*places}]
    if others:
        raise ModelError(f"{str(path)!r} {_HAS_OTHERS}: {len(others)}, the first {others[0]!r}; get another file")


def _keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that it loads as it is: a family's own class would rebuild its rules at every load. Added
    tokens are saved separately, because its large file would otherwise be read twice.
    """
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
    return header.fields.get(f"tokenizer.ggml.{name}_token_id")


def without_weights(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with matrices that take no memory and have no values yet."""
    with _WithoutMemory(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def is_read_here(source: str) -> bool:
    """Whether a resolved source is a GGUF file for `load_weights`."""
    return is_one(source) and _processor(_index(source)["architecture"]) in _BY_ROWS


def is_one(source: str) -> bool:
    """Whether a resolved source is a GGUF file."""
    return (Path(source) / INDEX).is_file()


def licence_of(source: str) -> str | None:
    """The licence that a file names."""
    named = read_header(Path(_index(source)["files"][0])).fields.get("general.license")
    return named if isinstance(named, str) else None


def place_of(source: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that locate a resolved source."""
    if not is_one(source):
        return {"pretrained_model_name_or_path": source}
    file = Path(_index(source)["files"][0])
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


def files_of(source: str) -> list[Path]:
    """The GGUF files of a resolved source."""
    return [Path(each) for each in _index(source)["files"]]


def _index(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))


def _processor(architecture: str) -> type[TensorProcessor]:
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)


def load_weights(folder: Path, config: Any, name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with matrices that take no memory, but `quantized` readers; ModelError if tensors do not fit."""
    index = _index(folder)
    try:
        # Kept open as long as any tensor may be read, because another file may take its name.
        files = [Path(each).open("rb") for each in index["files"]]  # noqa: SIM115
    except OSError as error:
        raise ModelError(f"cannot read the weights of {name!r}: {first_line(error)}") from error
    if _key((Path(file.name), os.fstat(file.fileno())) for file in files) != folder.name:
        raise ModelError(f"{index['files'][0]!r} was changed since its tensors were looked up; load it again")
    model = without_weights(config, dtype)
    processor = _processor(index["architecture"])(config=config.to_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = set(dict(model.named_parameters()))
    tensors = [StoredTensor(**each) for each in index["tensors"]]
    others = [each.name for each in tensors if not each.place and each.name != _FACTORS]
    for stored in tensors:
        if stored.place:
            missing.discard(stored.place)
            _fill(parameters[stored.place], stored, files, processor, name)
        elif stored.name == _FACTORS:
            factors = numbers_of(stored.kind, stored.data(files))  # of rotary frequencies, in Llama 3.1 and later
            for buffer, values in model.named_buffers():
                if buffer.endswith("inv_freq") and values.shape == factors.shape:
                    values.div_(factors)
    for what, which in (("lacks tensors of its model", sorted(missing)), (_HAS_OTHERS, others)):
        if which:
            raise ModelError(f"{name!r} {what}: {len(which)}, the first {which[0]!r}; get another file")
    return model


def _fill(weight: nn.Parameter, stored: StoredTensor, files: Sequence[BinaryIO], processor: Any, name: str) -> None:
    if tuple(weight.shape) != tuple(stored.shape):
        raise ModelError(
            f"{name!r} has {stored.name!r} of the shape {list(stored.shape)}, and its model has "
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
