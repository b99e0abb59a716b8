"""The files that a model was read from, and what was found out about their weights, kept in the user's cache folder."""

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
from truedraft.progress import told_stage

_log = logging.getLogger("truedraft.models")


class Checkpoint:
    """Weights in files, which are read again where what was packed has lost its own.

    What takes reading all of them is kept, and holds as long as the files' paths, sizes, times and inodes do.

    Args:
        read: the weights as they were before padding and packing, in bfloat16.
        files: that it reads.
    """

    def __init__(self, read: Callable[[], PreTrainedModel], files: Sequence[Path]) -> None:
        self.read = read
        self._files = sorted(files)
        self._state = self._now()  # before they are read: what changed meanwhile is not kept as theirs

    def _now(self) -> dict[str, Any]:
        """The files as they are, and what gives their tensors names."""
        found = [(str(file.absolute()), file.stat()) for file in self._files if file.is_file()]
        seen = [[path, about.st_size, about.st_mtime_ns, about.st_ino] for path, about in found]
        return {"files": seen, "versions": versions()}

    @property
    def _place(self) -> Path:
        paths = json.dumps([path for path, *_ in self._state["files"]])
        return cache_folder() / "fingerprints" / f"{hashlib.sha256(paths.encode()).hexdigest()[:24]}.json"

    def kept(self, what: str, find: Callable[[], str]) -> str:
        """Something about the weights: what was kept of these files, else found now, and kept.

        Args:
            what: it is.
            find: takes reading them.
        """
        record = object_of(self._place)
        record = record if record.get("state") == self._state else {"state": self._state}
        if isinstance(known := record.get(what), str):
            return known
        told_stage(f"loading: reading weights for their {what}, once")
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
        """As `sample_of`, of the files."""
        return self.kept("sample", lambda: sample_of(self.read()) or "") or None


def sample_of(model: PreTrainedModel) -> str | None:
    """A hash of all parameters' names, shapes, and bfloat16 values in their first and last rows: no others are read.

    Models whose weights were trained apart have others; what is equal but for some rows may have the same. None of a
    padded model that says what it was made from: its rows are others than that one's.

    Args:
        model: with all of its weights, in float32 or bfloat16.

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
