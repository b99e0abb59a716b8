"""Prompts with images or sound beside their text, as a model's processor makes them.

The processor puts as many placeholder tokens into the text as its images take, and gives the pixels beside. The target
reads all of that once, by its own forward; from there on an answer is text like any other, and drafters see tokens
only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.errors import PromptError

# Parts of a configuration, and what they let a model read beside text.
_SENSES = {"vision_config": "images", "audio_config": "sound", "encoder_config": "sound"}
_TEXT_KEYWORDS = {
    "self", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "logits_to_keep", "cache_position", "kwargs", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "rope_deltas",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalPrompt:
    """One prompt as a processor made it.

    Attributes:
        token_ids: of its text, with the placeholders of images or sound that the processor put there.
        inputs: what else the model's forward is given for it, by the names of its keywords: `pixel_values` and what
            belongs to them. Tensors of any shape and device; numbers with a fraction go to the model's dtype.

    Raises:
        PromptError: there is nothing beside the tokens, or it is no tensor.
    """

    token_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2:
            raise PromptError("a MultimodalPrompt has at least a placeholder and a token of text behind it")
        if not self.inputs:
            raise PromptError("a MultimodalPrompt has nothing beside its tokens; give the tokens alone as the prompt")
        for name, value in self.inputs.items():
            if not isinstance(value, Tensor):
                raise PromptError(
                    f"{name!r} of a MultimodalPrompt is a {type(value).__name__}; call the processor with "
                    'return_tensors="pt"'
                )

    @classmethod
    def of(cls, encoded: Mapping[str, Any]) -> MultimodalPrompt:
        """Of what a processor returned for one text, called with `return_tensors="pt"`.

        Raises:
            PromptError: it holds no `input_ids`, those of several texts, or padding.
        """
        rest = dict(encoded)
        ids, mask = rest.pop("input_ids", None), rest.pop("attention_mask", None)
        if not isinstance(ids, Tensor):
            raise PromptError('the processor returned no tensor of input_ids; call it with return_tensors="pt"')
        if ids.dim() == 2 and len(ids) > 1:
            raise PromptError(f"the processor returned {len(ids)} texts; make a MultimodalPrompt of each")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise PromptError("the processor padded the text; call it without padding")
        return cls(tuple(ids.flatten().tolist()), rest)


def senses_of(model: PreTrainedModel) -> list[str]:
    """What a model reads beside text, in words."""
    return [what for part, what in _SENSES.items() if getattr(model.config, part, None) is not None]


def input_names_of(model: PreTrainedModel) -> frozenset[str]:
    """Keywords of a model's forward that hold what a prompt has beside its tokens; none for one that reads text."""
    if not senses_of(model):
        return frozenset()
    return frozenset(inspect.signature(type(model).forward).parameters) - _TEXT_KEYWORDS


def rope_delta_of(model: PreTrainedModel) -> int:
    """How far the positions of what follows lie from the number of tokens before, after a model read a prompt.

    Images take fewer positions than tokens where rotary positions have more than one axis (Qwen2-VL, 2409.12191,
    section 2.1); transformers' models leave the difference in `rope_deltas`.
    """
    for module in model.modules():
        found = getattr(module, "rope_deltas", None)
        if isinstance(found, Tensor):
            return int(found.flatten()[0])
    return 0


def forget_rope_delta(model: PreTrainedModel) -> None:
    """Nothing of the prompt before shall be taken for the next one's."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def on_device(inputs: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs where the model reads them; numbers with a fraction in its dtype."""
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }
