"""Block drafters: a few decoder layers guess a block of tokens in one forward, on several of the target's layers.

DFlash (arXiv 2602.06036) guesses each token of the block independently. In DSpark (arXiv 2607.05147) a Markov head adds
logits that depend on the token before, and a confidence head predicts how likely the target accepts each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.drafters.heads.head import Unembed
from truedraft.drafters.heads.layers import DecoderLayer, LayerConfig, LayerHead, head_decoder, is_whole
from truedraft.errors import OptionError
from truedraft.models.attention import AttentionPattern, Full, Window
from truedraft.models.backends.native.heads import NativeBlocks
from truedraft.models.llama import RotaryTable, Rotation

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The number of a layer, queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]` of blocks to the
output `[rows, heads * head]`: each row attends to its own block, and the context of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Sizes of a block drafter. Raises `OptionError` for invalid sizes.

    Attributes:
        block: number of tokens of its input: the text's last one, the *anchor*, and masks.
        mask_id: id with the embedding of an unknown token.
        from_anchor: whether each row guesses the next token, including the anchor's; otherwise masks guess their own.
        markov: entries of the Markov head's embedding of the token before; 0: it has none.
        markov_kind: "vanilla", "gated" by the row's hidden state, or "rnn", which carries a state along the block.
        windows: how many positions before the anchor each layer's rows see.
        window_causal: whether rows see no later rows of their block in layers with a window, as in `speculators`.
    """

    noun = "a block drafter"
    counts: ClassVar[tuple[str, ...]] = ("block", "depth")
    flags = ("from_anchor", "confidence", "confidence_reads_token", "window_causal")
    usual_layers = 5

    block: int
    mask_id: int
    depth: int
    from_anchor: bool = False
    markov: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    confidence_reads_token: bool = False
    window_causal: bool = False

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        if self.reach < 1:
            raise OptionError("a block drafter that reads only the anchor guesses nothing; block must be 2 or more")
        if not is_whole(self.markov, 0) or self.markov_kind not in _MARKOV:
            raise OptionError(
                f"a Markov head has 0 or more entries and is one of {', '.join(_MARKOV)}, got {self.markov!r} and "
                f"{self.markov_kind!r}"
            )
        if self.confidence_reads_token and not (self.confidence and self.markov):
            raise OptionError("a confidence head that reads the token before needs the Markov head's embedding of it")

    @property
    def mask(self) -> int:
        return self.mask_id

    @property
    def decoders(self) -> int:
        return self.depth

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """What each layer's rows see of the context: what the anchor's position sees, itself included."""
        return tuple(Window(size + 1, self.sink) if size else Full() for size in self.windows or (0,) * self.depth)

    @property
    def causal(self) -> tuple[bool, ...]:
        """For each layer whether rows see no later rows of their block."""
        return tuple(self.window_causal and size > 0 for size in self.windows or (0,) * self.depth)

    @property
    def recordable(self) -> bool:
        return super(BlockConfig, self).recordable and not self.window_causal

    @property
    def reach(self) -> int:
        return self.block if self.from_anchor else self.block - 1

    def usual_of(self, count: int) -> tuple[int, ...]:
        """As DFlash: five, evenly from the second to the third last."""
        return tuple(round(1 + (count - 4) * n / 4) for n in range(5)) if count > 7 else ()


class MarkovHead(nn.Module):
    """Logits added to a row from the token before: W2 times W1's entries of the token (2607.05147, section 3)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(config.markov, config.draft_vocab or config.vocab_size, bias=False)

    def forward(self, before: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Input of W2 at rows, and their next state, `[rows, markov]` each.

        `before`, `[rows, markov]`, are W1's entries of the token before each; `x`, `[rows, width]`, enters the LM head;
        `state` is that of the row before, zeros at first.
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
    """Output of a row of a block; `markov` is 0 without a Markov head.

    Attributes:
        x: `[rows, width]`: input of the LM head.
        before: `[rows, markov]`: the Markov head's entries of the token before.
        added: `[rows, markov]`: input of W2.
        state: `[rows, markov]`: for the next row.
    """

    x: Tensor
    before: Tensor
    added: Tensor
    state: Tensor


class BlockHead(LayerHead):
    """An anchor and the target's hidden states before it give distributions of the next tokens (2602.06036, section 4).

    `fc` and a norm merge the layers' hidden states into the *context*, from which every layer computes keys and values.
    The embeddings of the anchor and of masks attend to it and to each other, in both directions.
    """

    place_word = "slot"
    sizes = BlockConfig
    layer: ClassVar[type[DecoderLayer]] = DecoderLayer
    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        width = config.width
        self.fc = nn.Linear(config.merged * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, config.eps)
        self.layers = nn.ModuleList(self.layer(config, width, norms=True) for _ in range(config.depth))
        self._add_ends()
        self.markov_head = _MARKOV[config.markov_kind](config) if config.markov else None
        self.confidence_head = _ConfidenceHead(config) if config.confidence else None

    @property
    def tables(self) -> list[Tensor]:
        """Weights with a row for each id, which are no matrices for the optimizer."""
        own = [] if self.lm_head is None else [self.lm_head.weight]
        markov = self.markov_head
        return own if markov is None else [*own, markov.markov_w1.weight, markov.markov_w2.weight]

    def context(self, vectors: Sequence[Tensor]) -> Tensor:
        """Merge the hidden states of the layers, `[rows, width]` each."""
        merged: Tensor = self.hidden_norm(self.fc(torch.cat(list(vectors), dim=-1)))
        return merged

    def context_keys(self, context: Tensor, rotation: Rotation) -> Iterator[tuple[Tensor, Tensor]]:
        """`[rows, kv_heads, head]` of each layer, from a context `[rows, width]`."""
        for layer in self._decoders():
            yield layer.self_attn.keys(context, rotation)

    def inputs(self, anchors: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embeddings of the blocks' input, `[blocks, block, width]`, from the anchors' ids `[blocks]`."""
        ids = functional.pad(anchors[:, None], (0, self.config.block - 1), value=self.config.mask_id)
        embedded: Tensor = (self.embed_tokens or embed)(ids.flatten())
        return embedded.to(self.norm.weight.dtype).view(*ids.shape, -1)

    def vectors(self, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Input of the LM head at each guessed token, `[blocks, reach, width]`, from `inputs`."""
        x = embedded.flatten(0, 1)
        for number, layer in enumerate(self._decoders()):
            x = layer.run(x, layer.input_layernorm(x), rotation, partial(attend, number))
        rows = x.view(*embedded.shape[:2], -1)
        guessed: Tensor = self.norm(rows if self.config.from_anchor else rows[:, 1:])
        return guessed

    def _decoders(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.layers))

    def native_blocks(self, table: RotaryTable, bits: int) -> NativeBlocks | None:
        """The layers as one native forward, which takes over their weights; None if decoder.c does not support them.

        `bits` are those of its weights; 0: unquantized.
        """
        config, convs = self.config, self.convolutions()
        if config.sink or any(config.causal) or not NativeBlocks.fits_convs(convs):
            return None
        placeholder = nn.Linear(config.width, 1, bias=False, dtype=self.norm.weight.dtype)
        llama = head_decoder(self, self._decoders(), table, placeholder)
        if not NativeBlocks.fits(llama):
            return None
        made = NativeBlocks(llama, self.fc, self.hidden_norm.weight.detach(), config.block, convs)
        if bits:
            made.quantize(bits)
        del self.fc, self.layers
        return made

    def convolutions(self) -> list[tuple[Tensor, nn.Linear]]:
        """Those around attention and MLP of each layer, if it has any, as of `NativeBlocks`."""
        return []

    def leaving_after(self, x: Tensor, tokens: Tensor, state: Tensor | None = None) -> Leaving:
        """Output of rows, given the token before each; `x` is `[rows, width]` of `vectors`, `state` None at first."""
        if self.markov_head is None:
            nothing = x[:, :0]
            return Leaving(x, nothing, nothing, nothing)
        before = self.markov_head.markov_w1(tokens).to(x.dtype)
        added, state = self.markov_head(before, x, torch.zeros_like(before) if state is None else state)
        return Leaving(x, before, added, state)

    def base_logits(self, x: Tensor, output: Unembed) -> Tensor:
        """`[..., ids]` of inputs of the LM head `[..., width]`; `output` is the target's."""
        rows = x.flatten(0, -2)
        found: Tensor = output(rows) if self.lm_head is None else self.lm_head(rows)
        return found.unflatten(0, x.shape[:-1])

    def added_to(self, logits: Tensor, leaving: Leaving) -> Tensor:
        """`base_logits` of rows plus those of the Markov head."""
        if self.markov_head is None:
            return logits
        added: Tensor = self.markov_head.markov_w2(leaving.added)
        return logits + added[:, : logits.shape[1]]

    def logits(self, leaving: Leaving, output: Unembed) -> Tensor:
        """`[rows, ids]` of the draft; `output` is the target's LM head."""
        return self.added_to(self.base_logits(leaving.x, output), leaving)

    def acceptance(self, leaving: Leaving) -> Tensor:
        """Logits `[rows]` of acceptance before a token is drawn; `OptionError` without a confidence head."""
        if self.confidence_head is None:
            raise OptionError("this head has no confidence head, so it does not say how likely its tokens are accepted")
        parts = [leaving.x, leaving.before] if self.config.confidence_reads_token else [leaving.x]
        found: Tensor = self.confidence_head.proj(torch.cat(parts, -1))
        return found[:, 0]


class DFlashHead(BlockHead):
    """A block drafter as in DFlash (arXiv 2602.06036)."""

    kind = "dflash"
    noun = "a DFlash head"
    plural = "DFlash heads"
    speculators = "dflash", "DFlashSpeculator"
    architectures = ("DFlashDraftModel",)


class DSparkHead(BlockHead):
    """A block drafter as in DSpark (arXiv 2607.05147)."""

    kind = "dspark"
    noun = "a DSpark head"
    plural = "DSpark heads"
    speculators = "dspark", "DSparkSpeculator"
    architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
