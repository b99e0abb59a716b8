"""What a forward is told: tokens and a few numbers, at addresses that stay as long as its bucket is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.models.graphs.buckets import Bucket

Array = TypeVar("Array")
HostNumbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Array]):
    """The numbers, all int64, on the host or on the device.

    A row is a token of a request: row `request * tokens + i`. Rows without a token are padding; what they compute is
    never looked at.

    Attributes:
        tokens: `[rows]`: the pack of tokens, one request's behind another's; then numbers without meaning.
        source: `[rows]`: where in the pack of tokens a row's token is.
        positions: `[rows]`.
        target: `[rows]`: the slab's row that takes the token's key and value.
        wanted: `[wanted]`: rows that get logits.
        length: `[requests]`: committed tokens.
        until: `[rows]`: the token sees its request's slots below this, and
        path: `[patterns, rows, words]`: of the uncommitted nodes those whose bit is set here.
        first: `[patterns, rows]`: of the slots below `until` only those from here on are in reach of a pattern.
    """

    tokens: Array
    source: Array
    positions: Array
    target: Array
    wanted: Array
    length: Array
    until: Array
    path: Array
    first: Array


class Batch(Protocol):
    """What is loaded into inputs: the requests of one forward."""

    @property
    def bucket(self) -> Bucket:
        """Their shape."""
        ...

    @property
    def wanted(self) -> int:
        """Rows that get logits, without padding."""
        ...

    def tokens(self) -> list[Tensor]:
        """New tokens of each request, int64, on the host or on the model's device."""
        ...

    def write(self, numbers: Numbers[HostNumbers]) -> None:
        """Say where each token is and what it sees; padding is there already, the tokens themselves need not be."""
        ...


class Inputs:
    """Memory for the inputs of one bucket. Loading them waits for nothing.

    All numbers that the host knows go up in one copy; tokens that only the device knows are put between them there.

    Args:
        bucket: the shape.
        patterns: different reaches of attention in the model.
        nowhere: the slab's row for what is not wanted.
        device: of the model.

    Attributes:
        bucket: as given.
        numbers: on the device.
    """

    def __init__(self, bucket: Bucket, patterns: int, nowhere: int, device: torch.device) -> None:
        self.bucket = bucket
        self._shapes = _shapes(bucket, patterns)
        self._nowhere = nowhere
        self._flat = torch.zeros(sum(map(math.prod, self._shapes)), dtype=torch.int64, device=device)
        self.numbers: Numbers[Tensor] = _split(self._flat, self._shapes)

    def load(self, batch: Batch) -> None:
        """Fill in a batch of this bucket."""
        # Page-locked, so that the copy is only queued; torch gives the block out again once it was read.
        host = torch.zeros(self._flat.shape, dtype=torch.int64, pin_memory=self._flat.is_cuda)
        numbers: Numbers[HostNumbers] = _split(host.numpy(), self._shapes)
        numbers.target.fill(self._nowhere)
        numbers.until.fill(1)  # a softmax over nothing would be NaN
        batch.write(numbers)
        unknown: list[tuple[int, Tensor]] = []
        start = 0
        for tokens in batch.tokens():
            if transfers.waits(tokens.device):
                unknown.append((start, tokens))
            else:
                numbers.tokens[start : start + len(tokens)] = tokens.numpy()
            start += len(tokens)
        self._flat.copy_(host, non_blocking=True)
        for start, tokens in unknown:
            self.numbers.tokens[start : start + len(tokens)].copy_(tokens)


def _shapes(bucket: Bucket, patterns: int) -> list[tuple[int, ...]]:
    """Shapes of the numbers, in the order of their names."""
    rows = (bucket.rows,)
    shapes = {
        "tokens": rows,
        "source": rows,
        "positions": rows,
        "target": rows,
        "wanted": (bucket.wanted,),
        "length": (bucket.requests,),
        "until": rows,
        "path": (patterns, bucket.rows, bucket.words),
        "first": (patterns, bucket.rows),
    }
    return [shapes[field.name] for field in fields(Numbers)]


def _split(flat: Any, shapes: list[tuple[int, ...]]) -> Numbers[Any]:
    """Views of one block, one behind another."""
    parts = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return Numbers(*parts)
