"""Stacks that are broken on purpose, one thing at a time, and models whose rows rounding moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from support.faulty_parts import raising
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Check, Context, Finding, Part, Stack, Status
from truedraft.core.probs import batch_probs
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.testing import MarkovModel, altered
from truedraft.verification import SpeculativeSampling

TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2, 1, 7], [3, 1]]


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


def borrowed(logits: Tensor, rows: Sequence[tuple[SamplingParams | None, int]]) -> list[Tensor]:
    """The first request of a batch that is not greedy lends its options to all such."""
    lent = next((own for own, _ in rows if own is not None), None)
    return batch_probs(logits, [(own and lent, count) for own, count in rows])


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


def gives_up() -> Drafter:
    """A drafter that always raises: engines go on without it, so its answers are plain decoding's."""
    return raising(PromptLookup(), "out of order", propose=lambda *given: True)


def with_logits(inner: LanguageModel, changed: Callable[[Sequence[Segment], Tensor], Tensor]) -> LanguageModel:
    """A target with other logits `[rows, vocab]`, by the segments of the forward."""

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        output = inner.forward(segments)
        return replace(output, logits=changed(segments, output.logits))

    return altered(inner, forward=forward)


def row_noise(inner: LanguageModel, size: float) -> LanguageModel:
    """Logits that move by up to `size`, in a way that depends on how many tokens share the forward."""

    def moved(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        rows = sum(len(segment.tokens) for segment in segments)
        noise = torch.rand(logits.shape[-1], generator=torch.Generator().manual_seed(rows))
        return logits + size * (2 * noise - 1)

    return with_logits(inner, moved)


def third_at(temperature: float) -> LanguageModel:
    """`markov(0)`, but the third request of a step is answered at another temperature than it asked for."""

    def changed(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        rows = list(logits.split([len(segment.rows) for segment in segments]))
        if len(rows) > 2:
            rows[2] = rows[2] / temperature
        return torch.cat(rows)

    return with_logits(markov(0), changed)


def drafted_error(inner: LanguageModel, size: float) -> LanguageModel:
    """Logits of drafted rows that are off by up to `size`; all rows of plain decoding, prompts included, are right."""

    def changed(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        drafted = [row > 0 and len(each.tokens) > 1 and each.cache.length > 0 for each in segments for row in each.rows]
        noise = 2 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(len(drafted))) - 1
        return logits + (size * noise * torch.tensor(drafted)[:, None]).to(inner.dtype)

    return with_logits(inner, changed)


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


def healthy() -> Stack:
    """A correct stack."""
    return Stack(markov(0), chain(), SpeculativeSampling())


def chain() -> DraftModel:
    """Chains of three for `markov(0)`, often, not always right."""
    return DraftModel(markov(0, astray=1.0), num_speculative_tokens=3)


HARMLESS = replace(faults.KEEPS_ALL, name="nothing is wrong", plant=lambda stack: stack)
"""A fault that is none: its formula says that it puts distributions off, the code does not."""


def said_of_tokens(tokens: int = 20_000, detectable: float = 0.03) -> Finding:
    """What the tests of sampled tokens said when they certified."""
    facts = {"tokens": tokens, "smallest_detectable_tv": detectable, "rounding_allowed_tv": 0.0, "false_alarm": 1e-3}
    return Finding(Part.STATISTICAL, "tokens", Status.HOLDS, "", {"tests": 1, **facts})


def findings_of(
    check: Check, stack: Stack, params: SamplingParams, batch: int, texts: Sequence[Sequence[int]] = TEXTS
) -> dict[str, Finding]:
    """What a check says, by name; its progress only rises, to 1."""
    told: list[float] = []
    found = check.run(Context(stack, texts, params, batch, tell=told.append))
    assert told == sorted(told) and told[-1] == 1.0
    assert {each.part for each in found} == {check.part}
    return {each.name: each for each in found}
