"""Replay: what heads would have drafted along a known answer, and how much of it the target would have accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.drafters.heads.head import VectorHead
from truedraft.models.lm_head import LmHead
from truedraft.training.losses import DistillationLoss
from truedraft.training.online.traffic import Answered, Score
from truedraft.training.targets import TargetRows, computed_rows
from truedraft.training.texts.self_distillation import CollatedBatch

PLACES = 32
"""Places of an answer that are replayed."""
_ROWS = 128  # rows with logits in memory at once


@torch.no_grad()
def replayed(heads: Sequence[VectorHead], lm_head: LmHead, answer: Answered) -> list[Score]:
    """Scores of greedy chains, for heads that read one vector; see `Learnable.replayed`.

    Args:
        heads: independent, of one kind and size; together their guesses take fewer passes over a large LM head.
        answer: only its first tokens are replayed where it is long.

    Returns:
        The score of each head.
    """
    tokens = answer.tokens[: PLACES + 1]
    places, reach = len(tokens) - 1, heads[0].reach
    if places < 1:
        return [Score(0, 0, 0)] * len(heads)
    like = next(heads[0].parameters())
    hidden = answer.vectors[:places].to(like.device, like.dtype)
    padded = torch.cat([tokens, tokens.new_full((reach,), -1)])  # no guess agrees there
    embedded = lm_head.embed(padded[torch.arange(places)[:, None] + torch.arange(reach)].clamp_min(0).T)
    vectors = torch.stack([head.unroll(hidden, embedded) for head in heads])  # [heads, reach, places, exit width]
    kept = torch.zeros(len(heads), places, dtype=torch.int64)
    alive = torch.ones(len(heads), places, dtype=torch.bool)
    for place in range(reach):
        labels = padded[1 + place : 1 + place + places].expand(len(heads), -1)
        alive &= labels >= 0
        separate = heads[0].outputs[place] is not None  # otherwise all use the target's, in one product
        for number, head in enumerate(heads if separate else heads[:1]):
            some_heads = slice(number, number + 1) if separate else slice(None)
            own = torch.zeros_like(alive)
            own[some_heads] = alive[some_heads]
            rows = zip(vectors[:, place][own].split(_ROWS), labels[own].split(_ROWS), strict=True)
            alive[own] = torch.cat([agrees(head.place_logits(place, some[0], lm_head), some[1]) for some in rows])
        kept += alive
    return [scored(each) for each in kept]


def agrees(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the argmax of each row of logits `[rows, ids]`, the lowest of equal ids, is its label; a label -1 never
    agrees."""
    largest = logits.amax(-1)
    found = (logits.gather(1, labels.clamp_min(0)[:, None])[:, 0] == largest) & (labels >= 0)
    tied = logits[found] == largest[found, None]  # of few rows, because these passes cost as much as the product
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[found, None]
    found[found.clone()] = ~(tied & lower).any(-1)
    return found


def scored(kept: Tensor) -> Score:
    """The score of an answer, from the number of kept guesses at each place; each chain begins after the target's
    token.

    Worked example: after token 0 two guesses of three agree, so tokens 1 and 2 are kept and the call gives token 3.
    """
    counts, at, calls = kept.tolist(), 0, 0
    while at < len(counts):
        at, calls = at + 1 + counts[at], calls + 1
    return Score(len(counts), calls, sum(counts))


@dataclass(frozen=True)
class Narrowed:
    """The target's distributions at rows of a batch, and an LM head, over only some ids of the vocabulary.

    For a large vocabulary a training step over all ids costs many times as much, for almost the same gradient: all of
    the target's mass is on few ids, most of them among the tokens of the traffic. `place`, `[vocab]`, is the index of
    each id among these; arbitrary for other ids.
    """

    lm_head: LmHead
    loss: DistillationLoss
    place: Tensor | None

    @classmethod
    def of(cls, lm_head: LmHead, loss: DistillationLoss, ids: Tensor | None) -> Narrowed:
        """Narrow to ascending ids; None keeps all."""
        if ids is None:
            return cls(lm_head, loss, None)
        bias = None if lm_head.bias is None else lm_head.bias[ids]
        place = torch.zeros(len(lm_head.weight), dtype=torch.int64)
        place[ids] = torch.arange(len(ids))
        return cls(LmHead(lm_head.weight[ids], bias, lm_head.finish, lm_head.embedding), loss, place)

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows:
        labels = batch.tokens[rows] if self.place is None else self.place[batch.tokens[rows]]
        return computed_rows(labels, lambda: self.lm_head(batch.hidden[rows]), self.loss)
