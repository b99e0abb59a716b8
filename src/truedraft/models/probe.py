"""Find out which positions each attention call of a model may see, by asking the model once at load.

Some families build a window or chunk mask but never tell the attention function about it, so the mask itself is
looked at: a forward over two tokens, with a mask function that remembers what it was asked for and an attention
function that records which mask reached it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from truedraft.errors import UnsupportedModelError
from truedraft.models.patterns import AttentionPattern, Chunk, Full, Window

_NAME = "truedraft-probe"
# Patterns wider than this are read as full; contexts beyond it are not supported anyway.
_FAR = 2**18
_HARMLESS = {"position_ids", "use_cache", "sliding_window", "softcap", "s_aux", "is_causal", "dropout", "scaling"}

MaskFunction = Callable[..., Any]


class _Recorder:
    """Stands in for masks and attention during the probing forward."""

    def __init__(self) -> None:
        self.functions: dict[int, MaskFunction] = {}
        self.masks: list[Tensor] = []  # kept alive, so that their ids stay theirs
        self.seen: list[MaskFunction | None] = []

    def make_mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        mask = torch.zeros(1, 1, q_length, kv_length)
        self.masks.append(mask)
        self.functions[id(mask)] = mask_function
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        unknown = {
            name
            for name, given in kwargs.items()
            if given is not None and name not in _HARMLESS and not name.startswith("output_")
        }
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which truedraft cannot "
                "run packed; use another model"
            )
        self.seen.append(self.functions.get(id(attention_mask)))
        heads, count = query.shape[1:3]
        return query.new_zeros(query.shape[0], count, heads, value.shape[-1]), None


def probe_patterns(model: nn.Module) -> list[AttentionPattern]:
    """The pattern of each attention call of a forward, in order of the calls.

    Args:
        model: a Hugging Face causal language model whose attention goes through the attention registry.

    Raises:
        UnsupportedModelError: the model keeps a recurrent state, hides its mask, or uses a pattern that is neither
            full, a window nor chunks.
    """
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a recurrent state, which speculation cannot roll back")
    recorder = _Recorder()
    before = model.config._attn_implementation  # type: ignore[union-attr]
    AttentionInterface.register(_NAME, recorder.attend)
    AttentionMaskInterface.register(_NAME, recorder.make_mask)
    try:
        model.set_attn_implementation(_NAME)  # type: ignore[operator]
        if model.config._attn_implementation != _NAME:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"{name} does not use transformers' attention registry; truedraft cannot run it"
            )
        device = next(model.parameters()).device
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        positions = torch.arange(2, device=device)[None]
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
    if not recorder.seen:
        raise UnsupportedModelError(f"{name} never called its attention function; truedraft cannot run it")
    return [_classify(function, name) for function in recorder.seen]


def _classify(function: MaskFunction | None, name: str) -> AttentionPattern:
    """Tell a pattern by the lowest key that two neighbouring far queries may see."""
    if function is None:
        raise UnsupportedModelError(f"{name} calls attention without a causal mask; truedraft cannot run it")
    if _allows(function, 0, 1):
        raise UnsupportedModelError(f"{name} lets tokens see later ones: it is an encoder, not a causal language model")
    low, next_low = _lowest(function, _FAR), _lowest(function, _FAR + 1)
    if low == next_low == 0:
        return Full()
    if next_low == low + 1:
        return Window(_FAR - low + 1)
    if low == next_low:
        return Chunk(low - _lowest(function, low - 1))
    raise UnsupportedModelError(f"{name} uses an attention pattern that is neither full, a window nor chunks")


def _lowest(function: MaskFunction, query: int) -> int:
    """The lowest key that `query` may see; allowed keys are taken to be contiguous up to the query."""
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        if _allows(function, query, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _allows(function: MaskFunction, query: int, key: int) -> bool:
    index = [torch.tensor(value) for value in (0, 0, query, key)]
    return bool(function(*index))
