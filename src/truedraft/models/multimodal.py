"""Prompts with images or audio in addition to text, as a model's processor makes them.

The processor puts one placeholder token into the text for each position of an image, and returns the pixels separately.
For an encoder of audio, a prompt is the audio followed by the decoder's first tokens. Drafters see tokens only.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from truedraft.errors import PromptError
from truedraft.models.cache import RequestCache

if TYPE_CHECKING:
    # Imported lazily: it takes seconds.
    from transformers import PreTrainedModel

# Parts of a configuration, and the inputs that they stand for.
_SENSES = {"vision_config": "images", "audio_config": "sound", "encoder_config": "sound"}
_PLACED = ("image", "video", "audio", "vision")
_IDS = ("_token_id", "_token_index")
_TEXT_KEYWORDS = {
    "self", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels",
    "use_cache", "logits_to_keep", "cache_position", "kwargs", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "rope_deltas",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalPrompt:
    """One prompt as a processor made it.

    Attributes:
        token_ids: with the processor's placeholders of images or audio. For an encoder-decoder of audio, the decoder's
            first tokens; empty for its default ones.
        inputs: other arguments of the model's forward, by keyword, such as `pixel_values`; on any device.
        digest: a hash of all of that, computed when the prompt is made, so do not change its tensors.

    Raises:
        PromptError: there are no other inputs, or one is no tensor.
    """

    token_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise PromptError("a MultimodalPrompt has tokens only; give these as the prompt")
        for name, value in self.inputs.items():
            if not isinstance(value, Tensor):
                raise PromptError(
                    f"{name!r} of a MultimodalPrompt is a {type(value).__name__}; call the processor with "
                    'return_tensors="pt"'
                )
        found = hashlib.sha256(repr([int(token) for token in self.token_ids]).encode())
        for name, value in sorted(self.inputs.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", found.digest())

    @classmethod
    def of(cls, encoded: Mapping[str, Any]) -> MultimodalPrompt:
        """From a processor's output with `return_tensors="pt"`; PromptError if not of one text without padding."""
        rest = dict(encoded)
        ids, mask = rest.pop("input_ids", None), rest.pop("attention_mask", None)
        if not isinstance(ids, Tensor):
            raise PromptError('the processor returned no tensor of input_ids; call it with return_tensors="pt"')
        if ids.dim() == 2 and len(ids) > 1:
            raise PromptError(f"the processor returned {len(ids)} texts; make a MultimodalPrompt of each")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise PromptError("the processor padded the text; call it without padding")
        if ids.numel() < 2:
            raise PromptError("a MultimodalPrompt has at least a placeholder, followed by a token of text")
        return cls(tuple(ids.flatten().tolist()), rest)

    @classmethod
    def heard(cls, encoded: Mapping[str, Any], begun: Sequence[int] = ()) -> MultimodalPrompt:
        """From the output of an encoder-decoder's feature extractor for one audio clip, such as Whisper's.

        Args:
            encoded: returned with `return_tensors="pt"`.
            begun: the decoder's first tokens, such as a language and a task; empty for its default ones.

        Raises:
            PromptError: it holds no audio, or padding.
        """
        rest = dict(encoded)
        mask = rest.pop("attention_mask", None)
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise PromptError("the feature extractor padded the sound and marked where; call it without attention_mask")
        return cls(tuple(begun), rest)


def senses_of(model: PreTrainedModel) -> list[str]:
    """The model's inputs other than text, in words."""
    return [what for part, what in _SENSES.items() if getattr(model.config, part, None) is not None]


def input_names_of(model: PreTrainedModel) -> frozenset[str]:
    """Keywords of a model's forward for inputs other than text; empty for a text-only model."""
    if not senses_of(model):
        return frozenset()
    return frozenset(inspect.signature(type(model).forward).parameters) - _TEXT_KEYWORDS


def placeholders_of(model: PreTrainedModel) -> frozenset[int]:
    """Ids that other inputs replace, or that frame these."""
    return frozenset(
        value
        for name, value in model.config.to_dict().items()
        if name.startswith(_PLACED) and name.endswith(_IDS) and isinstance(value, int)
    )


@contextmanager
def noting_shift(model: PreTrainedModel, cache: RequestCache) -> Iterator[None]:
    """Store the shift of positions after a prompt that a model reads, and numbers itself, within this context.

    Images take fewer positions than tokens where rotary positions have more than one axis (Qwen2-VL, 2409.12191,
    section 2.1): `rope_deltas` in transformers. Others begin at 1 (PaliGemma).
    """
    for module in model.modules():  # so that no value of an earlier prompt is taken
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
    shift = 0

    def look(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        nonlocal shift
        places = given.get("position_ids")
        if isinstance(places, Tensor):
            shift = int(places.flatten()[-1]) + 1 - places.shape[-1]

    handle = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    deltas = (getattr(module, "rope_deltas", None) for module in model.modules())
    found = next((each for each in deltas if isinstance(each, Tensor)), None)
    cache.family.shift = shift if found is None else int(found.flatten()[0])


def on_device(inputs: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs on the model's device; floating-point ones in its dtype."""
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }
