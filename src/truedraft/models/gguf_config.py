"""The model configuration of a GGUF file: each key is applied, or changes nothing, or the file is refused for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from truedraft.errors import ModelError, UnsupportedModelError, first_line

_ARCHITECTURES = (
    "llama qwen2 qwen3 gemma2 gemma3 phi3 falcon stablelm starcoder2 qwen2moe qwen3moe bloom gpt2 lfm2 mamba nemotron"
)
_RENAMED = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
FAMILIES: Final = {name: _RENAMED.get(name, name) for name in _ARCHITECTURES.split()}
"""Transformers' names of llama.cpp's architectures."""
_PARTLY = ("phi3", "stablelm", "nemotron")  # families that may rotate a part of a head
_LAYERS = 512  # llama.cpp's limit
_LARGEST = 1 << 31  # largest value of any number
_EITHER = object()  # any value


@dataclass(frozen=True, slots=True)
class _Key:
    """A key's type, the fields it may set (the first that exists), and values that change nothing without any."""

    kind: type
    fields: tuple[str, ...] = ()
    idle: tuple[Any, ...] = ()


_WIDTHS = {  # sizes that tensors have, too, so none is greater than their longest axis
    "vocab_size": _Key(int, ("vocab_size",)),
    "embedding_length": _Key(int, ("hidden_size",)),
    "block_count": _Key(int, ("num_hidden_layers",)),
    "feed_forward_length": _Key(int, ("intermediate_size", "ffn_hidden_size", "n_inner"), (_EITHER,)),  # BLOOM, Mamba
    "attention.head_count": _Key(int, ("num_attention_heads",), (0,)),
    "attention.head_count_kv": _Key(int, ("num_key_value_heads", "num_kv_heads")),
    "attention.key_length": _Key(int, ("head_dim",)),
    "attention.value_length": _Key(int, ("head_dim",)),
    "expert_count": _Key(int, ("num_experts",), (0,)),
    "expert_used_count": _Key(int, ("num_experts_per_tok",), (0,)),
    "expert_feed_forward_length": _Key(int, ("moe_intermediate_size",), (0,)),
    "expert_shared_feed_forward_length": _Key(int, ("shared_expert_intermediate_size",), (0,)),
    "ssm.conv_kernel": _Key(int, ("conv_kernel",)),
    "ssm.state_size": _Key(int, ("state_size",)),
    "ssm.time_step_rank": _Key(int, ("time_step_rank",)),
    "ssm.inner_size": _Key(int, (), (_EITHER,)),
    "shortconv.l_cache": _Key(int, ("conv_L_cache",)),
}
_OTHERS = {
    "context_length": _Key(int, ("max_position_embeddings",), (_EITHER,)),  # BLOOM and Mamba have no limit
    "attention.layer_norm_rms_epsilon": _Key(float, ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")),
    "attention.layer_norm_epsilon": _Key(float, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")),
    "attention.sliding_window": _Key(int, ("sliding_window",), (0,)),
    "final_logit_softcapping": _Key(float, ("final_logit_softcapping",), (0,)),
    "attn_logit_softcapping": _Key(float, ("attn_logit_softcapping",), (0,)),
    "use_parallel_residual": _Key(bool, ("use_parallel_residual", "parallel_attn"), (False,)),
    "expert_weights_norm": _Key(bool, ("norm_topk_prob",), (False,)),
}
# Keys without a field: their type, and the values that change nothing. A gating function of 1 is softmax.
_WITHOUT_FIELD: tuple[tuple[type, tuple[Any, ...], str], ...] = (
    (bool, (True,), "attention.causal"),
    (bool, (False,), "ssm.dt_b_c_rms"),
    (int, (0,), "expert_shared_count leading_dense_block_count nextn_predict_layers"),
    (int, (0, 1), "expert_group_count expert_group_used_count expert_gating_func ssm.group_count"),
    (float, (0,), "attention.scale attention.clamp_kqv attention.max_alibi_bias rope.scaling.alpha"),
    (float, (0, 1), "logit_scale residual_scale embedding_scale expert_weights_scale"),
    (float, (1,), "rope.scaling.attn_factor"),
    (float, (_EITHER,), "rope.freq_base rope.freq_base_swa rope.scaling.factor rope.scale_linear"),
    (int, (_EITHER,), "rope.dimension_count"),
    # Also those that only refused scaling types, or no forward, read. An architecture has only one data layout.
    (float, (_EITHER,), "rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor"),
    (float, (_EITHER,), "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"),
    (int, (_EITHER,), "rope.scaling.original_context_length pooling_type"),
    (bool, (_EITHER,), "rope.scaling.finetuned"),
    (str, (_EITHER,), "rope.scaling.type tensor_data_layout"),
)
_KEYS = _WIDTHS | _OTHERS | {key: _Key(kind, (), idle) for kind, idle, keys in _WITHOUT_FIELD for key in keys.split()}
_PATTERN = "attention.sliding_window_pattern"
_WINDOW_EVERY = {"gemma2": 2, "gemma3": 6}  # every n-th layer has full attention, if the file does not say
_DIVIDED_BY_HEADS = {"gemma2": 46, "gemma3": 62}  # number of layers of the 27B models, which scale queries otherwise


class ModelKeys:
    """A file's keys about its model, without the architecture's prefix, and the shapes of its tensors.

    Raises ModelError: a value is impossible; UnsupportedModelError: the architecture is not read, or a key not applied.
    """

    def __init__(self, path: str, fields: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
        self.path = path
        self.shapes = shapes
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"{path!r} is of the architecture {str(architecture)[:100]!r}, and truedraft reads GGUF files of "
                f"{', '.join(FAMILIES)}; get the model as a Hugging Face folder"
            )
        self.architecture = architecture
        self._prefix = f"{self.architecture}."
        self.values: dict[str, Any] = {}
        for name, value in fields.items():
            if name.startswith(self._prefix):
                key = name.removeprefix(self._prefix)
                self.values[key] = value if key == _PATTERN else self._checked(key, value)
        self._check_sizes()

    def _checked(self, key: str, value: Any) -> Any:
        if key not in _KEYS:
            raise self.unsupported(key, value)
        kind = _KEYS[key].kind
        if isinstance(value, list) and value and (self.architecture, key) != ("lfm2", "attention.head_count_kv"):
            if any(each != value[0] for each in value):
                raise self.unsupported(key, value)
            value = value[0]
        numbers = value if isinstance(value, list) else [value]
        if not all(type(each) is kind or (kind is float and type(each) is int) for each in numbers):
            raise self.impossible(key, value)
        if kind in (int, float) and not all(math.isfinite(each) and 0 <= each < _LARGEST for each in numbers):
            raise self.impossible(key, value)
        return float(value) if kind is float else value

    def unsupported(self, key: str, value: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path!r} says {self._prefix}{key[:100]} = {str(value)[:100]!r}, which truedraft does not follow; "
            "get the model as a Hugging Face folder"
        )

    def impossible(self, key: str, value: Any) -> ModelError:
        return ModelError(
            f"{self.path!r} says {self._prefix}{key} = {str(value)[:100]!r}, which does not fit its tensors or its "
            "other values; fetch it again"
        )

    def _check_sizes(self) -> None:
        """Compare sizes with the file's tensors before anything of these sizes is made."""
        norms = [key for key in self.values if key.startswith("attention.layer_norm")]
        needed = ["context_length", "embedding_length", "block_count"]
        needed += [] if self.architecture == "mamba" else ["attention.head_count"]
        for key in norms:
            if self.values[key] >= 1:
                raise self.impossible(key, self.values[key])
        for key in [*needed, *([] if norms else ["attention.layer_norm_rms_epsilon"])]:
            if key not in self.values:
                raise ModelError(f"{self.path!r} does not say {self._prefix + key!r} of its model; fetch it again")
            if isinstance(self.values[key], list) or self.values[key] < 1:
                raise self.impossible(key, self.values[key])
        places = self.shapes.get("position_embd.weight", (0,))[0]
        if self.architecture == "gpt2" and self.values["context_length"] != places:
            raise self.impossible("context_length", self.values["context_length"])
        largest = max((size for shape in self.shapes.values() for size in shape), default=0)
        for key, value in self.values.items():
            if key in _WIDTHS and (max(value) if isinstance(value, list) else value) > largest:
                raise self.impossible(key, value)
        blocks = {name.split(".")[1] for name in self.shapes if name.startswith("blk.")}
        if self.values["block_count"] > min(len(blocks), _LAYERS):
            raise self.impossible("block_count", self.values["block_count"])
        heads, of_keys = self.values.get("attention.head_count", 0), self.values.get("attention.head_count_kv", 0)
        fewest = min(filter(None, of_keys), default=0) if isinstance(of_keys, list) else of_keys
        if heads * self.head > largest or (heads and self.head < 1):
            own = "attention.key_length" in self.values
            raise self.impossible(*(("attention.key_length", self.head) if own else ("attention.head_count", heads)))
        if fewest and heads % fewest:
            raise self.impossible("attention.head_count_kv", fewest)
        if self.values.get("expert_used_count", 0) > self.values.get("expert_count", 0):
            raise self.impossible("expert_used_count", self.values["expert_used_count"])

    @property
    def head(self) -> int:
        heads = self.values.get("attention.head_count", 0)
        return self.values.get("attention.key_length", self.values["embedding_length"] // heads if heads else 0)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Rotary positions: pair i of a head's first `rotated` entries by `base ** (-2 i / rotated) / factor`.

    `windowed` is the base of layers with a window, if they have their own; they do not scale positions.
    """

    base: float
    factor: float
    windowed: float | None
    rotated: int

    @classmethod
    def of(cls, said: ModelKeys) -> _Positions:
        values, own_window = said.values, said.architecture == "gemma3"
        kind = values.get("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise UnsupportedModelError(
                f"{said.path!r} stretches positions (rope.scaling of type {kind[:100]!r}), which truedraft does not "
                "read of GGUF files; get the model as a Hugging Face folder"
            )
        base = values.get("rope.freq_base", 10000.0)
        factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0
        windowed = values.get("rope.freq_base_swa", 10000.0 if own_window else base)
        if not own_window and windowed != base:
            raise said.unsupported("rope.freq_base_swa", windowed)
        for key, value, least in (
            ("rope.freq_base", base, 1.0),
            ("rope.freq_base_swa", windowed, 1.0),
            ("rope.scaling.factor", factor, 1e-3),
        ):
            if value < least:
                raise said.impossible(key, value)
        rotated = values.get("rope.dimension_count", said.head)
        return cls(base, 1.0 if kind == "none" else factor, windowed if own_window else None, rotated)

    def parameters(self, head: int, partly: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"rope_type": "default", "rope_theta": self.base}
        if self.factor != 1:
            found |= {"rope_type": "linear", "factor": self.factor}
        if self.windowed is not None:
            near = {"rope_type": "default", "rope_theta": self.windowed}
            return {"full_attention": found, "sliding_attention": near}
        return found | ({"partial_rotary_factor": self.rotated / head} if partly else {})


def check_positions(said: ModelKeys, model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a model's rotary positions are not those of the file."""
    own = _Positions.of(said)
    pairs = torch.arange(0, own.rotated, 2, dtype=torch.float64) / max(own.rotated, 1)
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            near = "sliding" in name and own.windowed
            expected = near**-pairs if near else own.base**-pairs / own.factor
            if values.shape != expected.shape or not torch.allclose(values.double(), expected, rtol=1e-4):
                raise said.unsupported("rope.dimension_count", own.rotated)


def read_config(said: ModelKeys, vocabulary: int, tokens: Mapping[str, int | None]) -> PreTrainedConfig:
    """The configuration of a file's model, with the ids of special tokens by their names in configurations.

    Raises ModelError: its keys do not fit together; UnsupportedModelError: its family in transformers lacks one of
    them.
    """
    kind = CONFIG_MAPPING[FAMILIES[said.architecture]]
    names = {*kind.__dataclass_fields__, *kind.attribute_map}
    followed: dict[str, Any] = {"vocab_size": vocabulary} | ({"head_dim": said.head} if "head_dim" in names else {})
    values = {key: value for key, value in said.values.items() if key != _PATTERN}
    fields = {key: next((each for each in _KEYS[key].fields if each in names), None) for key in values}
    for key, value in values.items():
        if (field := fields[key]) is None:
            if not _is_idle(said, key, value):
                raise said.unsupported(key, value)
        elif followed.get(field, value) != value:
            raise said.impossible(key, value)
        else:
            followed[field] = value
    _add_implied(said, followed, names)
    own = {
        name if name in kind.__dataclass_fields__ else kind.attribute_map[name]: value
        for name, value in followed.items()
    }
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kind.model_type, **own, **tokens)
    except (ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        why = first_line(error.__cause__ or error)
        raise ModelError(f"{said.path!r} says what makes no model ({why}); fetch it again") from error
    for key, field in fields.items():
        if field is not None and getattr(config, field) != followed[field]:
            raise said.unsupported(key, said.values[key])
    return config


def _is_idle(said: ModelKeys, key: str, value: Any) -> bool:
    if key in ("attention.key_length", "attention.value_length"):
        return bool(value * said.values.get("attention.head_count", 0) == said.values["embedding_length"])
    if key == "attention.head_count_kv":
        return bool(value == said.values.get("attention.head_count", 0))
    if key == "attention.scale" and said.head:
        return value == 0 or math.isclose(value, said.head**-0.5, rel_tol=1e-5)
    if key == "attention.sliding_window" and value >= said.values["context_length"]:
        return True
    return _EITHER in _KEYS[key].idle or value in _KEYS[key].idle


def _add_implied(said: ModelKeys, followed: dict[str, Any], names: set[str]) -> None:
    """Add settings that a file expresses by its tensors, by omitting a key, or in another form than transformers."""
    architecture, heads = said.architecture, said.values.get("attention.head_count", 0)
    followed["tie_word_embeddings"] = architecture == "bloom" or "output.weight" not in said.shapes
    if "num_key_value_heads" in names:
        followed.setdefault("num_key_value_heads", heads)
    if "rope_parameters" in names:
        positions = _Positions.of(said)
        if architecture == "phi3" and positions.factor != 1:
            raise said.unsupported("rope.scaling.factor", positions.factor)
        followed["rope_parameters"] = positions.parameters(said.head, architecture in _PARTLY)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "sliding_window"):
        if followed.get(name) == 0:
            followed[name] = None
    if architecture == "falcon" and followed.get("num_kv_heads") != 1:
        raise said.unsupported("attention.head_count_kv", followed.get("num_kv_heads", heads))
    if architecture == "lfm2":
        of_layers = followed["num_key_value_heads"]
        if not isinstance(of_layers, list) or len(of_layers) != followed["num_hidden_layers"]:
            raise said.impossible("attention.head_count_kv", of_layers)
        followed["layer_types"] = ["full_attention" if count else "conv" for count in of_layers]
        followed["block_auto_adjust_ff_dim"] = False
        said.values["attention.head_count_kv"] = followed["num_key_value_heads"] = max(of_layers)
    if architecture == "stablelm":
        followed["use_qkv_bias"] = "blk.0.attn_q.bias" in said.shapes
        followed["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in said.shapes
    if architecture == "qwen3moe":
        followed.setdefault("norm_topk_prob", True)  # llama.cpp always does this
    if architecture == "gemma2" and followed.get("sliding_window", 1) is None:
        raise said.impossible("attention.sliding_window", 0)
    if architecture in _WINDOW_EVERY:
        per_head = said.values["embedding_length"] // heads
        is_27b = said.values["block_count"] == _DIVIDED_BY_HEADS[architecture]
        followed["query_pre_attn_scalar"] = per_head if is_27b else said.head
        followed["layer_types"] = _layer_types(said, followed)
    elif _PATTERN in said.values:
        raise said.unsupported(_PATTERN, said.values[_PATTERN])


def _layer_types(said: ModelKeys, followed: dict[str, Any]) -> list[str]:
    """The attention type of each layer: a window where a list says so, or in all but each n-th."""
    every = said.values.get(_PATTERN, _WINDOW_EVERY[said.architecture])
    layers = said.values["block_count"]
    if isinstance(every, int) and 0 <= every < _LARGEST:
        windowed = [every == 0 or layer % every < every - 1 for layer in range(layers)]
    elif isinstance(every, list) and len(every) == layers and all(each in (0, 1) for each in every):
        windowed = every
    else:
        raise said.impossible(_PATTERN, every)
    if said.architecture == "gemma3" and not followed.get("sliding_window"):
        windowed = [False] * layers
        followed["sliding_window"] = said.values["context_length"]
    return ["sliding_attention" if each else "full_attention" for each in windowed]
