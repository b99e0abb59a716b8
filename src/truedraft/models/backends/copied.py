"""Models with a cache that cannot be rolled back entry by entry: one sequence at a time, on copies of that cache.

Drafted tokens are read on a copy, which is dropped after a rejection and becomes the cache if all of them are accepted.
A cache need not have all committed tokens: the missing ones are read together with the drafted ones. Plain decoding
copies nothing, like `generate`.

A model without any cache that could be rolled back reads the whole text again at every step. `generate` does that with
a model without a cache, and it is correct for any autoregressive model. A step costs the text so far; drafted tokens
add next to nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.sequential import PathCache, SequentialBackend
from truedraft.models.packing import SegmentPlan

_MOST_REREAD = 16
"""Most committed tokens that are read again with drafted ones, before they are read into the kept cache."""


@dataclass(slots=True)
class _Read:
    """A cache of the model itself, and the ids in it, from the first token; `past` is None before the first forward."""

    ids: list[int]
    past: Any = None

    def begins(self, text: Sequence[int]) -> bool:
        return self.ids == text[: len(self.ids)]

    def copied(self) -> _Read:
        return _Read(list(self.ids), copy.deepcopy(self.past))


@dataclass(slots=True)
class _Copies:
    """The caches of one request: `kept` holds only committed tokens, `tried` also drafted ones."""

    kept: _Read | None = None
    tried: _Read | None = None

    @property
    def n_bytes(self) -> int:
        return sum(_bytes_of(each.past) for each in (self.kept, self.tried) if each is not None)

    def next_read(self, text: list[int], committed: int, first: int, drafts: bool) -> _Read:
        """The cache for the next run, which becomes `tried`.

        Args:
            text: all ids up to the run's last, `committed` of them committed; `first` is the index of the run's first.
            drafts: whether the run may be rejected.
        """
        before = text[: min(committed, first)]
        if self.tried is not None and self.tried.begins(before):
            self.kept, self.tried = self.tried, None
        if self.kept is not None and not self.kept.begins(before):
            self.kept = None
        if self.tried is None or not self.tried.begins(text[:first]):
            kept = self.kept or _Read([])
            if drafts:
                self.tried = kept.copied()
            else:
                self.kept, self.tried = None, kept
        return self.tried


class WholeTextBackend(SequentialBackend):
    """Runs a model's own forward over the whole text of each segment; the request's cache holds ids instead of keys."""

    rows_vary = True  # a drafted token makes the text longer, which changes products, as those of experts
    _way = "the whole text again at every step, since nothing that it keeps can be taken back"
    _needs_cache = False

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        super().__init__(model, reason)
        self.input_names = frozenset()

    def _read(self, part: SegmentPlan, run: Sequence[int], tokens: Tensor) -> dict[int, tuple[Tensor, ...]]:
        segment = part.segment
        own = [node - segment.written for node in run]
        if not set(own).isdisjoint(segment.rows):
            return super()._read(part, run, tokens)
        text_of(tokens[own][None], PathCache(segment.cache, segment.shape.path(run[-1]), len(run)))
        return {}

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        new, text = ids.shape[1], text_of(ids, past)
        given = {
            "position_ids": torch.arange(text.shape[1], device=ids.device)[None],
            "attention_mask": torch.ones_like(text),
            "use_cache": False,
        }
        logits: Tensor = self._called(text, given).logits[0, -new:]
        self._captured[-1] = self._captured[-1][:, -new:]
        return logits


def text_of(ids: Tensor, past: PathCache) -> Tensor:
    """Store new tokens `[1, new]`; returns all ids `[1, tokens]` up to the last of them."""
    whole, _ = past.update(ids[:, None, :, None], ids.new_zeros(1, 1, ids.shape[1], 0), 0)
    return whole[:, 0, :, 0]


class CopiedBackend(WholeTextBackend):
    """Runs a model's own forward on copies of the cache that it makes itself.

    Raises:
        UnsupportedModelError: its forward takes no cache.
    """

    _way = "one text at a time, behind copies of its own cache, since it cannot run packed"
    _needs_cache = True

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        new, whole = ids.shape[1], text_of(ids, past)
        text, cache = whole[0].tolist(), past.cache
        existing = cache.family.auxiliary
        copies = cache.family.auxiliary = existing if isinstance(existing, _Copies) else _Copies()
        if copies.kept is not None and cache.length - len(copies.kept.ids) > _MOST_REREAD:
            self._catch_up(copies, whole[:, : cache.length])
        read = copies.next_read(text, cache.length, len(text) - new, cache.uncommitted > 1)
        requested = places + len(text) - new - len(read.ids)
        logits = self._go_on(read, whole, requested)
        if len(logits) == len(places):
            return logits
        self._captured[-1] = self._captured[-1][:, -new:]
        return logits[-new:]

    def _catch_up(self, copies: _Copies, committed: Tensor) -> None:
        """Read the committed tokens that the kept cache lacks into it."""
        assert copies.kept is not None
        if copies.kept.begins(committed[0].tolist()):
            last = committed.shape[1] - len(copies.kept.ids) - 1
            self._go_on(copies.kept, committed, torch.tensor([last], device=committed.device))
            self._captured.pop()

    def _go_on(self, read: _Read, text: Tensor, requested: Tensor) -> Tensor:
        """Read the rest of a text `[1, tokens]`; its logits at the places in `requested`, or at all."""
        known, end = len(read.ids), text.shape[1]
        given = {
            "position_ids": torch.arange(known, end, device=text.device)[None],
            "attention_mask": torch.ones_like(text),
            "logits_to_keep": requested,
        }
        output = self._called(text[:, known:], given, use_cache=True, **{self._keyword: read.past})
        read.past, read.ids = getattr(output, self._keyword, None), text[0].tolist()
        if read.past is None:
            raise UnsupportedModelError(f"{type(self._model).__name__} gives no cache back that could be copied")
        logits: Tensor = output.logits[0]
        return logits


def _bytes_of(part: Any) -> int:
    """Bytes of the tensors in a cache and its layers."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, Mapping):
        return sum(map(_bytes_of, part.values()))
    if isinstance(part, list | tuple):
        return sum(map(_bytes_of, part))
    layers: Iterable[Any] = getattr(part, "layers", ())
    return sum(_bytes_of(vars(layer)) for layer in layers)
