"""Block drafters: a few decoder layers guess a block of tokens in one pass, on vectors of the target's layers.

DFlash (arXiv 2602.06036) guesses each token of the block for itself. In DSpark (arXiv 2607.05147) a Markov head adds to
each token's logits what the token before it says, and a confidence head says how likely the target accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn

from truedraft.errors import OptionError
from truedraft.heads.base import GatedMlp, LayerHead, Unembed
from truedraft.models.llama import Rotation

_SIZES = ("width", "vocab_size", "block", "depth", "heads", "kv_heads", "head", "inner")
_FLAGS = ("from_anchor", "confidence", "confidence_reads_token", "own_output", "own_embedding")
_USUAL_LAYERS, _LEAST_LAYERS = 5, 8  # that are read, and of a target that has them

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The number of a layer, queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]` of blocks to what they
mix, `[rows, heads * head]`: each row sees its own block, and the context of that."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Sizes of a block drafter.

    Attributes:
        width: entries of the target's vectors.
        vocab_size: token ids of the target.
        layers: the target's layers whose output is read, by number, 0 the first. Empty: five, see `at_usual_layers`.
        block: tokens that it reads at once: the last one of the text, the *anchor*, and masks.
        mask_id: id whose embedding by the target stands for a token that is not known.
        depth: decoder layers.
        heads: of queries.
        kv_heads: of keys and values.
        head: entries of a head.
        inner: entries inside the MLPs.
        from_anchor: whether the anchor's row guesses the token behind it, and each mask the one behind itself; else
            each mask guesses the token at its own position, and the anchor's row nothing.
        draft_vocab: ids that it guesses among; 0 is all of the target's.
        markov: entries of what the Markov head makes of the token before; 0: it has none.
        markov_kind: how: "vanilla", "gated" by the row's vector, or "rnn", which carries a state along the block.
        confidence: whether it has a confidence head.
        confidence_reads_token: whether that reads the token before, too.
        own_output: whether it has an LM head of its own; else it ends in the target's.
        own_embedding: whether it has an embedding of its own; else it reads the target's.
        rope: parameters of its rotation, as transformers names them.
        most_positions: that its rotation is made for.
        eps: of its norms.

    Raises:
        OptionError: sizes that make no head.
    """

    width: int
    vocab_size: int
    layers: tuple[int, ...]
    block: int
    mask_id: int
    depth: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    from_anchor: bool = False
    draft_vocab: int = 0
    markov: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    confidence_reads_token: bool = False
    own_output: bool = False
    own_embedding: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    most_positions: int = 4096
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse sizes that make no head."""
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        for name in _SIZES:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise OptionError(f"{name} of a block drafter must be 1 or more, got {value!r}")
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name} of a block drafter must be true or false, got {value!r}")
        if self.reach < 1:
            raise OptionError("a block drafter that reads the anchor alone guesses nothing; block must be 2 or more")
        if self.heads % self.kv_heads or self.head % 2:
            raise OptionError(
                f"{self.heads} heads of {self.head} entries do not fit {self.kv_heads} of keys and values; heads must "
                "be a multiple of those, and their entries even"
            )
        if len(set(self.layers)) != len(self.layers) or min(self.layers, default=0) < 0:
            raise OptionError(f"a block drafter reads different layers, 0 the first, got {list(self.layers)}")
        if not isinstance(self.mask_id, int) or not 0 <= self.mask_id < self.vocab_size:
            raise OptionError(f"the id of the mask is one of {self.vocab_size}, got {self.mask_id!r}")
        if not 0 <= self.draft_vocab <= self.vocab_size:
            raise OptionError(f"the draft's vocabulary has 1 to {self.vocab_size} ids, got {self.draft_vocab}")
        if self.draft_vocab and not self.own_output:
            raise OptionError("a head with fewer ids than the target needs an LM head of its own")
        if self.markov < 0 or self.markov_kind not in _MARKOV:
            raise OptionError(
                f"a Markov head has 0 or more entries and is one of {', '.join(_MARKOV)}, got {self.markov} and "
                f"{self.markov_kind!r}"
            )
        if self.confidence_reads_token and not (self.confidence and self.markov):
            raise OptionError("a confidence head that reads the token before needs the Markov head's embedding of it")

    @property
    def merged(self) -> int:
        """How many layers are read."""
        return len(self.layers) or _USUAL_LAYERS

    @property
    def reach(self) -> int:
        """Tokens that a block guesses."""
        return self.block if self.from_anchor else self.block - 1

    def at_usual_layers(self, count: int) -> BlockConfig:
        """The same with the layers that DFlash reads of a target with so many, where none are named: evenly from the
        second to the third last.

        Raises:
            OptionError: it has too few.
        """
        if not self.layers and count < _LEAST_LAYERS:
            raise OptionError(
                f"of a target with {count} layers there are no five that are usual; name those to read, 0 the first",
                field="layers",
            )
        if self.layers:
            return self
        span = count - 4  # from layer 1 to layer count - 3
        return replace(self, layers=tuple(round(1 + span * n / (_USUAL_LAYERS - 1)) for n in range(_USUAL_LAYERS)))


class _Attention(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        mixed, keys = config.heads * config.head, config.kv_heads * config.head
        self.q_proj = nn.Linear(config.width, mixed, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(mixed, config.width, bias=False)
        self.q_norm = nn.RMSNorm(config.head, config.eps)
        self.k_norm = nn.RMSNorm(config.head, config.eps)
        self._head = config.head

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`[rows, width]` to `[rows, heads, head]`."""
        return rotation(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._head))))

    def keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, head]` of a block's rows, or of a context's."""
        key, value = (product(x).unflatten(-1, (-1, self._head)) for product in (self.k_proj, self.v_proj))
        return rotation(self.k_norm(key)), value


class _Layer(nn.Module):
    """As in Qwen 3, but that keys and values of the context come from the target's vectors."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.eps)
        self.mlp = GatedMlp(config.width, config.inner)


class MarkovHead(nn.Module):
    """What the token before a row adds to its logits: W2 of a few entries, W1's of the token (2607.05147, section 3).

    Args:
        config: sizes.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(config.markov, config.draft_vocab or config.vocab_size, bias=False)

    def forward(self, before: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What enters W2 at rows, and their state behind it.

        Args:
            before: `[rows, markov]`: W1's entries of the token before each.
            x: `[rows, width]`: what enters the LM head.
            state: `[rows, markov]`: of the row before, zeros at first.
        """
        return before, state


class _GatedMarkovHead(MarkovHead):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.width + config.markov, config.markov)

    def forward(self, before: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([x, before], -1))) * before, state


class _RecurrentMarkovHead(MarkovHead):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov + config.width, 3 * config.markov)

    def forward(self, before: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, new, out = self.joint_proj(torch.cat([state, before, x], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(new)


_MARKOV: Mapping[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": _GatedMarkovHead,
    "rnn": _RecurrentMarkovHead,
}


class _ConfidenceHead(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.width + config.markov * config.confidence_reads_token, 1)


@dataclass(frozen=True)
class Leaving:
    """What leaves a row of a block.

    Attributes:
        x: `[rows, width]`: enters the LM head.
        before: `[rows, markov]`: the Markov head's entries of the token before; no entries without one.
        added: `[rows, markov]`: what enters W2, likewise.
        state: `[rows, markov]`: for the next row, likewise.
    """

    x: Tensor
    before: Tensor
    added: Tensor
    state: Tensor

    def at(self, rows: Sequence[int]) -> Leaving:
        """Some of the rows."""
        return Leaving(self.x[rows], self.before[rows], self.added[rows], self.state[rows])


class BlockHead(LayerHead):
    """An anchor and the target's vectors at all positions before it give distributions of the next tokens.

    The vectors of the layers go side by side through `fc` and a norm: the *context*, of which every layer makes keys
    and values. The embeddings of the anchor and of masks are the rows of a block, which see the context and each other,
    in both directions; what leaves the last layer is normed and goes through the LM head (2602.06036, section 4).

    Args:
        config: sizes.
    """

    place_word: ClassVar[str] = "slot"
    sizes: ClassVar[type[Any]] = BlockConfig
    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        width = config.width
        self.fc = nn.Linear(config.merged * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, config.eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(width, config.eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        ids = config.draft_vocab or config.vocab_size
        self.lm_head = nn.Linear(width, ids, bias=False) if config.own_output else None
        self.markov_head = _MARKOV[config.markov_kind](config) if config.markov else None
        self.confidence_head = _ConfidenceHead(config) if config.confidence else None
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    @property
    def tables(self) -> list[Tensor]:
        """Weights with a row for each id, which are no matrices to an optimizer."""
        own = [] if self.lm_head is None else [self.lm_head.weight]
        markov = self.markov_head
        return own if markov is None else [*own, markov.markov_w1.weight, markov.markov_w2.weight]

    def context(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of each layer that is read, `[rows, width]`, merged into one."""
        merged: Tensor = self.hidden_norm(self.fc(torch.cat(list(vectors), dim=-1)))
        return merged

    def context_keys(self, context: Tensor, rotation: Rotation) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[rows, kv_heads, head]` of each layer, of a context `[rows, width]`."""
        for layer in self._decoders():
            yield layer.self_attn.keys(context, rotation)

    def inputs(self, anchors: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embeddings of what blocks read, `[blocks, block, width]`, of the anchors' ids `[blocks]`.

        Args:
            anchors: the last token before each block.
            embed: ids to embeddings, by the target.
        """
        ids = anchors[:, None].repeat(1, self.config.block)
        ids[:, 1:] = self.config.mask_id
        embedded: Tensor = (self.embed_tokens or embed)(ids.flatten())
        return embedded.to(self.norm.weight.dtype).view(*ids.shape, -1)

    def vectors(self, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """What enters the LM head at each token that blocks guess: `[blocks, reach, width]`.

        Args:
            embedded: `[blocks, block, width]`: embeddings of `inputs`.
            rotation: of all rows, one block behind another.
            attend: of the same rows.
        """
        x = embedded.flatten(0, 1)
        for number, layer in enumerate(self._decoders()):
            attention, entering = layer.self_attn, layer.input_layernorm(x)
            mixed = attend(number, attention.queries(entering, rotation), *attention.keys(entering, rotation))
            x = x + attention.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows = x.view(*embedded.shape[:2], -1)
        guessed: Tensor = self.norm(rows if self.config.from_anchor else rows[:, 1:])
        return guessed

    def _decoders(self) -> list[_Layer]:
        return cast("list[_Layer]", list(self.layers))

    def behind(self, x: Tensor, tokens: Tensor, state: Tensor | None = None) -> Leaving:
        """What leaves rows, given the token before each.

        Args:
            x: `[rows, width]`, of `vectors`.
            tokens: `[rows]`: ids of the target.
            state: `[rows, markov]`, of the row before each; None at the first.
        """
        if self.markov_head is None:
            nothing = x[:, :0]
            return Leaving(x, nothing, nothing, nothing)
        before = self.markov_head.markov_w1(tokens).to(x.dtype)
        added, state = self.markov_head(before, x, torch.zeros_like(before) if state is None else state)
        return Leaving(x, before, added, state)

    def logits(self, leaving: Leaving, output: Unembed) -> Tensor:
        """`[rows, ids]` of the draft; `output` is the target's LM head."""
        logits: Tensor = output(leaving.x) if self.lm_head is None else self.lm_head(leaving.x)
        if self.markov_head is None:
            return logits
        return logits + self.markov_head.markov_w2(leaving.added)[:, : logits.shape[1]]

    def acceptance(self, leaving: Leaving) -> Tensor:
        """Logits `[rows]` of the probability that the target accepts the row's token, whichever that will be.

        Raises:
            OptionError: it has no confidence head.
        """
        if self.confidence_head is None:
            raise OptionError("this head has no confidence head, so it does not say how likely its tokens are accepted")
        parts = [leaving.x, leaving.before] if self.config.confidence_reads_token else [leaving.x]
        found: Tensor = self.confidence_head.proj(torch.cat(parts, -1))
        return found[:, 0]


class DFlashHead(BlockHead):
    """A block drafter of DFlash's shape (arXiv 2602.06036)."""

    kind: ClassVar[str] = "dflash"
    noun: ClassVar[str] = "a DFlash head"
    plural: ClassVar[str] = "DFlash heads"


class DSparkHead(BlockHead):
    """A block drafter of DSpark's shape (arXiv 2607.05147)."""

    kind: ClassVar[str] = "dspark"
    noun: ClassVar[str] = "a DSpark head"
    plural: ClassVar[str] = "DSpark heads"
