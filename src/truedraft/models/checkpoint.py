"""A model's files in a folder or on the hub: tensors by their headers, the meaning of names and sizes, and hashes."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from truedraft.errors import ModelError, first_line
from truedraft.files import cache_folder, could_not_be_kept, object_of, written_whole
from truedraft.machine import versions
from truedraft.models.mapped import in_memory
from truedraft.models.packed_linear import PackedLinear
from truedraft.models.padding import padding_of
from truedraft.models.quantized import numbers_of, quantized_of
from truedraft.progress import log_stage

_CANONICAL = (torch.float32, torch.bfloat16)
_log = logging.getLogger("truedraft.models")


class Checkpoint:
    """Files of weights; `read` returns these in bfloat16, as they were before padding and packing."""

    def __init__(self, read: Callable[[], PreTrainedModel], files: Sequence[Path]) -> None:
        self.read = read
        self._files = sorted(files)
        self._state = self._now()  # before they are read, so that a change in between invalidates the cache

    def _now(self) -> dict[str, Any]:
        found = [(str(file.absolute()), file.stat()) for file in self._files if file.is_file()]
        seen = [[path, about.st_size, about.st_mtime_ns, about.st_ino] for path, about in found]
        return {"files": seen, "versions": versions()}

    def kept(self, what: str, find: Callable[[], str]) -> str:
        """The result of `find`, cached under a name while the files' paths, sizes, times and inodes are unchanged."""
        paths = json.dumps([path for path, *_ in self._state["files"]])
        place = cache_folder() / "fingerprints" / f"{hashlib.sha256(paths.encode()).hexdigest()[:24]}.json"
        record = object_of(place)
        record = record if record.get("state") == self._state else {"state": self._state}
        if isinstance(known := record.get(what), str):
            return known
        log_stage(f"loading: reading weights for their {what}, once")
        found = find()
        if self._state["files"] and self._now() == self._state:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(place) as file:
                    file.write(json.dumps(record | {what: found}).encode())
            except OSError as error:
                _log.warning(could_not_be_kept(place.parent, error.strerror or str(error)))
        return found


def fingerprint_of(model: PreTrainedModel) -> str:
    """A hash of a model's weights (see `weights_hash`): of their names, shapes and bfloat16 values, tied ones once.

    It is the same for loads in float32 and bfloat16, on any device; for a padded model written by `truedraft export` it
    is that of the original model. Raises ModelError: the model was padded and does not say from what, or was packed.
    """
    padding, name = padding_of(model), type(model).__name__
    if "fingerprint" in padding:
        return str(padding["fingerprint"])
    if padding:
        raise ModelError(f"this {name} was padded, and does not record from which model; load that one, with pad_to")
    if not is_whole(model):
        raise ModelError(f"the weights of this {name} were packed for inference; take its fingerprint before that")
    return weights_hash(model, torch.bfloat16)


def weights_hash(module: nn.Module, dtype: torch.dtype | None = None) -> str:
    """SHA-256 (32 digits) of all parameters' names, shapes and values, rounded to `dtype` if given; tied ones once."""
    return _hash_of(module, dtype, lambda weight: [numbers_of(weight)])


def sample_of(model: PreTrainedModel) -> str | None:
    """A hash like `fingerprint_of` of first and last rows only; None for a padded model that records its original."""

    def ends(weight: Tensor) -> Iterable[Tensor]:
        stored = quantized_of(weight)
        for row in (0, len(weight) - 1) if weight.dim() > 1 else (0,):
            if stored is not None:
                yield stored.rows(slice(row, row + 1)).dequantized()
            else:
                yield (weight[row : row + 1] if weight.dim() > 1 else weight).detach()

    return None if "fingerprint" in padding_of(model) else _hash_of(model, torch.bfloat16, ends)


def _hash_of(module: nn.Module, dtype: torch.dtype | None, values_of: Callable[[Tensor], Iterable[Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(module.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        for values in values_of(weight):
            rounded = values.to(device="cpu", dtype=dtype or values.dtype).contiguous()
            digest.update(rounded.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def is_whole(model: PreTrainedModel) -> bool:
    """Whether a model still has all of its weights: fast paths take some over and free them, `shard` cuts them."""
    packed = any(isinstance(module, PackedLinear) for module in model.modules())
    return not packed and getattr(model, "cut_into", 1) == 1 and all(weight.numel() for weight in model.parameters())


def can_be_read_from(model: PreTrainedModel) -> bool:
    """Whether `fingerprint_of` this model is that of its checkpoint; not in float16, which rounds values further."""
    padding = padding_of(model)
    return "fingerprint" in padding or (not padding and model.dtype in _CANONICAL and is_whole(model))


_COUNTS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "num_experts", "num_local_experts", "n_routed_experts"),
}
_SIZES = {
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "d_model", "d_ff", "n_embd", "n_head", "n_inner", "ffn_dim"),
}
_LEAST_COUNT, _LEAST_SIZE = 4096, 1 << 20  # smaller ones take neither memory nor time
_PER_CODE = 16  # weights in one entry of a quantised tensor, at most
_NUMBERED_MTP = re.compile(r"((?:\w+\.)*layers\.(\d+)\.)eh_proj\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in an open safetensors file, with the type and shape in its header."""

    file: Any
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        return in_memory(self.file.get_tensor(self.name))


def tensors_of(source: str, name: str, revision: str | None) -> dict[str, Place]:
    """The tensors in a model's safetensors files by name, unread; empty without. ModelError if a file is broken."""
    found: dict[str, Place] = {}
    try:
        for path in weight_files(source, name, revision):
            file = safe_open(path, framework="pt")
            for tensor in file.keys():  # noqa: SIM118 - it is no dict
                part = file.get_slice(tensor)
                found[tensor] = Place(file, tensor, part.get_dtype(), tuple(part.get_shape()))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}; fetch them again") from error
    return found


def file_of(source: str, name: str, revision: str | None) -> str | None:
    """The path of a file of a folder or a hub name; None if there is none."""
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    return cached_file(source, name, revision=revision, **{f"_raise_exceptions_for_{each}": False for each in kinds})


def weight_files(source: str, name: str, revision: str | None) -> list[str]:
    """The safetensors files with a folder's weights; empty if it has others."""
    whole = file_of(source, "model.safetensors", revision)
    if whole is not None:
        return [whole]
    index = file_of(source, "model.safetensors.index.json", revision)
    if index is None:
        return []
    try:
        files, _ = get_checkpoint_shard_files(source, index, revision=revision)
        if Path(source).is_dir() and (lost := [each for each in files if not Path(each).is_file()]):
            raise ModelError(f"{name!r} lacks {Path(lost[0]).name}, a file of its weights; fetch it again")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    return list(files)


def refuse_vast_sizes(said: Mapping[str, Any], source: str, name: str, revision: str | None) -> None:
    """Raise ModelError if a config.json, `said`, has more layers or entries than the weights can have."""
    vast = [(word, size) for word, size in _sizes_in(said) if size > (_LEAST_COUNT if word in _COUNTS else _LEAST_SIZE)]
    if not vast:
        return
    places = tensors_of(source, name, revision)
    tensors, longest = len(places), max((side for place in places.values() for side in place.shape), default=0)
    try:
        for path in () if places else Path(source).glob("*.bin"):  # pickles: the bytes of their entries
            with zipfile.ZipFile(path) as opened:
                sizes = [entry.file_size for entry in opened.infolist()]
            tensors, longest = tensors + len(sizes), max(longest, *sizes, 0)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    for word, size in vast:
        if size > max(tensors, longest * (1 if word in _COUNTS else _PER_CODE)):
            raise ModelError(
                f"config.json of {name!r} says {word} {size}, and its weights are {tensors} tensors of at most "
                f"{longest} entries a side; fetch its files again, or mend config.json"
            )


def _sizes_in(said: Any) -> Iterator[tuple[str, int]]:
    for word, value in said.items() if isinstance(said, dict) else ():
        if isinstance(value, dict):
            yield from _sizes_in(value)
        elif type(value) in (int, float) and word in _COUNTS | _SIZES:
            yield word, value


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors of one MTP layer in a checkpoint."""

    prefix: str  # of all tensors of the layer; the following names come after it
    fusion: str  # the matrix that merges embedding and vector; the next two names are of their norms
    of_embedding: str
    of_vector: str
    final: str
    layer: str = ""  # prefix of the decoder layer itself
    zeroes_first: bool = False  # whether the embedding at the first position is zeroed, as engines do here

    @property
    def parts(self) -> tuple[str, str, str, str]:
        return self.fusion, self.of_embedding, self.of_vector, self.final

    def is_further(self, name: str) -> bool:
        return bool(self.layer) and name.startswith(f"{self.prefix}layers.") and self.of_layer(name) is None

    def of_layer(self, name: str) -> str | None:
        start = self.prefix + self.layer
        return name.removeprefix(start) if name.startswith(start) else None


_QWEN = MtpNames(
    "mtp.", "fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "layers.0."
)
SPECULATORS = MtpNames(
    "mtp_layers.0.", "input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"
)
"""Names in folders of `speculators`."""


def mtp_layers(names: Iterable[str]) -> list[MtpNames]:
    """The MTP layers of a checkpoint, in order of the tokens that they predict. Qwen 3-Next and 3.5 write `mtp.*`;
    DeepSeek, GLM and others number them after the model's own layers; `speculators` writes separate folders."""
    numbered: list[tuple[int, str]] = []
    found: dict[MtpNames, None] = {}
    for name in names:
        match = _NUMBERED_MTP.fullmatch(name)
        if match is not None:
            numbered.append((int(match[2]), match[1]))
        found |= {each: None for each in (_QWEN, SPECULATORS) if name in {each.prefix + part for part in each.parts}}
    ends = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return [*found] + [MtpNames(prefix, *ends, zeroes_first=True) for _, prefix in sorted(numbered)]


def without_mtp(names: Iterable[str]) -> list[str]:
    """The names except those of MTP layers."""
    names = list(names)
    prefixes = tuple(each.prefix for each in mtp_layers(names))
    return [name for name in names if not name.startswith(prefixes)] if prefixes else names
