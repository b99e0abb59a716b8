"""Token streams on disk, and the blocks that training steps read from them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from truedraft.errors import DataError
from truedraft.models.loading import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray


class Encoder(Protocol):
    """The part of a tokenizer that packing needs."""

    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of the text."""


def write_stream(texts: Iterable[str], tokenizer: Encoder, path: Path) -> int:
    """Write `<eos> text <eos> text ... <eos>` as uint32 ids; returns the number of tokens."""
    pieces = [np.array([tokenizer.eos_token_id], dtype=np.uint32)]
    with quiet_transformers():  # which warns of texts longer than the context; they are cut into blocks
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint32))
    stream = np.concatenate(pieces)
    if len(pieces) == 1:
        raise DataError("the training data holds no text: give at least one file that is not empty")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    stream.tofile(partial)
    partial.replace(path)
    return len(stream)


def read_stream(path: Path) -> NDArray[np.uint32]:
    """The ids that `write_stream` wrote, mapped from disk rather than read."""
    return np.memmap(path, dtype=np.uint32, mode="r")


def stream_hash(stream: NDArray[np.uint32]) -> str:
    """The sha256 of the ids, which names the data of a run."""
    return hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest()


@dataclass(frozen=True)
class BlockSampler:
    """Blocks of one length from a stream: a pure function of an index, so that resuming needs no state.

    In each epoch the stream is cut at a new random offset and the blocks are visited in a new random order.
    A block has one token more than the model reads: inputs are `block[:-1]`, labels `block[1:]`.
    """

    stream: NDArray[np.uint32]
    sequence_length: int
    seed: int

    def __post_init__(self) -> None:
        if self.blocks_per_epoch < 1:
            raise DataError(
                f"the data has {len(self.stream)} tokens, fewer than the {2 * self.sequence_length + 1} "
                f"that blocks of {self.sequence_length} need: give more text or a shorter sequence length"
            )

    @property
    def blocks_per_epoch(self) -> int:
        """Whole blocks that fit behind the largest offset."""
        return max(0, (len(self.stream) - self.sequence_length - 1) // self.sequence_length)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Blocks number `first` to `first + count - 1` of the run: int64 [count, sequence_length + 1]."""
        rows = [self._block(index) for index in range(first, first + count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _block(self, index: int) -> NDArray[np.uint32]:
        epoch, position = divmod(index, self.blocks_per_epoch)
        offset, order = self._epoch(epoch)
        start = offset + int(order[position]) * self.sequence_length
        return self.stream[start : start + self.sequence_length + 1]

    def _epoch(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        random = np.random.default_rng((self.seed, epoch))
        offset = int(random.integers(self.sequence_length))
        return offset, random.permutation(self.blocks_per_epoch)
