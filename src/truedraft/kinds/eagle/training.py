"""Training of EAGLE-3 heads (2503.01840), by training-time test, and of P-EAGLE heads (2602.01469), by masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.drafters.heads.head import Head
from truedraft.errors import OptionError
from truedraft.kinds.eagle.drafter import Eagle3, PEagle
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead
from truedraft.kinds.eagle.options import Eagle3SizeOptions, PEagleRunOptions, PEagleSizeOptions
from truedraft.models.attention import AttentionPattern
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.options import check_whole
from truedraft.training.chains import Chains, ChainTrainingConfig, Texts, UnrolledStep
from truedraft.training.texts.self_distillation import WrittenAnswer

_LEAST = 0.2  # of the pairs, at any depth


@dataclass(frozen=True)
class Eagle3TrainingConfig(Eagle3SizeOptions, ChainTrainingConfig):
    """Configuration of a training of an EAGLE-3 head; raises `OptionError` for a value out of its range."""

    head = Eagle3Head
    drafter = Eagle3
    decisive = ChainTrainingConfig.decisive | {"fc_norm", "norm_output"}

    def sizes(self, width: int, vocab_size: int) -> Eagle3Config:
        entries = self.entries(width, vocab_size)
        return Eagle3Config(**entries, reach=self.length, fc_norm=self.fc_norm, norm_output=self.norm_output)

    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Unrolled:
        return Unrolled(head, lm_head, model)


@dataclass(frozen=True)
class PEagleTrainingConfig(PEagleSizeOptions, PEagleRunOptions, ChainTrainingConfig):
    """Configuration of a training of a P-EAGLE head; raises `OptionError` for a value out of its range."""

    head = PEagleHead
    drafter = PEagle
    decisive = ChainTrainingConfig.decisive | {"depth", "own_embedding", "kept"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("depth", self.depth, 1)
        if not 0.0 < self.kept <= 1.0:
            raise OptionError(f"must lie in (0, 1], got {self.kept}", field="kept")

    def sizes(self, width: int, vocab_size: int) -> PEagleConfig:
        return PEagleConfig(
            **self.entries(width, vocab_size),
            own_embedding=self.own_embedding,
            reach=self.length,
            more_layers=self.depth - 1,
            mask_token=vocab_size - 1,
        )

    def new_head(self, lm_head: LmHead) -> Head:
        head: Any = super().new_head(lm_head)
        if head.embed_tokens is not None:
            head.embed_tokens.weight.data.copy_(lm_head.embed(torch.arange(head.config.vocab_size)))
        return head

    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Masked:
        return Masked(head, lm_head, model, self.kept, self.seed)


class Unrolled(Chains):
    """A head that reads answers of its target, and then its own outputs for some steps: training-time test.

    At step k (from 0) the pair at index i has the hidden state, or its replacement, at position i + k and the text's
    token at i + k + 1; it predicts the next token. It attends to pairs 0 to i of step 0, and those of its own index at
    later steps, as in decoding after k drafted tokens (2503.01840, section 3.2).
    """

    def along(self, texts: Texts, chosen: Sequence[Mapping[int, int]]) -> Iterator[UnrolledStep]:
        head, device = self.head, texts.tokens.device
        counts, starts = texts.counts, torch.tensor(texts.starts[:-1], device=device)[:, None]
        # Rows of the pairs, [texts, pairs]; padded with a text's last, which no earlier one attends to.
        most, last = max(counts) - 1, torch.tensor(counts, device=device)[:, None] - 2
        rows = starts + torch.arange(most, device=device).minimum(last)
        self._table.reach(most + head.reach + head.config.rope_start)
        embedded = self._embed(texts.tokens[rows + 1])
        x, seen = head.fuse(texts.vectors)[rows], _StepAttention(head.config.patterns)
        firsts = list(itertools.accumulate(map(len, chosen), initial=0))
        for step in range(head.reach):
            deep = [[pair for pair, steps in own.items() if steps > step] for own in chosen]
            if not any(deep):
                return
            taken: Sequence[Sequence[int]] = deep if step else [range(most)] * len(deep)
            width = max(map(len, taken))
            pairs = torch.tensor([[*own, *[0] * (width - len(own))] for own in taken], device=device)
            entering, read = (each.flatten(0, 1) for each in self._entering(step, pairs, x, embedded))
            rotation = self._table.at(pairs.flatten() + step + head.config.rope_start)
            x = head.step(entering, read, rotation, partial(seen, pairs)).unflatten(0, pairs.shape)
            row_of = [{pair: row for row, pair in enumerate(own)} for own in taken]
            indices = [text * width + row_of[text][pair] for text, own in enumerate(deep) for pair in own]
            places = [start + pair + step + 1 for start, own in zip(texts.starts, deep, strict=False) for pair in own]
            leaving = head.leaving(x.flatten(0, 1)[torch.tensor(indices, device=device)])
            chains = [first + number for first, own in zip(firsts, deep, strict=False) for number in range(len(own))]
            yield UnrolledStep(leaving, *texts.behind(places), torch.tensor(chains, device=device))

    def _entering(self, step: int, pairs: Tensor, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and embeddings, `[texts, rows, width]`, of the pairs `[texts, rows]` of a step.

        `x`: output of the step before, at first the target's hidden states; later its first rows are the pairs'.
        """
        texts = torch.arange(len(pairs), device=pairs.device)[:, None]
        return x[texts, pairs] if step < 2 else x[:, : pairs.shape[1]], embedded[texts, pairs + step]

    def _embed(self, ids: Tensor) -> Tensor:
        own = self.head.embed_tokens
        found: Tensor = self.lm_head.embed(ids) if own is None else own(ids)
        return found.to(next(self.head.parameters()).dtype)


class Masked(Unrolled):
    """A head that reads answers of its target, and masks after each pair, all of a step at once.

    At step k the pair at index i is its k-th mask, at position i + k, and predicts the text's token at i + k + 2. It
    attends to pairs 0 to i of the text, and the masks of its own index up to itself (2602.01469, section 3).

    `kept` is the share of the pairs with a mask that also have the next one, in training, down to a fifth of all.
    """

    def __init__(self, head: PEagleHead, lm_head: LmHead, model: LanguageModel, kept: float, seed: int) -> None:
        super().__init__(head, lm_head, model)
        self._shares, self._seed = np.maximum(kept ** np.arange(head.reach), min(_LEAST, kept)), seed

    def pairs(self, answer: WrittenAnswer, number: int) -> Mapping[int, int]:
        """Worked example: with half kept, 4 of 8 pairs have two steps or more, 2 of these three, and 2 all others."""
        every = super().pairs(answer, number)
        order = np.random.default_rng((self._seed, number)).permutation([*every]).tolist()
        kept = np.ceil(self._shares * len(order))
        lengths = {pair: min(every[pair], int((kept > rank).sum())) for rank, pair in enumerate(order)}
        return dict(sorted(lengths.items(), key=lambda each: -each[1]))

    def _entering(self, step: int, pairs: Tensor, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        if not step:
            return super()._entering(step, pairs, x, embedded)
        config = self.head.config
        mask = self.head.fuse(self.head.mask_hidden[0].chunk(config.merged, dim=-1))
        token = self._embed(torch.tensor([config.mask_token], device=pairs.device))
        return mask.expand(*pairs.shape, -1), token.expand(*pairs.shape, -1)


class _StepAttention:
    """Attention of consecutive steps over all their keys and values so far, with the pattern of each layer."""

    def __init__(self, patterns: Sequence[AttentionPattern]) -> None:
        layers: list[tuple[AttentionPattern, list[Tensor], list[Tensor]]] = [(each, [], []) for each in patterns]
        self._layers = itertools.cycle(layers)

    def __call__(self, pairs: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[rows, heads, head]` and twice `[rows, kv_heads, head]` to `[rows, heads * head]`.

        The pairs `[texts, rows / texts]` of each step are the first ones of the step before, from the third step on.
        """
        pattern, keys, values = next(self._layers)
        shared, scale = query.shape[1] // key.shape[1], 1.0 / math.sqrt(query.shape[-1])
        query, rows = query.unflatten(0, pairs.shape), pairs.shape[1]
        keys.append(key.unflatten(0, pairs.shape).repeat_interleave(shared, 2))
        values.append(value.unflatten(0, pairs.shape).repeat_interleave(shared, 2))
        every, place = keys[0].shape[1], torch.arange(keys[0].shape[1], device=query.device)
        hidden = (place > pairs[..., None]) | pattern.hides(pairs[..., None] + len(keys) - 1, place)
        scores = torch.einsum("tqhd,tkhd->thqk", query, keys[0]).masked_fill(hidden[:, None], -torch.inf)
        own = [torch.einsum("tqhd,tqhd->thq", query, each[:, :rows])[..., None] for each in keys[1:]]
        weights = torch.cat([scores, *own], -1).mul(scale).softmax(-1)
        mixed = torch.einsum("thqk,tkhd->tqhd", weights[..., :every], values[0])
        for step, each in enumerate(values[1:]):
            mixed = mixed + weights[..., every + step].transpose(1, 2)[..., None] * each[:, :rows]
        return mixed.flatten(2).flatten(0, 1)
