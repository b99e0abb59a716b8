"""The model's own forward, attention and masks included, one sequence at a time: for families that cannot run packed.

Any model that `generate` runs with transformers' cache runs here in the same way. A tree is read in runs, each of them
a chain. A chain costs one forward, and a tree one per leaf; every token is computed once.

Where a cache cannot be rolled back entry by entry, drafted tokens are read on a copy of it, which is dropped after a
rejection and becomes the cache if all of them are accepted. Committed tokens that it lacks are read together with the
drafted ones. Plain decoding copies nothing. A model without any such cache reads the whole text again at every step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from truedraft.core.tree import TreeShape
from truedraft.errors import UnsupportedModelError
from truedraft.models.attention import ForwardPlan, SegmentPlan
from truedraft.models.backends.base import ModuleBackend
from truedraft.models.cache import Buffers, CachePool, RequestCache
from truedraft.models.lm_head import lm_head_dtype, lm_head_width
from truedraft.models.multimodal import noting_shift, on_device
from truedraft.models.recurrence import cache_keyword

_MOST_REREAD = 16
"""Most committed tokens that are read again with drafted ones, before they are read into the kept cache."""


class SequentialBackend(ModuleBackend):
    """Runs segments one by one through a model's own forward, for a `reason`; UnsupportedModelError without cache."""

    least_rows = 1
    _way = "one text at a time, since it cannot run packed"
    _needs_cache = True

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        self._takes = set(inspect.signature(type(model).forward).parameters)
        self._keyword = cache_keyword(model) or ""
        if self._needs_cache and not self._keyword:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes no cache of keys and values, so each token would cost the whole text "
                "again"
            )
        super().__init__(model)
        self._watched: Sequence[int] = ()  # layers
        self._outputs: dict[int, Tensor] = {}  # of these layers in the last forward
        self.note = f"{self._way}: {reason}"

    def new_pool(self, limit: int) -> CachePool:
        return CachePool(limit, drops=False)

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        self._watched, self._outputs = layers, {}
        cache, has_inputs = plan.segments[0].segment.cache, plan.segments[0].segment.inputs is not None
        rows: list[tuple[Tensor, ...]] = []
        with (
            noting_shift(self._model, cache) if has_inputs else nullcontext(),
            self._watching(layers, self._outputs.__setitem__),
        ):
            for part in plan.segments:
                tokens = plan.tokens[0, part.start : part.start + part.count]
                found: dict[int, tuple[Tensor, ...]] = {}
                for run in runs_of(part.segment.shape, part.segment.written + self._passed(part, tokens)):
                    found |= self._read(part, run, tokens)
                rows += [found[row] for row in part.segment.rows]
        if has_inputs:
            cache.family.unshareable = not cache.family.encodes  # the masks of the decoder are unknown
        if rows:
            return tuple(map(torch.stack, zip(*rows, strict=True)))
        width, dtype = lm_head_width(self._head), lm_head_dtype(self._head)
        none = torch.zeros(0, width, dtype=dtype, device=plan.tokens.device)
        shown = none.new_zeros(0, self._model.config.get_text_config().hidden_size)
        return self.unembed(none), none, *([shown] * len(layers))

    def _read(self, part: SegmentPlan, run: Sequence[int], tokens: Tensor) -> dict[int, tuple[Tensor, ...]]:
        """Read a run; for its tokens in the segment's rows: logits, the LM head's input, outputs of watched layers."""
        segment = part.segment
        own = [node - segment.written for node in run]
        requested = set(segment.rows)
        places = [place for place, node in enumerate(own) if node in requested] or [len(own) - 1]
        past = PathCache(segment.cache, segment.shape.path(run[-1]), len(run))
        contiguous = own[-1] - own[0] == len(own) - 1
        ids = tokens[own[0] : own[-1] + 1] if contiguous else tokens[own]
        self._captured.clear()
        logits = self._logits(ids[None], past, torch.tensor(places, device=tokens.device), segment.inputs)
        if not past.calls:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not keep what it read in transformers' cache of keys and values; "
                "use another model"
            )
        hidden = self._captured.pop()[0]
        pick = slice(None) if len(logits) == len(places) else places
        kept = hidden if len(hidden) == len(places) else hidden[places]
        shown = [self._outputs[layer][0, -len(own) :][places] for layer in self._watched]
        return {own[place]: tuple(each) for place, *each in zip(places, logits[pick], kept, *shown, strict=True)}

    def _passed(self, part: SegmentPlan, tokens: Tensor) -> int:
        return 0

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Run on new ids `[1, new]`; logits `[rows, vocab]` at `places`, or all. With `inputs` it counts positions."""
        end = past.end
        given: dict[str, Any] = {
            "position_ids": torch.arange(end - ids.shape[1], end, device=ids.device)[None] + past.cache.family.shift,
            "attention_mask": torch.ones(1, end, dtype=torch.int64, device=ids.device),
            "logits_to_keep": places,
        }
        if inputs is not None:
            del given["position_ids"]
            given |= on_device(inputs, ids.device, self._model.dtype)
        return self._called(ids, given, use_cache=True, **{self._keyword: past}).logits[0]

    def _called(self, ids: Tensor, given: Mapping[str, Any], **always: Any) -> Any:
        taken = {name: value for name, value in given.items() if name in self._takes}
        return self._model(input_ids=ids, **taken, **always)


def runs_of(shape: TreeShape, written: int) -> list[list[int]]:
    """The nodes from `written` on, in chains that can be read in sequence.

    Worked example: the runs of the tree (-1, 0, 0, 2, 1, 3) are [0, 1, 4] and [2, 3, 5].
    """
    runs: list[list[int]] = []
    ends: dict[int, list[int]] = {}
    for node in range(written, len(shape)):
        run = ends.pop(shape.parents[node], None)
        if run is None:
            run = []
            runs.append(run)
        run.append(node)
        ends[node] = run
    return runs


class PathCache(Cache):
    """A transformers cache over a request's committed tokens and a path of uncommitted ones, the last `new` new."""

    def __init__(self, cache: RequestCache, path: Sequence[int], new: int) -> None:
        super().__init__(layers=[])
        assert isinstance(cache.storage, Buffers)
        self.cache = cache
        self._buffers = cache.storage
        self._path = path
        self._new = new
        self._updated: set[int] = set()
        self.calls = 0

    @property
    def end(self) -> int:
        return self.cache.length + len(self._path) - self.cache.family.memory

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.dim() != 4 or key_states.shape[0] != 1 or key_states.shape[2] != self._new:
            raise UnsupportedModelError(
                f"a layer keeps keys of the shape {tuple(key_states.shape)} for {self._new} tokens, and truedraft "
                "supports one text, by head and token; use another model"
            )
        keys, values = self._buffers.write_path(
            self.calls, self.cache.length, self._path, key_states[0], value_states[0]
        )
        self._updated.add(layer_idx)
        self.calls += 1
        return keys[None, :, self.cache.family.memory :], values[None, :, self.cache.family.memory :]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store keys `[1, new, width]` with which sparse attention selects positions; they have no values."""
        keys, _ = self._buffers.write_path(
            self.calls, self.cache.length, self._path, indexer_key_states, indexer_key_states.new_zeros(1, self._new, 0)
        )
        self.calls += 1
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end if layer_idx in self._updated else self.end - self._new

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


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
        """The cache for the run from index `first` to the end of `text`; `drafts` says whether it may be rejected."""
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
    """Runs a model's own forward on copies of a cache that it makes; UnsupportedModelError if it takes none."""

    _way = "one text at a time, behind copies of its own cache, since it cannot run packed"
    _needs_cache = True

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        new, whole = ids.shape[1], text_of(ids, past)
        text, cache = whole[0].tolist(), past.cache
        copies: _Copies = cache.family.auxiliary or _Copies()
        cache.family.auxiliary = copies
        if copies.kept is not None and cache.length - len(copies.kept.ids) > _MOST_REREAD:
            self._catch_up(copies, whole[:, : cache.length])
        read = copies.next_read(text, cache.length, len(text) - new, cache.uncommitted > 1)
        requested = places + len(text) - new - len(read.ids)
        logits = self._read_rest(read, whole, requested)
        if len(logits) == len(places):
            return logits
        self._captured[-1] = self._captured[-1][:, -new:]
        return logits[-new:]

    def _catch_up(self, copies: _Copies, committed: Tensor) -> None:
        assert copies.kept is not None
        if copies.kept.begins(committed[0].tolist()):
            last = committed.shape[1] - len(copies.kept.ids) - 1
            self._read_rest(copies.kept, committed, torch.tensor([last], device=committed.device))
            self._captured.pop()

    def _read_rest(self, read: _Read, text: Tensor, requested: Tensor) -> Tensor:
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
        return output.logits[0]


def _bytes_of(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, Mapping):
        return sum(map(_bytes_of, part.values()))
    if isinstance(part, list | tuple):
        return sum(map(_bytes_of, part))
    layers: Iterable[Any] = getattr(part, "layers", ())
    return sum(_bytes_of(vars(layer)) for layer in layers)
