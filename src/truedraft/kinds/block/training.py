"""Training of block drafters (DFlash 2602.06036, DSpark 2607.05147): blocks at random anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.kinds.block.drafter import DFlash, DSpark
from truedraft.kinds.block.module import Attend, BlockConfig, BlockHead, DFlashHead, DSparkHead, Leaving
from truedraft.kinds.block.options import BlockRunOptions, BlockSizeOptions, DSparkRunOptions, DSparkSizeOptions
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.options import check_whole
from truedraft.training.chains import Chains, ChainTrainingConfig, Texts, UnrolledStep
from truedraft.training.optimizer import MixedOptimizer
from truedraft.training.texts.self_distillation import WrittenAnswer

_AT_ONCE = 256  # blocks of a text with scores in memory


@dataclass(frozen=True)
class BlockTrainingConfig(BlockSizeOptions, BlockRunOptions, ChainTrainingConfig):
    """Configuration of a training of a block drafter; raises `OptionError` for a value out of its range."""

    decisive = ChainTrainingConfig.decisive | {"depth", "anchors"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("depth", self.depth, 1)
        check_whole("anchors", self.anchors, 1)

    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Blocks:
        return Blocks(head, lm_head, model, self.anchors, self.seed)

    def optimizer_of(self, head: Any) -> MixedOptimizer:
        return MixedOptimizer(head, self.optimizer, head.tables)


@dataclass(frozen=True)
class DFlashTrainingConfig(BlockTrainingConfig):
    """Configuration of a training of a DFlash head; raises `OptionError` for a value out of its range."""

    head = DFlashHead
    drafter = DFlash

    def sizes(self, width: int, vocab_size: int) -> BlockConfig:
        entries = self.entries(width, vocab_size)
        return BlockConfig(**entries, block=self.length + 1, mask_id=vocab_size - 1, depth=self.depth)


@dataclass(frozen=True)
class DSparkTrainingConfig(DSparkSizeOptions, DSparkRunOptions, BlockTrainingConfig):
    """Configuration of a training of a DSpark head; raises `OptionError` for a value out of its range."""

    head = DSparkHead
    drafter = DSpark
    decisive = BlockTrainingConfig.decisive | {"markov", "markov_kind"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("markov", self.markov, 1)

    def sizes(self, width: int, vocab_size: int) -> BlockConfig:
        return BlockConfig(
            **self.entries(width, vocab_size),
            block=self.length,
            mask_id=vocab_size - 1,
            depth=self.depth,
            from_anchor=True,
            markov=self.markov,
            markov_kind=self.markov_kind,
            confidence=True,
            confidence_reads_token=True,
        )


class Blocks(Chains):
    """A block drafter that reads answers of its target: a block from each anchor, after the text's tokens.

    The pair at index i (`chains_in`) has its anchor at position i + 1; step k predicts the token at i + k + 2. The
    output of a row is the LM head's input, then the Markov head's entries of the token before.

    `anchors` is the maximum number per answer in training.
    """

    head: BlockHead

    def __init__(self, head: BlockHead, lm_head: LmHead, model: LanguageModel, anchors: int, seed: int) -> None:
        super().__init__(head, lm_head, model)
        self._anchors, self._seed = anchors, seed

    def pairs(self, answer: WrittenAnswer, number: int) -> Mapping[int, int]:
        every = super().pairs(answer, number)
        if len(every) <= self._anchors:
            return every
        chosen = np.random.default_rng((self._seed, number)).choice([*every], self._anchors, replace=False)
        return {pair: every[pair] for pair in sorted(chosen.tolist())}

    def along(self, texts: Texts, chosen: Sequence[Mapping[int, int]]) -> Iterator[UnrolledStep]:
        head, device = self.head, texts.tokens.device
        x = self._guessed(texts, [[pair + 1 for pair in own] for own in chosen])
        starts = zip(texts.starts, chosen, strict=False)
        anchors = np.array([start + pair + 1 for start, own in starts for pair in own])
        lengths = np.array([steps for own in chosen for steps in own.values()])
        state: Tensor | None = None
        for step in range(head.reach):
            on = np.flatnonzero(lengths > step)
            if not len(on):
                return
            before = texts.tokens[torch.as_tensor(np.minimum(anchors + step, texts.starts[-1] - 1), device=device)]
            leaving = self.leaving(x[:, step], before, state)
            state, blocks = leaving.state, torch.as_tensor(on, device=device)
            together = torch.cat([leaving.x, leaving.before, leaving.added], -1)
            yield UnrolledStep(together[blocks], *texts.behind(anchors[on] + step), blocks)

    def leaving(self, x: Tensor, before: Tensor, state: Tensor | None) -> Leaving:
        return self.head.leaving_after(x, before, state)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.head.logits(self._parts(vectors), self.lm_head)

    def acceptance(self, leaving: Tensor) -> Tensor | None:
        return None if self.head.confidence_head is None else self.head.acceptance(self._parts(leaving))

    def _parts(self, together: Tensor) -> Leaving:
        config = self.head.config
        x, before, added = together.split([config.width, config.markov, config.markov], -1)
        return Leaving(x, before, added, added[:, :0])

    def _guessed(self, texts: Texts, anchors: Sequence[Sequence[int]]) -> Tensor:
        """Input of the LM head, `[blocks, reach, width]`, at anchors by their positions."""
        head, tokens, counts, device = self.head, texts.tokens, texts.counts, texts.tokens.device
        longest = max(counts)
        self._table.reach(longest + head.config.block)
        positions = torch.cat([torch.arange(count, device=device) for count in counts])
        made = head.context_keys(head.context(texts.vectors), self._table.at(positions))
        # Rows of the texts' tokens, [texts, tokens]; padded with a text's last, which no anchor attends to.
        last = torch.tensor(counts, device=device)[:, None] - 1
        first = torch.tensor(texts.starts[:-1], device=device)[:, None]
        rows = first + torch.arange(longest, device=device).minimum(last)
        context = [(key[rows], value[rows]) for key, value in made]
        most = max(map(len, anchors))
        # Missing anchors of a text are replaced by its first token; their blocks are dropped at the end.
        places = torch.tensor([[*own, *[0] * (most - len(own))] for own in anchors], device=device)
        parts = []
        for some in places.split(_AT_ONCE, dim=1):
            embedded = head.inputs(tokens[first + some].flatten(), self.lm_head.embed)
            at = (some.flatten()[:, None] + torch.arange(head.config.block, device=device)).flatten()
            x = head.vectors(embedded, self._table.at(at), _block_attention(context, some, head.config))
            parts.append(x.unflatten(0, some.shape))
        indices = [text * most + number for text, own in enumerate(anchors) for number in range(len(own))]
        return torch.cat(parts, 1).flatten(0, 1)[torch.tensor(indices, device=device)]


def _block_attention(context: Sequence[tuple[Tensor, Tensor]], anchors: Tensor, config: BlockConfig) -> Attend:
    """Each row attends to the context before its anchor that its layer sees, and to its own block.

    Args:
        context: per layer, keys and values `[texts, tokens, kv_heads, head]`.
        anchors: `[texts, blocks]`: positions.
    """
    (texts, blocks), block = anchors.shape, config.block
    positions = torch.arange(context[0][0].shape[1], device=anchors.device)
    of_rows = anchors.repeat_interleave(block, 1)[..., None]
    unseen = [(positions >= of_rows) | pattern.hides(of_rows, positions) for pattern in config.patterns]
    later = torch.ones(block, block, dtype=torch.bool, device=anchors.device).triu_(1).repeat(blocks, 1)

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        seen, read = (each.repeat_interleave(shared, 2) for each in context[number])
        own = [each.unflatten(0, (texts, blocks, block)).repeat_interleave(shared, 3) for each in (key, value)]
        query = query.unflatten(0, (texts, blocks, block))
        before = torch.einsum("tqhd,tkhd->thqk", query.flatten(1, 2), seen)
        before = before.masked_fill(unseen[number][:, None], -torch.inf)  # [texts, heads, rows, tokens]
        within = torch.einsum("tbqhd,tbkhd->thbqk", query, own[0]).flatten(2, 3)
        if config.causal[number]:
            within = within.masked_fill(later, -torch.inf)
        weights = torch.cat([before, within], -1).mul(1.0 / math.sqrt(query.shape[-1])).softmax(-1)
        before, within = weights.split([seen.shape[1], block], -1)
        mixed = torch.einsum("thqk,tkhd->tqhd", before, read)
        within = within.unflatten(2, (blocks, block))
        mixed = mixed + torch.einsum("thbqk,tbkhd->tbqhd", within, own[1]).flatten(1, 2)
        return mixed.flatten(2).flatten(0, 1)

    return attend
