"""Write a small Llama draft as a GGUF file, for us and for other engines, with the tokenizer of its target's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(draft: LlamaForCausalLM, target: Path, out: Path, kind: GGMLQuantizationType) -> None:
    """Quantise the matrices of a draft and write them.

    Args:
        draft: with tied embeddings.
        target: the GGUF file whose tokenizer the draft has.
        out: the file to write.
        kind: of the matrices; norms stay float32.
    """
    config = draft.config
    writer = GGUFWriter(out, "llama")
    writer.add_name("Draft model for SmolLM2-135M-Instruct")
    writer.add_file_type({"Q8_0": LlamaFileType.MOSTLY_Q8_0, "Q4_0": LlamaFileType.MOSTLY_Q4_0}[kind.name])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _copy_tokenizer(GGUFReader(target), writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in draft.model.state_dict().items():
        stored = _stored_name(name)
        values = weight.detach().float().numpy()
        part = stored.split(".")[2] if stored.startswith("blk.") else ""
        if part in heads:
            values = _interleaved(values, heads[part])
        if values.ndim == 2:
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_name(name: str) -> str:
    if not name.startswith("layers."):
        return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
    _, number, part = name.removesuffix(".weight").split(".", 2)
    return f"blk.{number}.{_NAMES[part]}.weight"


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of queries or keys as GGUF has them: the halves that are rotated together are neighbours.

    With one head of 4 rows, (a, b, c, d) becomes (a, c, b, d).
    """
    rows, width = values.shape
    return np.ascontiguousarray(values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width))


def _copy_tokenizer(source: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner: Any = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)


def read_draft(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model
