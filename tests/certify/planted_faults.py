"""Stacks that are broken on purpose, one thing at a time, and models whose rows rounding moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from support.coupled_choice import coupled_choice
from truedraft.cache import RequestCache
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters import DraftModel
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.testing import MarkovModel, altered
from truedraft.verification import Rule
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome


class SlippedCache(RequestCache):
    """Keeps the entry behind the last accepted one in its place, where tokens were both accepted and rejected."""

    def commit(self, path: Sequence[int]) -> None:
        if len(path) > 1 and path[-1] + 1 < self.uncommitted:
            path = [*path[:-1], path[-1] + 1]
        super().commit(path)


def slipping_target(inner: LanguageModel) -> LanguageModel:
    """A target whose caches slip."""
    return altered(
        inner,
        new_cache=lambda: SlippedCache(inner.context_length),
        release_cache=lambda cache: cache.rollback(0),
    )


class ShiftedShape(TreeShape):
    """Everything below the root seems one deeper than it is."""

    @cached_property
    def depths(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(depth + (depth > 1) for depth in TreeShape(self.parents).depths)


def wrong_positions(inner: LanguageModel) -> LanguageModel:
    """Drafted tokens sit one position too far."""
    return _drafted_shapes(inner, lambda shape: ShiftedShape(shape.parents))


def wrong_mask(inner: LanguageModel) -> LanguageModel:
    """Every drafted token sees all drafted before it, also those of other branches."""
    return _drafted_shapes(inner, lambda shape: chain_shape(len(shape)))


def _drafted_shapes(inner: LanguageModel, changed: Callable[[TreeShape], TreeShape]) -> LanguageModel:
    """A target that takes drafted trees for others."""

    def seen(segment: Segment) -> Segment:
        drafted = segment.cache.length > 0 and len(segment.rows) == len(segment.shape) > 1
        return replace(segment, shape=changed(segment.shape)) if drafted else segment

    return altered(inner, forward=lambda segments: inner.forward([seen(segment) for segment in segments]))


class AcceptAlways(Rule):
    """Keeps the first drafted path whatever the target's choice is."""

    name = "accept always"
    lossless = True
    judges = frozenset(DrawKind)

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        return BatchVerdicts.made([self._verify(*each) for each in zip(proposals, probs, noise, strict=True)])

    def _verify(self, proposal: Proposal, dist: Tensor, noise: Noise) -> Verdict:
        path: list[int] = []
        row = 0
        while children := proposal.tree.shape.children[row]:
            path.append(children[0])
            row = children[0] + 1
        gumbel = noise.gumbel(len(path), dist.shape[-1], dist.device)
        token = int(coupled_choice(dist[row : row + 1], gumbel))
        return Verdict(tuple(path), (*(proposal.tree.host_ids[node] for node in path), token), Origin.BONUS)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        raise NotImplementedError


class StaleDraft(DraftModel):
    """Keeps the first of its drafted entries, as many as were accepted, whichever these were."""

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            cache = self.caches[request.id]
            cache.commit(range(min(len(outcome.path), cache.uncommitted)))


class ForgetsTheLast(DraftModel):
    """Takes the last token of a chain that was accepted in full for one that its cache holds; it was never fed."""

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        super().observe(batch, outcomes)
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.path and len(outcome.path) == len(outcome.proposal.tree):
                self.caches[request.id].length += 1


def row_noise(inner: LanguageModel, size: float) -> LanguageModel:
    """Logits that move by up to `size`, in a way that depends on how many tokens share the forward."""

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        rows = sum(len(segment.tokens) for segment in segments)
        output = inner.forward(segments)
        noise = torch.rand(output.logits.shape[-1], generator=torch.Generator().manual_seed(rows))
        return ForwardOutput(output.logits + size * (2 * noise - 1), output.hidden)

    return altered(inner, forward=forward)


def drafted_error(inner: LanguageModel, size: float) -> LanguageModel:
    """Logits of drafted rows that are off by up to `size`; all rows of plain decoding, prompts included, are right."""

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        drafted = [
            row > 0 and segment.cache.length > 0 and len(segment.tokens) > 1
            for segment in segments
            for row in segment.rows
        ]
        output = inner.forward(segments)
        noise = 2 * torch.rand(output.logits.shape, generator=torch.Generator().manual_seed(len(drafted))) - 1
        return replace(output, logits=output.logits + (size * noise * torch.tensor(drafted)[:, None]).to(inner.dtype))

    return altered(inner, forward=forward)


def markov(
    seed: int, *, sharpness: float = 1.5, lead: float | None = None, astray: float = 0.0, vocab: int = 8
) -> MarkovModel:
    """A table in float32.

    Args:
        seed: of its logits.
        sharpness: their standard deviation.
        lead: how far the best logit of every row is above the next; None leaves them as they are.
        astray: standard deviation of noise on top: a draft of the same seed that is not always right.
        vocab: tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64) * sharpness
    if lead is not None:
        best = logits.topk(2, dim=-1)
        logits.scatter_(-1, best.indices[..., :1], best.values[..., 1:] + lead)
    logits += astray * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return MarkovModel(torch.softmax(logits, dim=-1).float(), name=f"markov-{seed}")
