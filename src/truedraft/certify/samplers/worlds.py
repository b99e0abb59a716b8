"""Worlds for rejection samplers: small tables of a target and a draft, rows drawn from them, and the exact answer.

A world drafts k tokens of a vocabulary V, each from its own distribution after the tokens before it. For any lossless
sampler, its tokens, continued to k + 1 by the target's own draws, have the target's joint distribution.

A text of d tokens is numbered in base V, the first token first; a *cell* is the number of a text of k + 1 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from truedraft.certify.worlds import Table

_NEAR = 0.02
_PEAK = 6.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Input of a sampler."""

    draft_tokens: Tensor  # [batch, k], int64
    draft_probs: Tensor  # [batch, k, vocab], float32: what each was drawn from; one-hot if it was not drawn
    target_probs: Tensor  # [batch, k + 1, vocab], float32: before each drafted token and after the last

    def __len__(self) -> int:
        return len(self.draft_tokens)


@dataclass(frozen=True)
class SamplerWorld:
    """A target and a draft over all texts of up to k tokens, float64; the name is for reports."""

    name: str
    target: tuple[Tensor, ...]  # [vocab**d, vocab] for d = 0 to k: after each text of d tokens
    draft: tuple[Tensor, ...]  # [vocab**d, vocab] for d = 0 to k - 1

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @property
    def drafted(self) -> int:
        return len(self.draft)

    @cached_property
    def joint(self) -> Tensor:
        """The probability of each cell, `[vocab**(k + 1)]`, float64."""
        return self.continued(self.target[0].flatten())

    def continued(self, mass: Tensor) -> Tensor:
        """Mass `[vocab**d]` on texts of d tokens, spread over cells by the target's draws after them."""
        for after in self.target:
            if len(after) == len(mass):
                mass = (mass[:, None] * after).flatten()
        return mass

    def rows(self, batch: int, generator: torch.Generator) -> Rows:
        text = torch.zeros(batch, dtype=torch.int64)
        tokens, drafts, targets = [], [], [self.target[0][text]]
        for depth in range(self.drafted):
            drafts.append(self.draft[depth][text])
            tokens.append(drawn(drafts[-1], generator))
            text = text * self.vocab + tokens[-1]
            targets.append(self.target[depth + 1][text])
        return Rows(torch.stack(tokens, 1), torch.stack(drafts, 1).float(), torch.stack(targets, 1).float())

    def cells(self, emitted: Tensor, generator: torch.Generator) -> Tensor:
        """The cells `[batch]` of emitted tokens `[batch, k + 1]`, where -1 is continued by draws of the target."""
        text = torch.zeros(len(emitted), dtype=torch.int64)
        for depth in range(self.drafted + 1):
            own = drawn(self.target[depth][text], generator)
            text = text * self.vocab + torch.where(emitted[:, depth] < 0, own, emitted[:, depth])
        return text


def drawn(probs: Tensor, generator: torch.Generator) -> Tensor:
    """A token `[rows]` from each distribution `[rows, vocab]`, float64; never one without mass."""
    numbers = torch.rand(len(probs), 1, dtype=torch.float64, generator=generator)
    reached = probs.cumsum(-1)
    return (reached <= numbers * reached[:, -1:]).sum(-1).clamp_max(probs.shape[-1] - 1)


# ------------------------------------------------------------------------------------------------------- worlds

Probs = Callable[[tuple[int, ...]], Tensor]
"""The distribution `[vocab]`, float64, after a text."""


def sampler_worlds() -> list[SamplerWorld]:
    """Worlds of two to five tokens, one to three drafted: zeros, peaks, ties, and candidates that were not drawn."""
    near, other = _table("near p", 4, "dense"), _table("near q", 4, "dense")
    return [
        *(
            _world(vocab, k, f"{p} target, {q} draft", _table(f"p{k}", vocab, p), _table(f"q{k}", vocab, q))
            for vocab, k, p, q in _STYLED
        ),
        _world(4, 2, "target nearly the draft", near, lambda text: (1.0 - _NEAR) * near(text) + _NEAR * other(text)),
        _world(3, 2, "target equals the draft", *(_table("equal", 3, "dense"),) * 2),
        _world(3, 2, "ties", _table("ties p", 3, "dense", 2), _table("ties q", 3, "dense", 2)),
        _world(5, 1, "peaked target, flat draft", _peaked("peaked", 5), _table("flat q", 5, "dense", 2)),
        _world(4, 2, "flat target, peaked draft", _table("flat p", 4, "dense", 2), _peaked("peaked q", 4)),
        _world(5, 1, "target cut as by top-p", _cut(_table("cut", 5, "dense"), 3), _table("cut q", 5, "dense")),
        _world(
            3, 3, "target and draft cut", _cut(_table("both p", 3, "dense"), 2), _cut(_table("both q", 3, "dense"), 2)
        ),
        _world(4, 2, "likeliest candidate", *_candidate(4, 0)),
        _world(3, 3, "unlikely candidate", *_candidate(3, 1)),
    ]


_STYLED = (
    (2, 3, "dense", "dense"),
    (3, 2, "dense", "dense"),
    (5, 1, "dense", "dense"),
    (3, 2, "varied", "varied"),
    (4, 2, "dense", "sparse"),
    (4, 1, "sparse", "dense"),
    (2, 2, "one-hot", "dense"),
)


def _world(vocab: int, drafted: int, words: str, target: Probs, draft: Probs) -> SamplerWorld:
    def table(probs: Probs, depth: int) -> Tensor:
        return torch.stack([probs(text) for text in itertools.product(range(vocab), repeat=depth)])

    tokens = "token" if drafted == 1 else "tokens"
    return SamplerWorld(
        f"{words}; {vocab} ids, {drafted} {tokens} drafted",
        tuple(table(target, depth) for depth in range(drafted + 1)),
        tuple(table(draft, depth) for depth in range(drafted)),
    )


def _table(name: str, vocab: int, style: str, largest: int = 9) -> Probs:
    return Table(f"sampler {name}", vocab, style, largest).probs


def _peaked(name: str, vocab: int) -> Probs:
    table = _table(name, vocab, "dense")

    def probs(text: tuple[int, ...]) -> Tensor:
        powers = table(text) ** _PEAK + 1e-3
        return powers / powers.sum()

    return probs


def _cut(table: Probs, kept: int) -> Probs:
    def probs(text: tuple[int, ...]) -> Tensor:
        own = table(text)
        left = torch.zeros_like(own).scatter(0, own.topk(kept).indices, 1.0) * own
        return left / left.sum()

    return probs


def _candidate(vocab: int, rank: int) -> tuple[Probs, Probs]:
    """A target, and a draft that always proposes the token of a rank under another table."""
    table = _table(f"candidate {rank}", vocab, "dense")

    def probs(text: tuple[int, ...]) -> Tensor:
        one_hot = torch.zeros(vocab, dtype=torch.float64)
        one_hot[table(text).argsort(descending=True, stable=True)[rank]] = 1.0
        return one_hot

    return _table(f"candidate p {rank}", vocab, "dense"), probs
