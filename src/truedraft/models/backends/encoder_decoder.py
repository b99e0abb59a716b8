"""Encoder-decoders: the encoder reads a request's source once, and the decoder runs like `SequentialBackend`.

The encoder runs when all of a source (`models/sources.py`) is present. The keys and values of cross-attention are
stored in the request's cache at the source's own positions, and those of the decoder's text after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.attention import SegmentPlan
from truedraft.models.backends.sequential import PathCache, SequentialBackend
from truedraft.models.cache import CachePool, RequestCache
from truedraft.models.multimodal import on_device
from truedraft.models.sources import Sources


@dataclass
class Encoded(BaseModelOutput):
    """Replaces an encoder's output; some decoders read its router logits or mask."""

    router_logits: None = None
    attention_mask: None = None


class EncoderDecoderBackend(SequentialBackend):
    """Runs segments one by one, sources first through the encoder; UnsupportedModelError if no layout is defined."""

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        super().__init__(model, reason)
        sources = Sources.of(model, 0)
        self.input_names = frozenset() if sources.sound is None else frozenset({sources.sound.name})
        self._sources = sources
        self._width = int(model.get_encoder().config.get_text_config().hidden_size)
        self._example: Tensor | None = None  # the encoder's output for the example sound
        self._encoded: Tensor | None = None  # of the current segment, until cross-attention has read it
        takes = "reads a prompt" if sources.sound is None else "hears a sound"
        self.note = f"an encoder-decoder: its encoder {takes} once, its decoder one text at a time"

    def new_pool(self, limit: int) -> CachePool:
        return CachePool(limit, encodes=True)

    def _passed(self, part: SegmentPlan, tokens: Tensor) -> int:
        """Number of source tokens among the new ones; runs the encoder at the last of them."""
        family = part.segment.cache.family
        self._encoded = None
        if 0 < family.memory <= part.length + part.segment.written:
            return 0
        family.source = [*family.source[: part.length], *tokens.tolist()]
        length = self._sources.length(family.source)
        if length is None:
            if part.segment.rows:
                raise ModelError(
                    f"the text of an encoder-decoder needs token id {self._sources.start} between what the encoder "
                    "reads and what the decoder writes; begin it as `Sources.text` does"
                )
            return len(tokens)
        if part.segment.rows and part.segment.rows[0] < length - part.length:
            raise ModelError("an encoder's tokens have no logits; request those of the tokens after them")
        self._encoded = self._encode(family.source[:length], part.segment.inputs, tokens.device)
        if self._encoded.shape[1] != length:
            raise ModelError(f"the encoder made {self._encoded.shape[1]} vectors in place of {length} of a source")
        family.memory = length
        return length - part.length

    def _encode(self, source: Sequence[int], inputs: Mapping[str, Tensor] | None, device: torch.device) -> Tensor:
        encoder = self._model.get_encoder()
        if (sound := self._sources.sound) is None:
            ids = torch.tensor([source], device=device)
            return encoder(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        if inputs is None:
            raise ModelError("the model reads audio, and the text began without any; give it with the placeholders")
        given = on_device(inputs, device, self._model.dtype)
        if not given[sound.name].equal(sound.example):
            return encoder(**given)[0]
        # Measurements and checks use the example repeatedly, and an encoder may take seconds.
        self._example = encoder(**given)[0] if self._example is None else self._example
        return self._example

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        cache, encoded = past.cache, self._encoded
        memory = _Memory(cache, 0 if encoded is not None else cache.storage.calls)
        if encoded is None:  # it was read before, and only its shape is used
            encoded = self._head.weight.new_zeros(1, 1, 1).expand(1, cache.family.memory, self._width)
        given: dict[str, Any] = {
            "encoder_outputs": Encoded(last_hidden_state=encoded),
            self._keyword: EncoderDecoderCache(past, memory),
        }
        if self._sources.sound is None:  # the mask of a sound would be over its frames, all of which are visible
            given["attention_mask"] = torch.ones(1, cache.family.memory, dtype=torch.int64, device=ids.device)
        logits = self._model(decoder_input_ids=ids, use_cache=True, **given).logits[0]
        self._encoded = None
        return logits


class _Memory(Cache):
    """The cache of cross-attention, with stored entries of `calls` attention calls; with 0 the forward writes them."""

    def __init__(self, cache: RequestCache, calls: int) -> None:
        super().__init__(layers=[])
        self._cache = cache
        for call in range(calls):
            keys, values = cache.storage.entry(call, cache.family.memory)
            self.layers.append(SimpleNamespace(keys=keys[None], values=values[None]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._cache.family.memory if self.layers else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.storage.entry(layer_idx, self._cache.family.memory)
        if key_states.shape[1:] != keys.shape or value_states.shape[1:] != values.shape:
            raise UnsupportedModelError(
                f"cross-attention keeps keys of the shape {tuple(key_states.shape[1:])} where its layer's "
                f"self-attention keeps {tuple(keys.shape)}; use another model"
            )
        keys.copy_(key_states[0])
        values.copy_(value_states[0])
        return keys[None], values[None]
