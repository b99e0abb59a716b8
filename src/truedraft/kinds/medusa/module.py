"""Medusa heads: each guesses one of the tokens after the next, all from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from truedraft.core.rank_tree import RankTree
from truedraft.core.top_k import TopK
from truedraft.drafters.heads.head import (
    MOST_MODULES,
    HeadRecord,
    ResidualBlock,
    Unembed,
    VectorHead,
    linears_of,
    over_whole_vocabulary,
    placed,
    scaled_embedding,
)
from truedraft.errors import OptionError
from truedraft.models.base import HeadRun, LanguageModel
from truedraft.models.packed_linear import filled, joined

_FACTS = "facts"  # key next to the trees


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa heads. Raises `OptionError` for invalid sizes.

    Attributes:
        heads: number of guessed tokens after the next.
        tied: whether the heads end in the target's LM head, or each in its own linear layer.
        reads_token: whether they also read the embedding of the token drawn from the hidden state; the paper's do not.
        draft_vocab: size of a reduced vocabulary of heads with their own outputs; 0 is the whole one.
    """

    width: int
    vocab_size: int
    heads: int = 4
    layers: int = 1
    tied: bool = True
    reads_token: bool = False
    draft_vocab: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "vocab_size", "heads", "layers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of Medusa heads must be 1 or more, got {getattr(self, name)}")
        if (most := max(self.heads, self.layers)) > MOST_MODULES:
            raise OptionError(f"heads and layers of Medusa heads must be at most {MOST_MODULES}, got {most}")
        if not 0 <= self.draft_vocab <= self.vocab_size or (self.draft_vocab and self.tied):
            raise OptionError(
                f"Medusa heads with outputs of their own guess among 1 to {self.vocab_size} ids, got {self.draft_vocab}"
            )


class MedusaHead(nn.Module):
    """One head: residual blocks, then the target's LM head or its own linear layer."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(config.width) for _ in range(config.layers)))
        self.output = (
            None if config.tied else nn.Linear(config.width, config.draft_vocab or config.vocab_size, bias=False)
        )

    @property
    def linears(self) -> list[nn.Linear]:
        return linears_of(self.blocks)


class MedusaHeads(VectorHead):
    """Head k (from 0) guesses the token k + 2 positions after the hidden state's own token: h -> W2 (h + SiLU(W1 h)).

    Medusa 2401.10774, section 2.1.1. W1 starts at 0 and W2 at the LM head, so every head starts as the LM head itself.

    With `reads_token`, a linear layer of the token's embedding e, scaled to a root mean square of 1, is added to h: h +
    Wt e / rms(e). All heads share it, and it starts at 0. (The first Hydra head does the same, 2402.05109.)
    """

    kind = "medusa"
    noun = "Medusa heads"
    plural = "Medusa heads"
    place_word = "head"
    sizes = MedusaConfig
    facts_file = "trees.json"
    config: MedusaConfig
    draft_ids: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.token = nn.Linear(config.width, config.width, bias=False) if config.reads_token else None
        if self.token is not None:
            nn.init.zeros_(self.token.weight)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.heads))
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    def each(self) -> Iterator[MedusaHead]:
        return (head for head in self.heads if isinstance(head, MedusaHead))

    @property
    def reach(self) -> int:
        return self.config.heads

    @property
    def reads_tokens(self) -> bool:
        return self.config.reads_token

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [head.output for head in self.each()]

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        for head in self.each():
            if head.output is not None:
                head.output.weight.copy_(weight if self.draft_ids is None else weight[self.draft_ids])

    def entering(self, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Input of the blocks, `[rows, width]`: hidden states, plus the drawn tokens' embeddings if heads read these.

        Raises `ValueError` if heads that read tokens got none.
        """
        if self.token is None:
            return hidden
        if embedded is None:
            raise ValueError("these Medusa heads read the embedding of the token drawn from each vector; give it too")
        return hidden + self.token(scaled_embedding(embedded.to(hidden.dtype)))

    def vectors(self, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Output of the blocks, `[heads, rows, width]`; arguments as of `entering`."""
        entering = self.entering(hidden, embedded)
        return torch.stack([head.blocks(entering) for head in self.each()])

    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.vectors(hidden, embedded[0])  # heads read the first token at most

    def logits(
        self, hidden: Tensor, unembed: Unembed, finish: Callable[[Tensor], Tensor], embedded: Tensor | None = None
    ) -> Tensor:
        """Logits `[heads, rows, vocab]`; `finish` is the target's scale and soft-cap, for heads' own outputs."""
        vectors = self.vectors(hidden, embedded)
        if self.config.tied:
            return unembed(vectors.flatten(0, 1)).unflatten(0, vectors.shape[:2])
        outputs, vocab = [head.output for head in self.each() if head.output is not None], self.config.vocab_size
        logits = (finish(output(each)) for output, each in zip(outputs, vectors, strict=True))
        return torch.stack([over_whole_vocabulary(each, self.draft_ids, vocab) for each in logits])

    def _kept(self, record: HeadRecord) -> dict[str, Any]:
        return {kind: tree.as_dict() for kind, tree in record.trees.items()} | {_FACTS: dict(record.facts)}

    @classmethod
    def _read(cls, kept: dict[str, Any]) -> tuple[Mapping[str, RankTree], Mapping[str, Any]]:
        facts = kept.pop(_FACTS, {})
        return {kind: RankTree.of(tree) for kind, tree in kept.items()}, facts


class MedusaRunner:
    """The first `depth` heads, in the dtype and on the device of a target; their weights are copied."""

    def __init__(self, heads: MedusaHeads, target: LanguageModel, depth: int) -> None:
        used = list(heads.each())[:depth]
        self._target = target
        self._token = None if heads.token is None else placed(*joined([heads.token]), target)
        self._used, self._ids = used, heads.draft_ids
        run = target.shared_heads([head.linears for head in used]) if heads.config.tied and used else None
        self._run: HeadRun = run or self._plain

    @cached_property
    def _plain(self) -> _Plain:
        return _Plain(self._used, self._target, self._ids)

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, depth: int, ranks: int, tokens: Tensor | None = None) -> TopK:
        """The likeliest ids `[depth, rows, ranks]` by the first `depth` heads; a row's guesses depend only on it.

        `hidden`, `[rows, width]`, are inputs of the target's LM head, from which `tokens`, `[rows]`, int64, were drawn;
        only heads that read tokens need these.
        """
        return self._run(self._entering(hidden, tokens), depth, ranks)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, depth: int, tokens: Tensor | None = None) -> Tensor:
        """`[depth, rows, vocab]`; arguments as for `likeliest`."""
        return self._plain.logits(self._entering(hidden, tokens), depth)

    def _entering(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        if self._token is None:
            return hidden
        assert tokens is not None, "these heads read tokens"
        scaled = scaled_embedding(self._target.embed(tokens.to(hidden.device)))
        return hidden + self._token(filled(scaled))[: len(hidden)]


class _Plain:
    """Products in torch: the first blocks of all heads read one hidden state, so they are one product."""

    def __init__(self, heads: Sequence[MedusaHead], target: LanguageModel, ids: Tensor | None) -> None:
        self._target, self._ids = target, None if ids is None else ids.to(target.device)
        self._heads = len(heads)
        self._first = placed(*joined([head.linears[0] for head in heads]), target)
        layers = len(heads[0].linears)
        self._later = [[placed(*joined([head.linears[j]]), target) for head in heads] for j in range(1, layers)]
        self._outputs = [placed(*joined([head.output]), target) for head in heads if head.output is not None]

    def __call__(self, hidden: Tensor, depth: int, ranks: int) -> TopK:
        if self._outputs:
            return TopK.of(self.logits(hidden, depth).flatten(0, 1), ranks).view(depth, len(hidden))
        return self._target.likeliest(self._leaving(hidden, depth).flatten(0, 1), ranks).view(depth, len(hidden))

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        vectors = self._leaving(hidden, depth)
        rows, vocab, finish = len(hidden), self._target.vocab_size, self._target.finish_logits
        if not self._outputs:
            return self._target.unembed(vectors.flatten(0, 1)).view(depth, rows, -1)
        pairs = zip(vectors, self._outputs, strict=False)
        products = (finish(output(filled(x).contiguous())[:rows]) for x, output in pairs)
        return torch.stack([over_whole_vocabulary(each, self._ids, vocab) for each in products])

    def _leaving(self, hidden: Tensor, depth: int) -> Tensor:
        """Output of the blocks, `[depth, rows, width]`."""
        rows, width = hidden.shape
        hidden = filled(hidden)
        steps = self._first(hidden).view(len(hidden), self._heads, width)[:, :depth]
        vectors = (hidden[:, None] + silu(steps)).transpose(0, 1)  # [depth, rows, width]
        for layers in self._later:
            pairs = zip(vectors, layers, strict=False)
            vectors = torch.stack([x + silu(layer(x.contiguous())) for x, layer in pairs])
        return vectors[:, :rows]
