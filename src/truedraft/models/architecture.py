"""Build, save and load stock Llama models for training, with attention twice as fast on a CPU for short sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from truedraft.errors import UnsupportedModelError
from truedraft.machine import pick_dtype
from truedraft.models.loading import quiet_transformers, read_model, resolve_source

if TYPE_CHECKING:
    from pathlib import Path

TRAINING_ATTENTION = "truedraft_training"
_QUERY_CHUNK = 128


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model with tied embeddings."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int = 2048
    head_size: int = 64
    rope_theta: float = 10000.0
    eos_token_id: int = 0


def new_llama(shape: LlamaShape, *, seed: int) -> LlamaForCausalLM:
    """A randomly initialised float32 Llama; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=shape.eos_token_id,
        eos_token_id=shape.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_llama(
    model: PreTrainedModel, folder: Path, *, max_shard_size: str = "15MB", dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config and safetensors shards; tied weights are stored once."""
    copy = type(model)(model.config).to(dtype)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = dtype
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        stale.unlink()
    with quiet_transformers():
        copy.save_pretrained(folder, max_shard_size=max_shard_size)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # safetensors writes files that only their owner can read


def load_causal_lm(
    folder: str | Path, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Any Hugging Face causal language model, by embedded name, folder or hub name; `dtype` may be "auto"
    (`pick_dtype`).

    No remote code is run. Raises ModelNotFoundError: there is no such name; UnsupportedModelError: not a causal
    language model; ModelError: its files cannot be read.
    """
    name = str(folder)
    place = torch.device(device)
    model = read_model(resolve_source(name), name, pick_dtype(dtype, place)).to(place)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name!r} is an encoder-decoder ({model.config.model_type}), and training is for causal models; such a "
            "model drafts as it is, by draft:FOLDER"
        )
    use_training_attention(model)
    return model


def use_training_attention(model: PreTrainedModel) -> None:
    """Switch a CPU Llama to the attention function for training; other models keep their own."""
    if isinstance(model, LlamaForCausalLM) and model.device.type == "cpu":
        AttentionInterface.register(TRAINING_ATTENTION, causal_attention)
        model.set_attn_implementation(TRAINING_ATTENTION)


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [sequences, heads, length, head size]
    key: torch.Tensor,  # [sequences, kv heads, length, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal self-attention `[sequences, length, heads, head size]`, in chunks that skip most masked products."""
    if attention_mask is not None:
        raise ValueError("training attention takes unpadded causal sequences, without a mask")
    sequences, heads, length, size = query.shape
    groups = key.shape[1]
    shared = heads // groups
    query = (query * scaling).view(sequences, groups, shared, length, size)
    key = key.reshape(sequences * groups, length, size)
    value = value.reshape(sequences * groups, length, size)
    chunks = []
    for start in range(0, length, _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, length)
        rows = query[:, :, :, start:stop].reshape(sequences * groups, -1, size)
        scores = torch.bmm(rows, key[:, :stop].transpose(1, 2)).float()  # [., shared * rows, stop]
        future = scores.new_full((stop - start, stop), float("-inf")).triu(start + 1)
        scores = scores.view(-1, shared, stop - start, stop) + future
        weights = torch.softmax(scores, dim=-1).to(value.dtype).view(scores.shape[0], -1, stop)
        mixed = torch.bmm(weights, value[:, :stop])
        chunks.append(mixed.view(sequences, groups, shared, stop - start, size))
    output = torch.cat(chunks, dim=3).reshape(sequences, heads, length, size)
    return output.transpose(1, 2), None
