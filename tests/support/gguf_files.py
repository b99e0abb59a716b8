"""GGUF files of tiny models: random weights of any type, named and ordered as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFWriter
from numpy.typing import NDArray

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Where the float16 scales of a type's block begin.
_SCALES = dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)) | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
_SCALES |= {"Q6_K": (208,)}
_WIDTH, _INNER, _LAYERS = 256, 512, 2
_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def random_blocks(kind: str, out: int, inputs: int, seed: int, scale: float = 0.01) -> NDArray[np.uint8]:
    """A tensor of a type, `[out, bytes]`: any codes, and scales of about that size, of both signs."""
    rng = np.random.default_rng(seed)
    of_type = GGMLQuantizationType[kind]
    inputs_of_block, size = GGML_QUANT_SIZES[of_type]
    blocks = rng.integers(0, 256, (out, inputs // inputs_of_block, size), dtype=np.uint8)
    inner = {"Q4_K": 30.0, "Q5_K": 30.0, "Q6_K": 60.0}.get(kind, 1.0)
    for at in _SCALES.get(kind, ()):
        drawn = rng.normal(size=blocks.shape[:2]) * scale / inner / (4 if kind == "Q8_0" else 1)
        blocks[..., at : at + 2] = drawn.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(out, -1)


def write(
    path: Path,
    architecture: str,
    kinds: dict[str, str],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    leave_out: str = "",
    more: Callable[[GGUFWriter], None] = lambda writer: None,
    tokenizer: Callable[[GGUFWriter, list[str]], None] | None = None,
    endian: GGUFEndian = GGUFEndian.LITTLE,
    tensors_of_a_part: int = 0,
) -> Path:
    """A file of two layers with a byte tokenizer; the first part of it where it is written in parts.

    `kinds` are types by parts of tensors' names, as {"attn_v": "Q6_K", "": "Q4_K"}; the first that fits. The tensor
    `leave_out` is not written, `more` writes further fields and tensors, and `tokenizer` that of a vocabulary.
    """
    vocab, head = vocabulary(), _head(architecture)
    writer = GGUFWriter(path, architecture, endianess=endian, split_max_tensors=tensors_of_a_part)
    writer.add_context_length(512)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    if architecture != "llama":
        writer.add_key_length(head)
        writer.add_value_length(head)
    else:
        writer.add_rope_dimension_count(head)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    (tokenizer or add_tokenizer)(writer, vocab)
    for number, (name, shape) in enumerate(_tensors(architecture, len(vocab), heads, kv_heads, tied)):
        if name == leave_out:
            continue
        if len(shape) == 1:
            values = np.random.default_rng(number).normal(1.0 if "norm" in name else 0.0, 0.1, shape)
            writer.add_tensor(name, values.astype(np.float32))
            continue
        kind = next(each for part, each in kinds.items() if part in name)
        if kind not in ("F32", "F16", "BF16"):
            data = random_blocks(kind, *shape, seed=number)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
        else:
            values = np.random.default_rng(number).normal(0.0, 0.05, shape).astype(np.float32)
            of_type = GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, of_type), raw_dtype=of_type)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _head(architecture: str) -> int:
    return 128 if architecture == "qwen3" else 64  # transformers does not read it of Qwen 3's files


def _tensors(architecture: str, vocab: int, heads: int, kv_heads: int, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    head = _head(architecture)
    query, key = heads * head, kv_heads * head
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocab, _WIDTH)), ("output_norm.weight", (_WIDTH,)),
        *([] if tied else [("output.weight", (vocab, _WIDTH))]),
    ]  # fmt: skip
    for layer in range(_LAYERS):
        parts: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm.weight", (_WIDTH,)), ("attn_q.weight", (query, _WIDTH)), ("attn_k.weight", (key, _WIDTH)),
            ("attn_v.weight", (key, _WIDTH)), ("attn_output.weight", (_WIDTH, query)), ("ffn_norm.weight", (_WIDTH,)),
            ("ffn_gate.weight", (_INNER, _WIDTH)), ("ffn_up.weight", (_INNER, _WIDTH)),
            ("ffn_down.weight", (_WIDTH, _INNER)),
        ]  # fmt: skip
        if architecture == "qwen2":
            parts += [("attn_q.bias", (query,)), ("attn_k.bias", (key,)), ("attn_v.bias", (key,))]
        if architecture in ("qwen3", "gemma3"):
            parts += [("attn_q_norm.weight", (head,)), ("attn_k_norm.weight", (head,))]
        if architecture == "gemma3":
            parts += [("post_attention_norm.weight", (_WIDTH,)), ("post_ffw_norm.weight", (_WIDTH,))]
        found += [(f"blk.{layer}.{name}", shape) for name, shape in parts]
    return found


def vocabulary() -> list[str]:
    """The bytes as byte-level tokenizers write them, one pair, and what ends and opens turns."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    letters = [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]
    return [*letters, "th", "in", "<|end|>", "<|user|>", "<|assistant|>"]


def add_tokenizer(writer: GGUFWriter, vocab: list[str]) -> None:
    """Of bytes and one pair, with a chat template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocab])
    writer.add_token_merges(["t h", "i n"])
    writer.add_eos_token_id(vocab.index("<|end|>"))
    writer.add_bos_token_id(vocab.index("<|end|>"))
    writer.add_unk_token_id(0)
    writer.add_chat_template(_TEMPLATE)
