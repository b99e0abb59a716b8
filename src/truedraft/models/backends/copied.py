"""Models whose own cache cannot be taken back, entry by entry: one text at a time, behind copies of that cache.

What is drafted is read behind a copy, which is thrown away where it was rejected and goes on where all of it stays. A
cache that lags behind the committed tokens is as good: what it lacks is read along with the drafted ones. Plain
decoding copies nothing, as `generate` does not.

Where a model keeps nothing at all that could be taken back, the whole text is read again at every step. That is what
`generate` does with a model that has no cache, and it is right for any that writes one token behind another, whatever
its layers keep. A step costs the text so far, and drafted tokens next to nothing beside it.
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
from truedraft.models.backends.alone import AloneBackend, PathCache
from truedraft.models.packing import SegmentPlan

_MOST_BEHIND = 16
"""Committed tokens that may be read again with what is drafted, before they are read once for good."""


@dataclass(slots=True)
class _Read:
    """A cache of the model's own, and what it read.

    Attributes:
        ids: of the text, from its first token.
        past: the cache; None before the first.
    """

    ids: list[int]
    past: Any = None

    def begins(self, text: Sequence[int]) -> bool:
        """Whether a text begins with what was read."""
        return self.ids == text[: len(self.ids)]

    def copied(self) -> _Read:
        """Another that goes its own way."""
        return _Read(list(self.ids), copy.deepcopy(self.past))


@dataclass(slots=True)
class _Copies:
    """Of one request.

    Attributes:
        kept: of committed tokens alone.
        tried: of these and drafted ones.
    """

    kept: _Read | None = None
    tried: _Read | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of both."""
        return sum(_bytes_of(each.past) for each in (self.kept, self.tried) if each is not None)

    def next_read(self, text: list[int], committed: int, first: int, drafts: bool) -> _Read:
        """What a run goes on from, which is then `tried`.

        Args:
            text: all ids up to the run's last.
            committed: how many of them are committed.
            first: where the run begins.
            drafts: whether what it reads may be rejected.
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


class WholeTextBackend(AloneBackend):
    """Runs a model's own forward over the text of each segment, from its first token on.

    The request's cache holds ids where that of another model holds keys.

    Args:
        model: as transformers loaded it.
        reason: why it does not run otherwise, for reports.
    """

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        super().__init__(model, reason)
        self.input_names = frozenset()
        self.rows_vary = True  # a drafted token makes the text longer, and where experts are chosen, other products
        self.note = f"the whole text again at every step, since nothing that it keeps can be taken back: {reason}"

    def _refuse(self) -> None:
        """Any forward will do."""

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
    """Keep new tokens `[1, new]`; all ids `[1, tokens]` up to the last of them."""
    whole, _ = past.update(ids[:, None, :, None], ids.new_zeros(1, 1, ids.shape[1], 0), 0)
    return whole[:, 0, :, 0]


class CopiedBackend(WholeTextBackend):
    """Runs a model's own forward behind copies of the cache that it makes itself.

    Args:
        model: as transformers loaded it.
        reason: why it does not run otherwise, for reports.

    Raises:
        UnsupportedModelError: its forward takes no cache.
    """

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        super().__init__(model, reason)
        self.note = f"one text at a time, behind copies of its own cache, since it cannot run packed: {reason}"

    def _refuse(self) -> None:
        AloneBackend._refuse(self)

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        new, whole = ids.shape[1], text_of(ids, past)
        text, cache = whole[0].tolist(), past.cache
        beside = cache.family.beside
        copies = cache.family.beside = beside if isinstance(beside, _Copies) else _Copies()
        if copies.kept is not None and cache.length - len(copies.kept.ids) > _MOST_BEHIND:
            self._catch_up(copies, whole[:, : cache.length])
        read = copies.next_read(text, cache.length, len(text) - new, cache.uncommitted > 1)
        wanted = places + len(text) - new - len(read.ids)
        logits = self._go_on(read, whole, wanted)
        if len(logits) == len(places):
            return logits
        self._captured[-1] = self._captured[-1][:, -new:]
        return logits[-new:]

    def _catch_up(self, copies: _Copies, committed: Tensor) -> None:
        """Read for good what the kept cache lacks."""
        assert copies.kept is not None
        if copies.kept.begins(committed[0].tolist()):
            last = committed.shape[1] - len(copies.kept.ids) - 1
            self._go_on(copies.kept, committed, torch.tensor([last], device=committed.device))
            self._captured.pop()

    def _go_on(self, read: _Read, text: Tensor, wanted: Tensor) -> Tensor:
        """Read the rest of a text `[1, tokens]`; its logits at the wanted places of that, or at all."""
        known, end = len(read.ids), text.shape[1]
        given = {
            "position_ids": torch.arange(known, end, device=text.device)[None],
            "attention_mask": torch.ones_like(text),
            "logits_to_keep": wanted,
        }
        output = self._called(text[:, known:], given, use_cache=True, **{self._keyword: read.past})
        read.past, read.ids = getattr(output, self._keyword, None), text[0].tolist()
        if read.past is None:
            raise UnsupportedModelError(f"{type(self._model).__name__} gives no cache back that could be copied")
        logits: Tensor = output.logits[0]
        return logits


def _bytes_of(part: Any) -> int:
    """Of the tensors in a cache, its layers and what they hold."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, Mapping):
        return sum(map(_bytes_of, part.values()))
    if isinstance(part, list | tuple):
        return sum(map(_bytes_of, part))
    layers: Iterable[Any] = getattr(part, "layers", ())
    return sum(_bytes_of(vars(layer)) for layer in layers)
