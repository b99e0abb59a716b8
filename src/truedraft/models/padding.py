"""The same function at the cost of a larger model.

Linear layers that write to the residual stream (embedding, attention output, MLP output) are zero except for the
model's own entries, so the stream holds the model's values, followed by zeros. Those that read it (queries, keys,
values, gate, up) have random weights in addition: their results cost as much as real ones, and are multiplied by zeros.

RMSNorm divides by the root of the mean of w squares; over W = r w entries of which the rest are 0, the mean is r times
smaller. With its epsilon divided by r and its weights by sqrt(r), the result is the same. If r is a power of 4 so are
its bits, because everything is multiplied by powers of two only.

Sums must add the same numbers in the same order, or results differ by rounding. So entries keep their order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from truedraft.errors import OptionError, UnknownOptionError, UnsupportedModelError

_RECORD = "truedraft_padding"
_NAME = " padded to "

# The axes of a linear layer's weight: rows and columns.
_AXES = {
    "embed_tokens": ("vocabulary", "stream"),
    "q_proj": ("query", "stream"),
    "k_proj": ("key", "stream"),
    "v_proj": ("key", "stream"),
    "o_proj": ("stream", "query"),
    "gate_proj": ("inner", "stream"),
    "up_proj": ("inner", "stream"),
    "down_proj": ("stream", "inner"),
    "lm_head": ("vocabulary", "stream"),
}
_NORM_AXES = ("stream",)
_WRITES_TO_THE_STREAM = ("embed_tokens", "o_proj", "down_proj")

# Measured for oneDNN on CPUs with AVX-512 BF16: a bfloat16 product over up to 1,024 inputs sums blocks of 512 and then
# the blocks; over more inputs (and more than one row) blocks of 1,024.
_BLOCK = 512
_LONG_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """A size to pad to; `inner` is the width of MLPs, `width` that of the residual stream and of attention."""

    name: str
    layers: int
    width: int
    inner: int


# With the embedded target's vocabulary and heads 110,119,680, 500,221,440 and 7,097,112,576 parameters. A 7B is mostly
# 4,096 wide with 32 layers; 6,144 is 16 times the embedded target's width, which keeps its bits.
PADDED_SIZES = {
    size.name: size
    for size in (
        PaddedSize("110M", layers=12, width=768, inner=3072),
        PaddedSize("500M", layers=16, width=1536, inner=5248),
        PaddedSize("7B", layers=28, width=6144, inner=8192),
    )
}


def padded_size(name: str) -> PaddedSize:
    """The size of a name; raises UnknownOptionError if there is none."""
    if name not in PADDED_SIZES:
        raise UnknownOptionError.nearest("padding size", name, PADDED_SIZES)
    return PADDED_SIZES[name]


def pad_model(
    model: PreTrainedModel, size: str | PaddedSize, *, seed: int = 0, on_layer: Callable[[int, int], None] | None = None
) -> LlamaForCausalLM:
    """The same function at the cost of a larger model; the model itself is not changed.

    Its logits are the model's bit for bit if the width becomes 4, 16, ... times as large and sums are made in the same
    order, within rounding otherwise. On CPUs with AVX-512 BF16 that holds in bfloat16 for the embedded target at 500M
    and at the width of 7B, in float32 on an AMD one; an Intel one sums float32 products in an order that depends on the
    width.

    Args:
        size: "110M", "500M", "7B", or a custom size.
        seed: of the added weights.
        on_layer: called after each layer with the number of finished layers and of all.

    Raises UnknownOptionError: no such size; OptionError: one smaller than the model, or that its heads do not fit;
    UnsupportedModelError: not a Llama, or a quantized one.
    """
    config = padded_config(model, size)
    assert isinstance(model, LlamaForCausalLM)  # padded_config refuses others
    with torch.device("meta"):  # takes no memory; the weights are made one by one below
        padded = LlamaForCausalLM(config)
    padded.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # heads keep their size
    padding = _Padding(model, config, seed)
    padding.fill("model.embed_tokens", padded.model.embed_tokens)
    for number, layer in enumerate(padded.model.layers):
        for name, module in layer.named_modules(prefix=f"model.layers.{number}"):
            padding.fill(name, module)
        if on_layer is not None:
            on_layer(number + 1, config.num_hidden_layers)
    padding.fill("model.norm", padded.model.norm)
    if config.tie_word_embeddings:
        padded.lm_head.weight = padded.model.embed_tokens.weight
    else:
        padding.fill("lm_head", padded.lm_head)
    padded.generation_config = copy.deepcopy(model.generation_config)
    return padded.eval().requires_grad_(False)


def padded_config(model: PreTrainedModel, size: str | PaddedSize) -> LlamaConfig:
    """The configuration of the padded model, which also records the original one; raises what `pad_model` does."""
    size = padded_size(size) if isinstance(size, str) else size
    if not isinstance(model, LlamaForCausalLM):
        raise UnsupportedModelError(
            f"a {type(model).__name__} cannot be padded, only models of the Llama architecture (LlamaForCausalLM) can"
        )
    own = model.config
    if getattr(own, "quantization_config", None) is not None:
        raise UnsupportedModelError("a quantized model cannot be padded; load its unquantized weights")
    group = own.num_attention_heads // own.num_key_value_heads
    heads = choose_heads(own.num_attention_heads, own.num_key_value_heads, own.head_dim, size.width)
    # If they do not fit, the message counts a model with such groups of heads.
    query_heads, key_heads = heads or choose_heads(group, 1, own.head_dim, size.width) or (1, 1)
    sizes = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_attention_heads": query_heads,
        "num_key_value_heads": key_heads,
        "head_dim": own.head_dim,
        "rms_norm_eps": own.rms_norm_eps * own.hidden_size / size.width,
    }
    config = LlamaConfig.from_dict({**own.to_dict(), **sizes})
    parameters = sum(weight.numel() for weight in model.parameters())
    before = (parameters, own.num_hidden_layers, own.hidden_size, own.intermediate_size)
    after = (count_parameters(config), size.layers, size.width, size.inner)
    if any(old > new for old, new in zip(before, after, strict=True)):
        shape = "{:,} parameters ({} layers, width {:,}, inner width {:,})".format
        raise OptionError(
            f"cannot pad to the smaller size {size.name}: the model has {shape(*before)}, {size.name} has "
            f"{shape(*after)}; choose a larger size, or do not pad"
        )
    if heads is None:
        raise OptionError(
            f"cannot pad to {size.name}: {own.num_attention_heads} heads of {own.head_dim} entries do not fit its "
            f"width of {size.width:,}; choose another size"
        )
    first = {"parameters": parameters, "width": own.hidden_size, "layers": own.num_hidden_layers}
    setattr(config, _RECORD, {**(padding_of(model) or first), "size": size.name})
    return config


def count_parameters(config: LlamaConfig) -> int:
    """Number of parameters of this configuration, a tied LM head counted once; takes no memory."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())


def padding_note(parameters: int, size: str) -> str:
    """What measurements of a padded model mean, for every line of a report; `parameters` are the original's.

    >>> padding_note(15_735_168, "500M")
    'cost of a 500 M model, text of a 16 M model (a real 500 M would be harder to guess)'
    """
    large = f"{size[:-1]} {size[-1]}"
    millions = parameters / 1e6
    small = f"{millions:.0f} M" if millions >= 10 else f"{millions:.2g} M"
    return f"cost of a {large} model, text of a {small} model (a real {large} would be harder to guess)"


def padding_of(model: PreTrainedModel) -> dict[str, Any]:
    """What the configuration of a padded model records, also when it was saved and loaded again; empty for others.

    Keys: the original's `parameters`, `layers` and `width`, the `size`, and after an export the original's
    `fingerprint`.
    """
    return getattr(model.config, _RECORD, None) or {}


def padding_note_of(model: PreTrainedModel) -> str | None:
    """The `padding_note` of a model; None if it is not padded."""
    record = padding_of(model)
    return padding_note(record["parameters"], record["size"]) if record else None


def record_fingerprint(padded: PreTrainedModel, fingerprint: str) -> None:
    """Record the original's fingerprint in a padded model's configuration, which is saved with it."""
    setattr(padded.config, _RECORD, {**padding_of(padded), "fingerprint": fingerprint})


def padded_name(name: str, size: str) -> str:
    """The name of a padded model, in reports."""
    return f"{name}{_NAME}{size}"


def unpadded_name(name: str) -> str:
    """The name of a padded model's original; the name itself if it is not padded."""
    return name.partition(_NAME)[0]


class _Padding:
    def __init__(self, model: LlamaForCausalLM, config: LlamaConfig, seed: int) -> None:
        own = model.config
        head = torch.arange(own.head_dim)
        heads = head_places(
            own.num_attention_heads, own.num_key_value_heads, config.num_attention_heads, config.num_key_value_heads
        )
        places = {
            "vocabulary": torch.arange(own.vocab_size),
            "stream": torch.arange(own.hidden_size),
            "query": (torch.tensor(heads)[:, None] * own.head_dim + head).flatten(),
            "key": torch.arange(own.num_key_value_heads * own.head_dim),
            "inner": inner_places(own.intermediate_size, config.intermediate_size, model.dtype),
        }
        self._places = {axis: place.to(model.device) for axis, place in places.items()}
        self._modules: Mapping[str, nn.Module] = dict(model.named_modules())
        self._norm_scale = math.sqrt(own.hidden_size / config.hidden_size)
        # Inputs are of about 1 (RMSNorm), so outputs are, too: no product is faster than with a real model's numbers.
        self._spread = own.hidden_size**-0.5
        self._new: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self._generator = torch.Generator(device=model.device).manual_seed(seed)

    def fill(self, name: str, module: nn.Module) -> None:
        own = self._modules.get(name)
        kind = name.rpartition(".")[2]
        for part, weight in list(module.named_parameters(recurse=False)):
            source = None if own is None else own.get_parameter(part).detach()
            value = torch.zeros(weight.shape, **self._new)
            if kind not in _AXES:  # a norm: the model's weights, or 1 in an added layer
                value.fill_(self._norm_scale)
                source = None if source is None else (source.double() * self._norm_scale).to(source.dtype)
            elif part == "weight" and kind not in _WRITES_TO_THE_STREAM:
                value.normal_(std=self._spread, generator=self._generator)
            if source is not None:
                rows, *columns = (self._places[axis] for axis in _AXES.get(kind, _NORM_AXES)[: value.dim()])
                value[(rows[:, None], *columns) if columns else rows] = source
            setattr(module, part, nn.Parameter(value, requires_grad=False))


def choose_heads(heads: int, kv_heads: int, head_size: int, width: int) -> tuple[int, int] | None:
    """Query heads and key/value heads of a padded layer; None if these heads do not fit its width.

    As wide as the layer, or the next smaller width that its heads divide, with at least as many query heads for each
    key/value head as before: 6 and 2 heads of 64 become 24 and 8 in 1,536; groups of 5 become groups of 6 in 768.
    """
    group = heads // kv_heads
    for padded in range(width // head_size, heads - 1, -1):
        if width % padded:
            continue
        for padded_kv in range(padded // group, kv_heads - 1, -1):
            if padded % padded_kv == 0:
                return padded, padded_kv
    return None


def head_places(heads: int, kv_heads: int, padded_heads: int, padded_kv_heads: int) -> list[int]:
    """The index of each of the model's query heads in the padded layer; key/value heads keep their index.

    Query head i reads key/value head i // group. With 4 query and 2 key/value heads the groups are (0, 1) and (2, 3);
    padded to 9 and 3 they are (0, 1, 2), (3, 4, 5) and (6, 7, 8). So heads 0 and 1 stay, heads 2 and 3 become 3 and 4.
    """
    group, padded_group = heads // kv_heads, padded_heads // padded_kv_heads
    return [head // group * padded_group + head % group for head in range(heads)]


def inner_places(inner: int, padded: int, dtype: torch.dtype) -> Tensor:
    """The new indices of an MLP's inner entries: `[inner]`, int64, ascending.

    They are the first ones. Only in bfloat16, where sums over 513 to 1,024 entries are made of two halves and longer
    sums are not, the second half moves to the next long block, so that the two are still summed separately.
    """
    places = torch.arange(inner)
    split = _BLOCK < inner <= _LONG_BLOCK and padded >= _LONG_BLOCK + inner - _BLOCK
    return places + places // _BLOCK * _BLOCK if split and dtype == torch.bfloat16 else places
