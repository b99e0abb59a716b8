"""How many bytes a forward has to read: the weights once, and the cached keys and values of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truedraft.models.base import LanguageModel

_MIXTURES = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ReadSize:
    """Bytes.

    Attributes:
        weights: read once in each forward of few tokens.
        cached_token: keys and values of one cached token over all layers.
    """

    weights: int
    cached_token: int

    def of(self, forwards: int, context_tokens: int) -> int:
        """Bytes of so many forwards that read so many cached tokens in all."""
        return forwards * self.weights + context_tokens * self.cached_token


def read_size(model: LanguageModel) -> ReadSize | None:
    """What a forward of a model reads; None where it depends on the tokens (mixtures of experts), or is not known.

    Windows of attention are not looked at: with one, the cached tokens that it leaves out are counted too.
    """
    config = getattr(getattr(model, "module", None), "config", None)
    if config is None or not model.weight_bytes:
        return None
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _MIXTURES):
        return None
    return ReadSize(model.weight_bytes, _cached_values(text) * model.dtype.itemsize)


def _cached_values(config: Any) -> int:
    """Numbers cached for a token: a key and a value for each head of each layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width)
