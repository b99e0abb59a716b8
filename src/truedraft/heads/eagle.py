"""The head of EAGLE-3: a decoder layer that reads vectors of some of the target's layers, and the tokens behind them.

EAGLE-3 (Li et al., arXiv 2503.01840) and 3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from truedraft.errors import OptionError
from truedraft.heads.base import GatedMlp, LayerHead
from truedraft.models.llama import Rotation

_SIZES = ("width", "vocab_size", "heads", "kv_heads", "head", "inner", "reach")
_FLAGS = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "query_norms", "own_output", "own_embedding",
)  # fmt: skip
_USUAL_LAYERS, _LEAST_LAYERS = 3, 7  # that are read, and of a target that has them

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]` to what they mix, `[rows, heads * head]`."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 head.

    Attributes:
        width: entries of the target's vectors.
        vocab_size: token ids of the target.
        layers: the target's layers whose output is read, by number, 0 the first; -1 is the embedding. Empty: three that
            a published folder does not name, see `at_usual_layers`.
        heads: of queries.
        kv_heads: of keys and values.
        head: entries of a head.
        inner: entries inside the MLP.
        draft_vocab: ids that it guesses among; 0 is all of the target's.
        reach: how many tokens behind the next it was trained to guess; it can draft further.
        norm_before_residual: whether the residual stream begins with the normed vector.
        norm_before_fc: whether all layers' vectors together are normed before they are merged.
        fc_norm: whether each layer's are, by a norm of its own (EAGLE-3.1).
        norm_output: whether what goes into the next step is normed (EAGLE-3.1).
        query_norms: whether each head's queries and keys are normed before they are rotated, as in Qwen 3.
        own_output: whether it has an LM head of its own; else it ends in the target's.
        own_embedding: whether it has an embedding of its own; else it reads the target's.
        rope_start: position of the first pair; 1 in heads of `speculators`.
        rope: parameters of its rotation, as transformers names them.
        most_positions: that its rotation is made for.
        eps: of its norms.
        more_layers: ordinary decoder layers behind the one that reads both.

    Raises:
        OptionError: sizes that make no head.
    """

    width: int
    vocab_size: int
    layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head: int
    inner: int
    draft_vocab: int = 0
    reach: int = 5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    query_norms: bool = False
    own_output: bool = True
    own_embedding: bool = False
    rope_start: int = 0
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    most_positions: int = 4096
    eps: float = 1e-6
    more_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that make no head."""
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        for name in _SIZES:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise OptionError(f"{name} of an EAGLE-3 head must be 1 or more, got {value!r}")
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name} of an EAGLE-3 head must be true or false, got {value!r}")
        if self.heads % self.kv_heads or self.head % 2:
            raise OptionError(
                f"{self.heads} heads of {self.head} entries do not fit {self.kv_heads} of keys and values; heads must "
                "be a multiple of those, and their entries even"
            )
        if len(set(self.layers)) != len(self.layers) or min(self.layers, default=0) < -1:
            raise OptionError(f"an EAGLE-3 head reads different layers, 0 the first, got {list(self.layers)}")
        if not 0 <= self.draft_vocab <= self.vocab_size:
            raise OptionError(f"the draft's vocabulary has 1 to {self.vocab_size} ids, got {self.draft_vocab}")
        if not isinstance(self.more_layers, int) or self.more_layers < 0:
            raise OptionError(f"more_layers of an EAGLE-3 head must be 0 or more, got {self.more_layers!r}")
        if self.draft_vocab and not self.own_output:
            raise OptionError("a head with fewer ids than the target needs an LM head of its own")
        if self.fc_norm and self.norm_before_fc:
            raise OptionError("layers are normed together or each for itself, not both")

    @property
    def merged(self) -> int:
        """How many layers are read."""
        return len(self.layers) or _USUAL_LAYERS

    def at_usual_layers(self, count: int) -> Eagle3Config:
        """The same with the layers that EAGLE reads of a target with so many, where none are named: those whose output
        enters layers 2, the middle one and the third last.

        Raises:
            OptionError: it has too few.
        """
        if not self.layers and count < _LEAST_LAYERS:
            raise OptionError(
                f"of a target with {count} layers there are no three that are usual; name those to read, 0 the first",
                field="layers",
            )
        return self if self.layers else replace(self, layers=(1, count // 2 - 1, count - 4))


class _Attention(nn.Module):
    """Reads vectors of so many entries: the first layer's embedding and vector side by side."""

    def __init__(self, config: Eagle3Config, entries: int) -> None:
        super().__init__()
        mixed, keys = config.heads * config.head, config.kv_heads * config.head
        self.q_proj = nn.Linear(entries, mixed, bias=False)
        self.k_proj = nn.Linear(entries, keys, bias=False)
        self.v_proj = nn.Linear(entries, keys, bias=False)
        self.o_proj = nn.Linear(mixed, config.width, bias=False)
        self.q_norm = nn.RMSNorm(config.head, config.eps) if config.query_norms else None
        self.k_norm = nn.RMSNorm(config.head, config.eps) if config.query_norms else None


class _Layer(nn.Module):
    """An ordinary decoder layer, but for what its attention reads."""

    def __init__(self, config: Eagle3Config, entries: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.eps)
        self.self_attn = _Attention(config, entries)
        self.head = config.head
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.eps)
        self.mlp = GatedMlp(config.width, config.inner)

    def run(self, x: Tensor, entering: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream `[rows, width]` behind the layer, of that before it and what its attention reads."""
        attention, rows = self.self_attn, len(x)
        query, key, value = (
            product(entering).view(rows, -1, self.head)
            for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            query, key = attention.q_norm(query), attention.k_norm(key)
        x = x + attention.o_proj(attend(rotation(query), rotation(key), value))
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class _First(_Layer):
    """The layer that reads embedding and vector."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.width)
        self.hidden_norm = nn.RMSNorm(config.width, config.eps)


class Eagle3Head(LayerHead):
    """A pair of a vector at position i and the token at i + 1 gives the distribution of the token at i + 2.

    The vectors of the layers go side by side through `fc` (`fuse`). The one layer reads the normed embedding of the
    token beside the normed vector, and adds to the vector; what it gives is normed and goes through the LM head. For a
    drafted token, it stands in for the target's vector, which nobody knows yet (2503.01840, section 3.1).

    Args:
        config: sizes.
    """

    kind: ClassVar[str] = "eagle"
    noun: ClassVar[str] = "an EAGLE-3 head"
    plural: ClassVar[str] = "EAGLE-3 heads"
    place_word: ClassVar[str] = "step"
    sizes: ClassVar[type[Any]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, many = config.width, config.merged
        self.fc = nn.Linear(many * width, width, bias=False)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, config.eps) for _ in range(many if config.fc_norm else 0))
        self.input_norm = nn.RMSNorm(many * width, config.eps) if config.norm_before_fc else None
        self.midlayer = _First(config)
        numbers = range(1, 1 + config.more_layers)
        self.layers = nn.ModuleDict({str(number): _Layer(config, width) for number in numbers})
        self.norm = nn.RMSNorm(width, config.eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        ids = config.draft_vocab or config.vocab_size
        self.lm_head = nn.Linear(width, ids, bias=False) if config.own_output else None
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    def fuse(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of each layer that is read, `[rows, width]`, merged into one."""
        chunks = [norm(each) for norm, each in zip(self.fc_norm, vectors, strict=True)] if self.fc_norm else vectors
        together = torch.cat(list(chunks), dim=-1)
        merged: Tensor = self.fc(together if self.input_norm is None else self.input_norm(together))
        return merged

    def step(self, vectors: Tensor, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """What stands in for the target's vector at the tokens, `[rows, width]`.

        Args:
            vectors: `[rows, width]`: of the position before each token: merged ones of the target, or what this gave.
            embedded: `[rows, width]`: embeddings of the tokens.
            rotation: of the rows.
            attend: of the rows, each to those before it; called once for each layer, in order.
        """
        layer, normed = self.midlayer, self.midlayer.hidden_norm(vectors)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        x = layer.run(normed if self.config.norm_before_residual else vectors, both, rotation, attend)
        for later in self.layers.values():
            x = later.run(x, later.input_layernorm(x), rotation, attend)  # type: ignore[operator]
        return self.norm(x) if self.config.norm_output else x

    def leaving(self, x: Tensor) -> Tensor:
        """What enters the LM head, `[rows, width]`, of what `step` gave."""
        return x if self.config.norm_output else self.norm(x)
