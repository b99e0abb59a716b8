"""DFlash 2: DFlash with convolutions along the block, and a selector of tokens that depend on those before them.

No paper describes it; this follows the published checkpoints (August 2026). Two modules are added to DFlash:

- A *grouped dynamic convolution* around attention and MLP of each layer. Its coefficients are a learned kernel plus a
  correction from the sublayer's input, which neighbouring entries share.
- A *candidate selector*: the likeliest ids of each slot are its candidates, and the logit of candidate c after the
  token p is u[c] + <A[p] * W h, B[c]>, with u the LM head's logits and h the slot's hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.core.top_k import stable_topk
from truedraft.drafters.heads.head import Unembed
from truedraft.drafters.heads.layers import Attend, DecoderLayer, LayerConfig
from truedraft.errors import OptionError
from truedraft.kinds.block.module import BlockConfig, BlockHead, Leaving
from truedraft.models.llama import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """Sizes of a DFlash 2 head. Raises `OptionError` for invalid sizes.

    Attributes:
        taps: rows that a convolution reads: the row itself and those before it.
        group: neighbouring entries that share a convolution's corrections.
        rank: entries of the selector's embeddings of an id.
        candidates: ids of a slot among which it selects.
        embedding_scale: of the block's embeddings.
        factor, cap: how the target's logits are finished (`LogitFinish`), if the head names it.
    """

    noun = "a DFlash 2 head"
    counts = (*BlockConfig.counts, "taps", "group", "rank", "candidates")

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16
    embedding_scale: float = 1.0
    factor: float = 1.0
    cap: float | None = None

    def __post_init__(self) -> None:
        BlockConfig.__post_init__(self)
        for name in ("embedding_scale", "factor", *(["cap"] if self.cap is not None else [])):
            if not isinstance(value := getattr(self, name), int | float) or not 0.0 < value < math.inf:
                raise OptionError(f"{name} of {self.noun} must be a number above 0, got {value!r}")
        if self.width % self.group or self.taps > self.block:
            raise OptionError(
                f"a convolution's groups divide {self.width} entries and its taps are at most the block's "
                f"{self.block} rows, got groups of {self.group} and {self.taps} taps"
            )
        if self.candidates > (most := self.draft_vocab or self.vocab_size):
            raise OptionError(f"candidates of {self.noun} must be at most its {most} ids, got {self.candidates}")
        if self.markov or self.confidence:
            raise OptionError("a DFlash 2 head has neither a Markov head nor a confidence head")


class GroupedConv(nn.Module):
    """A causal convolution along a block, before and after a sublayer; it starts as the identity."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        kernel = torch.zeros(2, config.taps, config.width)
        kernel[:, 0] = 1.0
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(config.width, 2 * config.taps * (config.width // config.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        self._shape = config.block, 2, config.taps, config.width // config.group

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients before and after a sublayer, from its input `[rows, width]` in whole blocks.

        `[blocks, block, taps, groups, group]` each.
        """
        deltas = self.kernel_projection(x).view(-1, *self._shape)
        before, after = (deltas[..., None] + self.base_kernel.unflatten(-1, (self._shape[-1], -1))).unbind(2)
        return before, after


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Row i of a block becomes the sum over taps t of coefficient [i, t] times row i - t; rows before it are 0.

    `x` is `[rows, width]` in whole blocks, the kernel as of `GroupedConv.kernels`.
    """
    blocks, block, taps, *groups = kernel.shape
    rows = x.view(blocks, block, *groups)
    mixed = kernel[:, :, 0] * rows
    for tap in range(1, taps):
        mixed = mixed + functional.pad(kernel[:, tap:, tap] * rows[:, : block - tap], (0, 0, 0, 0, tap, 0))
    return mixed.view(x.shape)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions along the block around its attention and its MLP."""

    def __init__(self, config: LayerConfig, entries: int, *, norms: bool) -> None:
        super().__init__(config, entries, norms=norms)
        self.attention_conv = GroupedConv(cast(DFlash2Config, config))
        self.mlp_conv = GroupedConv(cast(DFlash2Config, config))

    def run(self, x: Tensor, entering: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        before, after = self.attention_conv.kernels(entering)
        x = x + convolved(self.self_attn(convolved(entering, before), rotation, attend), after)
        entering = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(entering)
        return x + convolved(self.mlp(convolved(entering, before)), after)


class CandidateSelector(nn.Module):
    """Logits added to candidates by the token before them; at first 0."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.rank))
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab or config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(config.width, config.rank, bias=False)

    def edges(self, entries: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Logits of candidates after the token before, float32 `[rows, candidates]`.

        Args:
            entries: `[rows, rank]`: of the token before, times those of the slot.
            ids: `[rows, candidates]`, with the LM head's `logits`, float32.
        """
        return logits + torch.einsum("ir,icr->ic", entries, self.successor_codebook[ids]).float()


class DFlash2Head(BlockHead):
    """A block drafter as in DFlash 2."""

    kind = "dflash2"
    noun = "a DFlash 2 head"
    plural = "DFlash 2 heads"
    speculators = "dflash2", "DFlash2DraftModel"
    architectures = ("DFlash2DraftModel",)
    sizes = DFlash2Config
    layer = ConvolvedLayer
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def inputs(self, anchors: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        embedded, scale = super().inputs(anchors, embed), self.config.embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    def convolutions(self) -> list[tuple[Tensor, nn.Linear]]:
        layers = cast("list[ConvolvedLayer]", self._decoders())
        every = [each for layer in layers for each in (layer.attention_conv, layer.mlp_conv)]
        return [(each.base_kernel.detach(), each.kernel_projection) for each in every]

    @property
    def tables(self) -> list[Tensor]:
        selector = self.candidate_selector
        return [*super().tables, selector.predecessor_codebook, selector.successor_codebook]

    def leaving_after(self, x: Tensor, tokens: Tensor, state: Tensor | None = None) -> Leaving:
        selector, nothing = self.candidate_selector, x[:, :0]
        return Leaving(x, nothing, selector.predecessor_codebook[tokens] * selector.hidden_projection(x), nothing)

    def logits(self, leaving: Leaving, output: Unembed) -> Tensor:
        """Of the likeliest ids after the token before, float32 `[rows, ids]`; -inf elsewhere."""
        logits = super().logits(leaving, output)
        return self.selected(leaving.added, *self.candidates(logits), logits.shape[1])

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest ids, the likeliest first, and their logits in float32: `[rows, candidates]` each."""
        logits = logits.float()
        ids = stable_topk(logits, min(self.config.candidates, logits.shape[1]))
        return ids, logits.gather(1, ids)

    def selected(self, entries: Tensor, ids: Tensor, logits: Tensor, vocab: int) -> Tensor:
        """`CandidateSelector.edges` as logits `[rows, vocab]`, -inf elsewhere."""
        edges = self.candidate_selector.edges(entries, ids, logits)
        return edges.new_full((len(edges), vocab), -torch.inf).scatter_(1, ids, edges)
