"""Replay: what heads would have drafted along an answer that is known, and what of it the target would have kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.heads import VectorHead
from truedraft.learning.traffic import Answered
from truedraft.models.lm_head import LmHead
from truedraft.training.losses import DistillationLoss
from truedraft.training.targets import TargetRows, computed_rows
from truedraft.training.texts.self_distillation import CollatedBatch

_PLACES = 96  # of an answer that are replayed
_ROWS = 128  # whose logits are held at once


@torch.no_grad()
def replayed(head: VectorHead, lm_head: LmHead, answer: Answered) -> tuple[int, int]:
    """Tokens of an answer behind its first, and the target calls that they take with chains of a head's best guesses.

    A chain is kept as far as it agrees with the answer, at every temperature, and the next begins behind the token that
    the target gave there. What a guess reads before it are tokens that were kept, so they are the answer's.

    Worked example: behind token 0 two guesses of three agree, so tokens 1 and 2 are kept and the call gives token 3.
    """
    tokens = answer.tokens[: _PLACES + 1]
    places = len(tokens) - 1
    if places < 1:
        return 0, 0
    like = next(head.parameters())
    hidden = answer.vectors[:places].to(like.device, like.dtype)
    # Behind the end nothing agrees.
    behind = torch.cat([tokens, tokens.new_full((head.reach,), -1)])
    index = torch.arange(places)[:, None] + torch.arange(head.reach)
    vectors = head.unroll(hidden, lm_head.embed(behind[index].clamp_min(0).T))
    kept = torch.zeros(places, dtype=torch.int64)
    alive = torch.arange(places)
    for place in range(head.reach):
        guesses = [head.place_logits(place, some, lm_head).argmax(-1) for some in vectors[place, alive].split(_ROWS)]
        alive = alive[torch.cat(guesses) == behind[alive + 1 + place]]
        kept[alive] += 1
        if not len(alive):
            break
    at, calls, counts = 0, 0, kept.tolist()
    while at < places:
        at, calls = at + 1 + counts[at], calls + 1
    return places, calls


@dataclass(frozen=True)
class Narrowed:
    """The target's distributions at rows of a batch, and an LM head, over some ids of the vocabulary alone.

    A step of training over all ids costs many times as much where the vocabulary is large, and tells next to nothing
    more: all of the target's mass is on few ids, most of them among the tokens of the traffic.

    Attributes:
        lm_head: of these ids.
        loss: that is learned by.
        place: `[vocab]`: where each id stands among them; ids that are not among them: anywhere.
    """

    lm_head: LmHead
    loss: DistillationLoss
    place: Tensor | None

    @classmethod
    def of(cls, lm_head: LmHead, loss: DistillationLoss, ids: Tensor | None) -> Narrowed:
        """Over rising ids, or over all."""
        if ids is None:
            return cls(lm_head, loss, None)
        bias = None if lm_head.bias is None else lm_head.bias[ids]
        place = torch.zeros(len(lm_head.weight), dtype=torch.int64)
        place[ids] = torch.arange(len(ids))
        return cls(LmHead(lm_head.weight[ids], bias, lm_head.finish, lm_head.embedding), loss, place)

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows:
        """What is learned at some of the rows."""
        labels = batch.tokens[rows] if self.place is None else self.place[batch.tokens[rows]]
        return computed_rows(labels, lambda: self.lm_head(batch.hidden[rows]), self.loss)
