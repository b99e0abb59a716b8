"""Hashes that identify a model's weights, and the files of a model with cached results about them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import ModelError
from truedraft.files import cache_folder, could_not_be_kept, object_of, written_whole
from truedraft.machine import versions
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
    is that of the original model.

    Raises:
        ModelError: the model was padded and does not say from what, or its weights were packed for inference.
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
