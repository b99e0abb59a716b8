"""Heads with decoder layers that read several layers of the target: the shared part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.drafters.heads.head import MOST_MODULES, Head
from truedraft.errors import OptionError
from truedraft.models.attention import AttentionPattern, Full, Window
from truedraft.models.backends.graphs.replay import MOST_RECORDED_TOKENS
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.linear import is_fastest, native_linears
from truedraft.models.base import LanguageModel
from truedraft.models.llama import Llama, LlamaLayer, RootMeanSquareNorm, RotaryTable, Rotation
from truedraft.models.packed_linear import PackedLinear, can_pack

HeadT = TypeVar("HeadT", bound=Head)
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]` to the output `[rows, heads * head]`."""
_LEAST_PACKED = 16  # outputs of a layer with packed weights, at least
_FEW_BITS = 4
_LEAST_QUANTIZED = 4 << 20  # bytes of a head's weights from which quantization is faster


@dataclass(frozen=True, slots=True)
class LayerConfig(ABC):
    """Sizes of a head with decoder layers. Raises `OptionError` for invalid sizes.

    Attributes:
        layers: numbers of the target's layers with outputs that it reads, from 0; empty if a folder names none.
        head: entries of a head, of which there are `kv_heads` with keys and values.
        inner: entries inside the MLPs.
        draft_vocab: size of a reduced vocabulary; 0 is the target's.
        own_output, own_embedding: whether it has its own LM head and embedding; otherwise it uses the target's.
        rope: parameters of its rotary embedding, as in transformers.
        windows: how many positions each decoder layer sees, 0 for all of them; one number is of every layer.
        sink: first positions that layers with a window see, too.
    """

    noun: ClassVar[str]
    counts: ClassVar[tuple[str, ...]]
    """Names of further sizes that are 1 or more."""
    flags: ClassVar[tuple[str, ...]]
    first_layer: ClassVar[int] = 0
    usual_layers: ClassVar[int]
    """Number of layers to read if none are named."""

    width: int
    vocab_size: int
    layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head: int
    inner: int
    draft_vocab: int = 0
    own_output: bool = False
    own_embedding: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    most_positions: int = 4096
    eps: float = 1e-6
    windows: tuple[int, ...] = ()
    sink: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        windows = tuple(self.windows)
        object.__setattr__(self, "windows", windows * (self.decoders if len(windows) == 1 else 1))
        for name in ("width", "vocab_size", "heads", "kv_heads", "head", "inner", "most_positions", *self.counts):
            if not is_whole(value := getattr(self, name), 1):
                raise OptionError(f"{name} of {self.noun} must be 1 or more, got {value!r}")
            if name in self.counts and value > MOST_MODULES:
                raise OptionError(f"{name} of {self.noun} must be at most {MOST_MODULES}, got {value!r}")
        for name in ("own_output", "own_embedding", *self.flags):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name} of {self.noun} must be true or false, got {value!r}")
        if not isinstance(self.eps, float) or not self.eps >= 0.0:
            raise OptionError(f"eps of {self.noun} must be a number of 0 or more, got {self.eps!r}")
        if self.heads % self.kv_heads or self.head % 2:
            raise OptionError(
                f"{self.heads} heads of {self.head} entries do not fit {self.kv_heads} of keys and values; heads must "
                "be a multiple of those, and their entries even"
            )
        each_once = len(set(self.layers)) == len(self.layers)
        if not each_once or not all(is_whole(layer, self.first_layer) for layer in self.layers):
            raise OptionError(f"{self.noun} reads different layers, 0 the first, got {list(self.layers)}")
        if not is_whole(self.draft_vocab, 0) or self.draft_vocab > self.vocab_size:
            raise OptionError(f"the draft's vocabulary has 1 to {self.vocab_size} ids, got {self.draft_vocab!r}")
        if self.mask is not None and (not is_whole(self.mask, 0) or self.mask >= self.vocab_size):
            raise OptionError(f"the mask token is an id below {self.vocab_size}, got {self.mask!r}")
        if self.draft_vocab and not self.own_output:
            raise OptionError("a head with fewer ids than the target needs an LM head of its own")
        self._check_windows()

    def _check_windows(self) -> None:
        if self.windows and len(self.windows) != self.decoders:
            raise OptionError(f"are {len(self.windows)}, and it has {self.decoders} layers", field="windows")
        for window in self.windows:
            if not is_whole(window, 0) or 0 < window <= self.reach:
                raise OptionError(
                    f"is 0, all positions, or more than the {self.reach} tokens that are drafted, got {window!r}",
                    field="sliding_window",
                )
        if not is_whole(self.sink, 0) or (self.sink and not any(self.windows)):
            raise OptionError(f"is how many first tokens layers with a window see, got {self.sink!r}", field="sink")

    @property
    @abstractmethod
    def reach(self) -> int:
        """Number of drafted tokens."""

    @property
    @abstractmethod
    def decoders(self) -> int:
        """Number of decoder layers."""

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """What each decoder layer sees."""
        return tuple(Window(size, self.sink) if size else Full() for size in self.windows or (0,) * self.decoders)

    @property
    def recordable(self) -> bool:
        """Whether CUDA graphs support its windows: with no first tokens, and longer than what one graph reads."""
        return not self.sink and all(not size or size > MOST_RECORDED_TOKENS for size in self.windows)

    @property
    def mask(self) -> int | None:
        """The id with the embedding of unknown tokens, if the head reads one."""
        return None

    @property
    def merged(self) -> int:
        return len(self.layers) or self.usual_layers

    @abstractmethod
    def usual_of(self, count: int) -> tuple[int, ...]:
        """The usual layers for a target with `count` layers; () if it has too few."""

    def at_usual_layers(self, count: int) -> Self:
        """With `usual_of` a target if no layers are named; raises `OptionError` if it has too few."""
        if self.layers:
            return self
        layers = self.usual_of(count)
        if not layers:
            raise OptionError(
                f"of a target with {count} layers there are no {self.usual_layers} that are usual; name those to read, "
                "0 the first",
                field="layers",
            )
        return replace(self, layers=layers)


def is_whole(value: Any, least: int) -> bool:
    """Whether a JSON value is an integer of at least `least`; true is not."""
    return type(value) is int and value >= least


class LayerHead(Head):
    """Decoder layers on hidden states of several layers of the target.

    `embed_tokens` and `lm_head` are None if it uses the target's, `draft_ids` are the target's ids `[draft_vocab]` of
    its reduced vocabulary, or None. Weight names are those of published heads.

    Attributes:
        speculators: its name, and its class, in `speculators`.
    """

    reads_layers: ClassVar[bool] = True
    speculators: ClassVar[tuple[str, str]]
    architectures: ClassVar[tuple[str, ...]] = ()
    config: Any
    norm: nn.RMSNorm
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    draft_ids: Tensor | None

    def _add_ends(self) -> None:
        config = self.config
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if config.own_embedding else None
        ids = config.draft_vocab or config.vocab_size
        self.lm_head = nn.Linear(config.width, ids, bias=False) if config.own_output else None
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    @property
    def reach(self) -> int:
        reach: int = self.config.reach
        return reach

    def reading(self, layers: int) -> Self:
        self.config = self.config.at_usual_layers(layers)
        return self

    @property
    def reads_tokens(self) -> bool:
        return self.embed_tokens is None

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [self.lm_head] * self.reach

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        if self.lm_head is not None:
            self.lm_head.weight.copy_(weight if self.draft_ids is None else weight[self.draft_ids])

    def rotary(self, like: Tensor) -> RotaryTable:
        """In the dtype and on the device of a tensor; raises `OptionError` if its parameters are invalid."""
        config = self.config
        try:
            return RotaryTable.made(config.rope, config.head, config.most_positions, like)
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f"{dict(config.rope)} are no parameters of a rotation ({error})", field="rope") from error


class LayerAttention(nn.Module):
    """Attention on `entries` numbers per row; with `norms`, queries and keys are normalized per head."""

    def __init__(self, config: LayerConfig, entries: int, *, norms: bool) -> None:
        super().__init__()
        mixed, keys = config.heads * config.head, config.kv_heads * config.head
        self.q_proj = nn.Linear(entries, mixed, bias=False)
        self.k_proj = nn.Linear(entries, keys, bias=False)
        self.v_proj = nn.Linear(entries, keys, bias=False)
        self.o_proj = nn.Linear(mixed, config.width, bias=False)
        self.q_norm = nn.RMSNorm(config.head, config.eps) if norms else None
        self.k_norm = nn.RMSNorm(config.head, config.eps) if norms else None
        self._head = config.head

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        made: Tensor = self.o_proj(attend(self.queries(x, rotation), *self.keys(x, rotation)))
        return made

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (-1, self._head))
        return rotation(query if self.q_norm is None else self.q_norm(query))

    def keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        key, value = (product(x).unflatten(-1, (-1, self._head)) for product in (self.k_proj, self.v_proj))
        return rotation(key if self.k_norm is None else self.k_norm(key)), value


class GatedMlp(nn.Module):
    """W_down (SiLU(W_gate x) * W_up x), as in Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class DecoderLayer(nn.Module):
    """As in Llama and, with norms, in Qwen 3, except that its attention reads `entries` numbers per row."""

    def __init__(self, config: LayerConfig, entries: int, *, norms: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.eps)
        self.self_attn = LayerAttention(config, entries, norms=norms)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.eps)
        self.mlp = GatedMlp(config.width, config.inner)

    def run(self, x: Tensor, entering: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream `[rows, width]` after the layer."""
        x = x + self.self_attn(entering, rotation, attend)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


def copied(head: HeadT, target: LanguageModel) -> HeadT:
    """A copy on a target's device and, except integer tensors, in its dtype."""
    weights = {
        name: each.to(target.device, target.dtype if each.is_floating_point() else each.dtype, copy=True)
        for name, each in head.state_dict().items()
    }
    with torch.device("meta"):
        own = type(head)(head.config)
    own.load_state_dict(weights, assign=True)
    return own.eval().requires_grad_(False)


def head_decoder(head: LayerHead, layers: Sequence[DecoderLayer], table: RotaryTable, lm_head: nn.Linear) -> Llama:
    """A head's layers as a decoder for a native forward, which takes over their weights; it has no embedding."""
    config = head.config

    def norm(module: nn.RMSNorm) -> RootMeanSquareNorm:
        return RootMeanSquareNorm(module.weight.detach(), config.eps)

    made = []
    for layer, pattern in zip(layers, config.patterns, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        made.append(
            LlamaLayer(
                before_attention=norm(layer.input_layernorm),
                qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
                query_norm=None if attention.q_norm is None else norm(attention.q_norm),
                key_norm=None if attention.k_norm is None else norm(attention.k_norm),
                out=(attention.o_proj,),
                before_mlp=norm(layer.post_attention_layernorm),
                gate_up=(mlp.gate_proj, mlp.up_proj),
                down=(mlp.down_proj,),
                activation=functional.silu,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head=config.head,
                scaling=config.head**-0.5,
                pattern=pattern,
            )
        )
    return Llama(
        embedding=head.norm.weight.detach()[None],  # a placeholder, never read
        scale=1.0,
        rotaries=(table,),
        layers=tuple(made),
        norm=norm(head.norm),
        lm_head=lm_head,
        tied=False,
        uniform=True,
    )


def bits_for(head: Head) -> int:
    """Bits of a head's weights while it drafts; 0: unquantized. This changes drafts, but no answer."""
    weights = [each.weight for each in head.modules() if isinstance(each, nn.Linear)]
    if sum(each.nbytes for each in weights) < _LEAST_QUANTIZED or weights[0].device.type != "cpu":
        return 0
    return _FEW_BITS if built(weights[0].dtype).library is not None else 0


def packed(head: HeadT, bits: int) -> HeadT:
    """The head with its linear layers packed, quantized to `bits` if not 0."""
    layers = {
        name: layer
        for name, layer in head.named_modules()
        if isinstance(layer, nn.Linear) and layer.weight.dim() > 1 and layer.out_features >= _LEAST_PACKED
    }
    some = next(head.parameters())
    natively = bits or is_fastest(some.device, some.dtype)
    fewer = native_linears(layers.values(), bits, some.dtype) if natively else {}
    for name, layer in layers.items():
        if layer in fewer:
            head.set_submodule(name, fewer[layer])
        elif can_pack(layer.weight.device, layer.weight.dtype):
            head.set_submodule(name, PackedLinear(layer.weight, layer.bias))
    return head
