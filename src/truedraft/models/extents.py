"""Compares sizes in a config.json with the weights in its folder before anything of these sizes is made."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from truedraft.errors import ModelError, first_line
from truedraft.models.weight_files import weight_files

_COUNTS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "num_experts", "num_local_experts", "n_routed_experts"),
}
_SIZES = {
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "d_model", "d_ff", "n_embd", "n_head", "n_inner", "ffn_dim"),
}
_LEAST_COUNT, _LEAST_SIZE = 4096, 1 << 20  # smaller ones take neither memory nor time
_PER_CODE = 16  # weights in one entry of a quantised tensor, at most


def refuse_vast_sizes(said: Mapping[str, Any], source: str, name: str, revision: str | None) -> None:
    """Refuse a config.json with more layers, experts or entries than the weights can have.

    Args:
        said: its content.
        source: a folder, or a name on the hub.

    Raises:
        ModelError: it does so, or the weights cannot be read.
    """
    found = _sizes_in(said)
    vast = [(word, size) for word, size in found if size > (_LEAST_COUNT if word in _COUNTS else _LEAST_SIZE)]
    if not vast:
        return
    tensors, longest = _extents(source, name, revision)
    for word, size in vast:
        if size > max(tensors, longest * (1 if word in _COUNTS else _PER_CODE)):
            raise ModelError(
                f"config.json of {name!r} says {word} {size}, and its weights are {tensors} tensors of at most "
                f"{longest} entries a side; fetch its files again, or mend config.json"
            )


def _sizes_in(said: Any) -> Iterator[tuple[str, int]]:
    for word, value in said.items() if isinstance(said, dict) else ():
        if isinstance(value, dict):
            yield from _sizes_in(value)
        elif type(value) in (int, float) and word in _COUNTS | _SIZES:
            yield word, value


def _extents(source: str, name: str, revision: str | None) -> tuple[int, int]:
    """The number of tensors, and the longest side of any; for pickles the bytes of the longest entry."""
    tensors = longest = 0
    try:
        for file in weight_files(source, name, revision):
            with safe_open(file, framework="pt") as opened:
                shapes = [opened.get_slice(tensor).get_shape() for tensor in opened.keys()]  # noqa: SIM118 - no dict
            tensors += len(shapes)
            longest = max(longest, *(side for shape in shapes for side in shape), 0)
        for path in () if tensors else Path(source).glob("*.bin"):
            with zipfile.ZipFile(path) as opened:
                entries = opened.infolist()
            tensors += len(entries)
            longest = max(longest, *(entry.file_size for entry in entries), 0)
    except (OSError, SafetensorError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    return tensors, longest
