"""Small models that see or hear, with random weights, and prompts for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from support.tiny_models import GROUPED
from truedraft.models import MultimodalPrompt
from truedraft.models.embedded import embedded_folder

PLACEHOLDER = 150
TEXT: dict[str, Any] = GROUPED | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 200,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_QWEN_VISION: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2
}  # fmt: skip
_QWEN_NEW_VISION = _QWEN_VISION | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 64
}  # fmt: skip
_WHISPER = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
_MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_GEMMA_TEXT = TEXT | {
    "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}  # fmt: skip


@dataclass(frozen=True)
class Multimodal:
    """One family."""

    kind: str  # the class of the model
    parts: dict[str, Any]  # configurations of its parts, and what else its own is given
    around: tuple[int, ...]  # tokens in the text for one image; PLACEHOLDER stands for all that the image takes
    takes: int  # placeholders
    inputs: Callable[[], dict[str, Tensor]]  # what the model is given beside the tokens

    def model(self, seed: int = 0) -> PreTrainedModel:
        """A model with random weights, larger than those that transformers begins with, so that answers vary."""
        kind = getattr(transformers, self.kind)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made: PreTrainedModel = kind(kind.config_class(**self.parts))
        with torch.no_grad():
            for weight in made.parameters():
                if not weight.any() and weight.dim() > 1:
                    weight.fill_(0.1).diagonal().fill_(-1.0)  # what transformers leaves to be loaded
                elif weight.dim() > 1:
                    weight.mul_(4)
        return made.eval()

    def prompt(self, seed: int) -> MultimodalPrompt:
        """A text with an image in it, as the family's processor would make it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = self.inputs()
            text = torch.randint(3, 140, (9 + seed % 4,)).tolist()
        image = [token for each in self.around for token in [each] * (self.takes if each == PLACEHOLDER else 1)]
        ids = torch.tensor([text[:4] + image + text[4:]])
        taken = inspect.signature(getattr(transformers, self.kind).forward).parameters
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in taken:
                inputs[name] = (ids == PLACEHOLDER).long()
        return MultimodalPrompt.of({"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs})


def _qwen(kind: str, vision: dict[str, Any], **text: Any) -> Multimodal:
    parts = {
        "text_config": TEXT | {"rope_parameters": _MROPE} | text, "vision_config": vision,
        "image_token_id": PLACEHOLDER, "video_token_id": 151, "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    }  # fmt: skip

    def inputs() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(24, 384), "image_grid_thw": torch.tensor([[1, 4, 6]])}

    return Multimodal(kind, parts, (152, PLACEHOLDER, 153), 6, inputs)


def _pixels(*shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(*shape)}


FAMILIES: dict[str, Multimodal] = {
    "llava": Multimodal(
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama"} | TEXT, "image_token_index": PLACEHOLDER, "vision_feature_layer": -1,
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32} | _VISION,
        },
        (PLACEHOLDER,), 4, _pixels(1, 3, 16, 16),
    ),
    "qwen2_vl": _qwen(
        "Qwen2VLForConditionalGeneration", _QWEN_VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    ),
    # Its vision adds to what the first layers of text give, too.
    "qwen3_vl": _qwen(
        "Qwen3VLForConditionalGeneration", _QWEN_NEW_VISION | {"deepstack_visual_indexes": [0, 1]}, head_dim=16
    ),
    # Two of its three layers carry states.
    "qwen3_5": _qwen(
        "Qwen3_5ForConditionalGeneration", _QWEN_NEW_VISION | {"deepstack_visual_indexes": []}, head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    # The tokens of an image see each other, later ones too.
    "gemma3": Multimodal(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": _GEMMA_TEXT, "vision_config": {"vision_use_head": False} | _VISION, "mm_tokens_per_image": 4,
            "image_token_index": PLACEHOLDER, "boi_token_index": 151, "eoi_token_index": 152,
        },
        (151, PLACEHOLDER, 152), 4, _pixels(1, 3, 16, 16),
    ),
    # Caps its scores, and its whole prompt sees itself.
    "paligemma": Multimodal(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma2"} | _GEMMA_TEXT, "image_token_index": PLACEHOLDER,
            "vision_config": {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False}
            | _VISION,
            "projection_dim": 64,
        },
        (PLACEHOLDER,), 4, _pixels(1, 3, 16, 16),
    ),
    "mistral3": Multimodal(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", "head_dim": 16} | TEXT, "image_token_index": PLACEHOLDER,
            "vision_config": {"model_type": "pixtral", "head_dim": 16} | _VISION | {"image_size": 64},
            "vision_feature_layer": -1,
        },
        (PLACEHOLDER,), 6,
        lambda: {"pixel_values": torch.randn(1, 3, 32, 48), "image_sizes": torch.tensor([[32, 48]])},
    ),
    "qwen2_audio": Multimodal(
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2"} | TEXT, "audio_token_index": PLACEHOLDER,
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
            },
        },
        (PLACEHOLDER,), 8,
        lambda: {
            "input_features": torch.randn(1, 8, 32), "feature_attention_mask": torch.ones(1, 32, dtype=torch.int64)
        },
    ),
}  # fmt: skip


def save_with_processor(folder: Path) -> None:
    """A LLaVA of random weights with a processor, as a user's folder holds it; with the embedded tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_folder("target"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"height": 16, "width": 16}
    pictures = transformers.CLIPImageProcessor(size=sizes, crop_size=sizes)
    transformers.LlavaProcessor(
        image_processor=pictures, tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token="<image>",
    ).save_pretrained(folder)  # fmt: skip
    parts = FAMILIES["llava"].parts
    text = parts["text_config"] | {"vocab_size": len(tokenizer)}
    config = transformers.LlavaConfig(**parts | {"text_config": text, "image_token_index": image_id})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


def save_that_hears(folder: Path, width: int) -> None:
    """A Whisper of random weights and one second with its feature extractor, as a user's folder holds it."""
    sizes = {f"{part}_{what}": count for part in ("encoder", "decoder") for what, count in _WHISPER.items()}
    config = transformers.WhisperConfig(
        d_model=width, num_mel_bins=8, max_source_positions=50, max_target_positions=64, pad_token_id=50257, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
