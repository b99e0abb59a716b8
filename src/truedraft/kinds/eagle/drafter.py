"""Heads that read pairs of a hidden state and the next token, level by level: EAGLE-3 and similar heads."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.head import Head
from truedraft.drafters.heads.layers import Attend, bits_for, copied, head_decoder, packed
from truedraft.drafters.heads.levels import UNRECORDED_WINDOWS, LevelDrafter, LevelRunner, Tree
from truedraft.drafters.heads.texts import READ_TOKENS
from truedraft.drafters.tree_builder import DraftTree
from truedraft.kinds.eagle.module import Eagle3Head, PEagleHead
from truedraft.models.attention import ForwardPlan, Scoring
from truedraft.models.backends.graphs.heads import GraphPairs, Grow
from truedraft.models.backends.graphs.replay import MOST_RECORDED_TOKENS, Outputs, Recorder
from truedraft.models.backends.native.heads import NativePairs
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.models.llama import RotaryTable


class PairRunner(LevelRunner, ABC):
    """A head that reads pairs of hidden states and tokens, as it runs with a target."""

    graphs: GraphPairs | None

    @abstractmethod
    def forward(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        """Read pairs of hidden states and tokens; caches store their keys and values.

        Args:
            vectors: hidden state before each token: this method's output, `[total, width]`, or, if `observed`, the
                target's layers concatenated, `[total, layers * width]`.

        Returns:
            The replacement of the target's hidden states at the required rows, `[rows, width]`, and logits `[rows,
            guessed]`, at most the target's ids.
        """


HeadT = TypeVar("HeadT", bound=Head)
PairRunnerT = TypeVar("PairRunnerT", bound=PairRunner)


class Eagle3Runner(PairRunner):
    """An EAGLE-3 head with copied weights.

    Args:
        recorder: makes its recorded graphs; None is CUDA graphs on a CUDA device, else none.
        before: of the same sizes and target; its pages are reused.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: LanguageModel,
        recorder: Recorder | None = None,
        before: Eagle3Runner | None = None,
    ) -> None:
        self._head, self._target, config = copied(head, target), target, head.config
        like = self._head.norm.weight
        self._table = self._head.rotary(like)
        self._scoring = Scoring(config.head**-0.5)
        self.native: NativePairs | None = None
        graphs = None
        if config.recordable and (recorder is not None or target.device.type == "cuda"):
            sizes, widths = (
                (config.decoders, config.kv_heads, config.head),
                (config.width, config.merged * config.width),
            )
            start, patterns, most = config.rope_start, config.patterns, config.most_positions
            reused = None if before is None else before.graphs
            graphs = GraphPairs(self._read, self._table, start, patterns, sizes, widths, like, most, recorder, reused)
        else:
            bits = bits_for(self._head)
            self.native = _native(self._head, self._table, bits)
            if self.native is None:
                packed(self._head, bits)
        self._run = self._by_modules if self.native is None else self.native.run_pairs
        super().__init__(config, target, graphs)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        if self.graphs is not None:
            return self.graphs.run(segments, vectors, observed)
        plan = ForwardPlan.of(segments, self.device, 1)
        if start := self._head.config.rope_start:
            plan = replace(plan, positions=plan.positions + start, furthest=plan.furthest + start)
        x, logits = self._run(plan, self._embed(plan.tokens[0]), vectors, observed)
        return x, logits[:, : self._target.vocab_size]

    def _by_modules(
        self, plan: ForwardPlan, embedded: Tensor, vectors: Tensor, observed: bool
    ) -> tuple[Tensor, Tensor]:
        self._table.reach(plan.furthest)
        attend = partial(self._attend, plan, itertools.count())
        return self._through(embedded, plan.positions[0], vectors, observed, attend, plan.rows)

    def _read(
        self, tokens: Tensor, positions: Tensor, vectors: Tensor, observed: bool, attention: Attend, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions = positions + self._head.config.rope_start
        x, logits = self._through(self._embed(tokens), positions, vectors, observed, attention, rows)
        return x, logits[:, : self._target.vocab_size]

    def _through(
        self, embedded: Tensor, positions: Tensor, vectors: Tensor, observed: bool, attention: Attend, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = self._head
        if observed:
            vectors = head.fuse(vectors.chunk(head.config.merged, dim=-1))
        x = head.step(vectors, embedded, self._table.at(positions), attention).index_select(0, rows)
        leaving = head.leaving(x)
        return x, self._target.unembed(leaving) if head.lm_head is None else head.lm_head(leaving)

    def _attend(self, plan: ForwardPlan, calls: Iterator[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = next(calls)
        return plan.attend_rows(call, self._head.config.patterns[call], self._scoring, query, key, value)

    def _embed(self, tokens: Tensor) -> Tensor:
        own = self._head.embed_tokens
        found: Tensor = self._target.embed(tokens) if own is None else own(tokens)
        return found.to(self._target.dtype)


def _native(head: Eagle3Head, table: RotaryTable, bits: int) -> NativePairs | None:
    """A head's layers as one native forward, which takes over its weights; None if decoder.c does not support it."""
    config = head.config
    if head.lm_head is None or config.sink:
        return None

    every: list[Any] = [head.midlayer, *head.layers.values()]
    llama = head_decoder(head, every, table, head.lm_head)
    if not NativePairs.fits(llama):
        return None
    made = NativePairs(
        llama,
        head.fc,
        [each.detach() for each in (head.fc_norm if head.input_norm is None else head.input_norm).parameters()],
        head.midlayer.hidden_norm.weight.detach(),
        normed_stream=config.norm_before_residual,
        normed_end=config.norm_output,
    )
    if bits:
        made.quantize(bits)
    return made


class PairDrafter(LevelDrafter[HeadT, PairRunnerT]):
    """Drafts with a head that reads pairs of a hidden state and the next token.

    A level is one forward for all requests, in which the head's output replaces the target's hidden state.
    """

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        runner = self._running[0]
        vectors, logits = self._catch_up(level)
        while level:
            rows = {each: row for row, each in enumerate((own, node) for own in level for node in own.open)}
            level = grow(level, logits)
            if level:
                above = [rows[own, parent] for own in level for parent in own.unfed_parents]
                vectors = vectors.index_select(0, transfers.upload(above, vectors.device))
                vectors, logits = runner.forward([own.segment() for own in level], vectors, False)

    def _masks_below(self, levels: int) -> tuple[Tensor, Tensor]:
        """Tokens and hidden states to read after the text and then drop: none."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0)

    def _catch_up(self, trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor]:
        """Read the unread pairs; the runner's output at the last one."""
        segments, vectors = self._ends(trees, [tree.levels for tree in trees])
        found = self._running[0].forward(segments, vectors, True)
        _commit_texts(segments)
        return found

    @torch.inference_mode()
    def _run_at_once(
        self, trees: Sequence[Tree], levels: int, beams: int, grow: Grow, numbers: Sequence[Tensor]
    ) -> Outputs:
        segments, vectors = self._ends(trees, [levels] * len(trees), MOST_RECORDED_TOKENS)
        graphs = self._running[0].graphs
        assert graphs is not None
        found = graphs.run_trees(segments, vectors, levels, beams, grow, numbers)
        _commit_texts(segments)
        return found

    def _read(self, cache: RequestCache, tokens: Sequence[int], vectors: Tensor) -> None:
        segment = Segment(cache, torch.tensor(tokens), chain_shape(len(tokens)), ())
        self._running[0].forward([segment], vectors, True)
        cache.commit(range(len(tokens)))

    def _ends(
        self, trees: Sequence[DraftTree], levels: Sequence[int], most: int = READ_TOKENS
    ) -> tuple[list[Segment], Tensor]:
        """Input of one forward: texts' last pairs, at most `most`, what follows, and hidden states `[total, ...]`."""
        segments: list[Segment] = []
        inputs: list[Tensor] = []
        for tree, deep in zip(trees, levels, strict=True):
            cache, vectors = self._texts[tree.request.id].cache, self._shared.unread(tree.request, most)
            tokens = torch.tensor(tree.request.tokens[-len(vectors) :])
            more, below = self._masks_below(deep)
            count = len(tokens) + len(more)
            rows = range(len(tokens) - 1, count)
            segments.append(Segment(cache, torch.cat([tokens, more]), chain_shape(count), rows))
            inputs += [vectors, below] if len(more) else [vectors]
        return segments, torch.cat(inputs)


def _commit_texts(segments: Sequence[Segment]) -> None:
    """Keep the pairs up to the first required one; later ones are not text."""
    for segment in segments:
        segment.cache.commit(range(segment.rows[0] + 1))


class Eagle3(PairDrafter[Eagle3Head, Eagle3Runner]):
    """Drafts with an EAGLE-3 head (2503.01840) on several layers of the target; options: `LevelDrafter`."""

    name = "eagle"

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        if target.device.type == "cuda" and not self.head.config.recordable:
            self._unrecorded(UNRECORDED_WINDOWS)
        return Eagle3Runner(self.head, target, before=self._replaced(target))


class PEagle(Eagle3):
    """Drafts with a P-EAGLE head (2602.01469), in one forward at any depth; options: `LevelDrafter`.

    All nodes at one depth share a distribution, which does not depend on the draws above them. Raises `OptionError` for
    an option out of range, or a head that does not name its layers.
    """

    name = "p-eagle"
    levels = 1
    head: PEagleHead

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        runner = super()._new_runner(target)
        self._mask = self.head.mask_hidden[0].to(target.device, target.dtype)  # [1, layers * width]
        return runner

    def _masks_below(self, levels: int) -> tuple[Tensor, Tensor]:
        masks = levels - 1
        return torch.full((masks,), self.head.config.mask_token), self._mask.expand(masks, -1)

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        _, logits = self._catch_up(level)
        ahead = dict(zip(level, logits.split([own.levels for own in level]), strict=True))
        depth = 0
        while level:
            rows = [ahead[own][depth : depth + 1].expand(len(own.open), -1) for own in level]
            level, depth = grow(level, torch.cat(rows)), depth + 1
