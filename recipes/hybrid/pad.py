"""The hybrid at the cost of a larger one: `python -m recipes.hybrid.pad`, from the root.

As `truedraft.models.padding` does it for Llama: what writes to the residual stream writes zeros beside the model's
own entries, what reads from it has random weights beside them. So the stream holds what it held, and zeros behind it;
a norm over r times as many entries has weights smaller by sqrt(r). Added layers write nothing. The padded model says
the same up to rounding, and costs what a hybrid of its size costs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3_5ForCausalLM

from recipes.common import ROOT

TIMES, LAYERS = 4, 8  # so many times the heads and widths of the own model, and at least so many layers
_SPREAD = 0.02


def padded(model: PreTrainedModel, times: int, layers: int) -> PreTrainedModel:
    """The model with `times` the width, heads and inner sizes, and `layers` layers, in its dtype."""
    own = model.config
    wider = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    sizes: dict[str, Any] = own.to_dict() | {name: getattr(own, name) * times for name in (*wider, *heads)}
    sizes |= {"num_hidden_layers": layers, "layer_types": None}
    torch.manual_seed(0)
    large = Qwen3_5ForCausalLM(type(own).from_dict(sizes)).to(model.dtype).eval()
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in large.named_parameters():
            if name not in theirs and not name.endswith("weight"):
                continue
            _fill(name, weight, theirs.get(name), own, times)
    return large


def _fill(name: str, weight: Tensor, own: Tensor | None, config: Any, times: int) -> None:
    """One weight, from the own model's; None in an added layer."""
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part.endswith("norm"):
        reads_stream = "q_norm" not in name and "k_norm" not in name and "linear_attn" not in name
        if own is not None and reads_stream:  # weights are added to 1
            weight.fill_(-1.0)
            weight[: len(own)] = ((1.0 + own.float()) / math.sqrt(times) - 1.0).to(own.dtype)
        elif own is not None:
            weight.copy_(own)
        return
    if weight.dim() == 1:  # A_log and dt_bias, of a value head each
        if own is not None:
            weight[: len(own)] = own
        return
    weight.normal_(0.0, _SPREAD)
    if part in ("embed_tokens", "o_proj", "out_proj", "down_proj"):
        weight.zero_()
    if own is None:
        return
    first = 0
    for (place, count), size in zip(_sections(part, config, times), _own_sections(part, config, own), strict=True):
        rows = own[first : first + size]
        weight[place : place + size, : rows.shape[1]] = rows if weight.dim() == 2 else rows[:, :1]
        if part not in ("embed_tokens", "conv1d"):
            weight[place : place + size, rows.shape[1] :] = 0.0 if part in ("o_proj", "out_proj", "down_proj") else 0.1
        first += size
        assert count >= size


def _own_sections(part: str, config: Any, own: Tensor) -> Sequence[int]:
    """Rows that stand one behind another in a weight of queries, keys and values; all rows of any other."""
    if part not in ("in_proj_qkv", "conv1d"):
        return [len(own)]
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]


def _sections(part: str, config: Any, times: int) -> Iterator[tuple[int, int]]:
    """Where these rows begin in the padded weight, and how many there are."""
    if part not in ("in_proj_qkv", "conv1d"):
        yield 0, 1 << 30
        return
    first = 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for size in (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim):
        yield first, size * times
        first += size * times


def main() -> int:
    """Pad the recipe's target and say how far its logits moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "hybrid")
    run: Path = parser.parse_args().run
    small = AutoModelForCausalLM.from_pretrained(run / "target", dtype=torch.float32).eval()
    large = padded(small, TIMES, LAYERS)
    ids = torch.arange(1, 120)[None] * 61 % small.config.vocab_size
    with torch.inference_mode():
        before, after = small(ids).logits, large(ids).logits
    moved = float((before - after).abs().max() / before.std())
    print(f"{sum(weight.numel() for weight in large.parameters()) / 1e6:.1f} M parameters; logits moved by {moved:.1e}")
    out = run / "target-padded"
    large.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(run / "target").save_pretrained(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
