"""The files that a model was read from, and cached hashes of their weights in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from truedraft.files import cache_folder, could_not_be_kept, object_of, written_whole
from truedraft.machine import versions
from truedraft.models.padding import recorded_fingerprint
from truedraft.models.quantized import quantized_of
from truedraft.progress import log_stage

_log = logging.getLogger("truedraft.models")


class Checkpoint:
    """Files of weights, which are read again when the model's own were packed and freed.

    Results that need all weights are cached, and valid while the files' paths, sizes, times and inodes are unchanged.

    Args:
        read: reads the weights as they were before padding and packing, in bfloat16.
    """

    def __init__(self, read: Callable[[], PreTrainedModel], files: Sequence[Path]) -> None:
        self.read = read
        self._files = sorted(files)
        self._state = self._now()  # before they are read, so that a change in between invalidates the cache

    def _now(self) -> dict[str, Any]:
        """The state of the files, and the versions that determine tensor names."""
        found = [(str(file.absolute()), file.stat()) for file in self._files if file.is_file()]
        seen = [[path, about.st_size, about.st_mtime_ns, about.st_ino] for path, about in found]
        return {"files": seen, "versions": versions()}

    @property
    def _place(self) -> Path:
        paths = json.dumps([path for path, *_ in self._state["files"]])
        return cache_folder() / "fingerprints" / f"{hashlib.sha256(paths.encode()).hexdigest()[:24]}.json"

    def kept(self, what: str, find: Callable[[], str]) -> str:
        """A result with this name for these files: cached, else computed by `find` from the weights and cached."""
        record = object_of(self._place)
        record = record if record.get("state") == self._state else {"state": self._state}
        if isinstance(known := record.get(what), str):
            return known
        log_stage(f"loading: reading weights for their {what}, once")
        found = find()
        if self._state["files"] and self._now() == self._state:
            try:
                self._place.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(self._place) as file:
                    file.write(json.dumps(record | {what: found}).encode())
            except OSError as error:
                _log.warning(could_not_be_kept(self._place.parent, error.strerror or str(error)))
        return found

    def sample(self) -> str | None:
        """`sample_of` for the files."""
        return self.kept("sample", lambda: sample_of(self.read()) or "") or None


def sample_of(model: PreTrainedModel) -> str | None:
    """A hash of all parameters' names, shapes, and bfloat16 values in their first and last rows; no others are read.

    Separately trained models have different hashes; models that differ in a few rows only may have the same. None for a
    padded model that records its original, because its rows differ from the original's.

    Returns:
        32 hexadecimal digits of a SHA-256.
    """
    if recorded_fingerprint(model) is not None:
        return None
    digest = hashlib.sha256()
    for part, weight in sorted(model.named_parameters()):
        digest.update(f"{part} {tuple(weight.shape)}\n".encode())
        stored = quantized_of(weight)
        for row in (0, len(weight) - 1) if weight.dim() > 1 else (0,):
            if stored is not None:
                values = stored.rows(slice(row, row + 1)).dequantized()
            else:
                values = (weight[row : row + 1] if weight.dim() > 1 else weight).detach()
            narrow = values.to(device="cpu", dtype=torch.bfloat16).contiguous()
            digest.update(narrow.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
