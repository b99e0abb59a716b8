"""Beam search of a recurrent head, and the token trees of the beams (ReDrafter 2403.09919, section 3.2).

Prefixes are merged by a few tensor operations for all requests, on the device, and the likeliest nodes are kept.

Worked example, three beams with the log probabilities of their prefixes; the last one was dropped after one token:

    beam 0: 5 7 9    -0.1 -0.3 -2.0
    beam 1: 5 7 8    -0.1 -0.3 -1.0
    beam 2: 6        -1.5

Beams 0 and 1 share 5 and 5 7, which beam 0 holds first. So seven tokens make five nodes, in the order of their
probabilities 5, 7, 8, 6, 9, with parents -1, 0, 1, -1, 1. At the positions of the beams, these are the nodes

    beam 0: 0 1 4
    beam 1: 0 1 2
    beam 2: 3

Cut to four nodes, 9 is removed: there is no node for the last token of beam 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.core import transfers
from truedraft.core.top_k import TopK, stable_topk
from truedraft.core.tree import TokenTree
from truedraft.drafters.heads.acceptance import AcceptanceOdds, Scores, as_they_are, numbers_of, scores_by
from truedraft.drafters.heads.base import trees_of
from truedraft.kinds.redrafter.module import RedrafterRunner
from truedraft.models.backends.graphs.replay import Outputs, RecordedFunction, Recorder

NO_TOKEN = -1
"""Padding after the end of a shorter beam."""
_IMPOSSIBLE = -1e30  # sums of it are finite, and below every log probability


@dataclass(frozen=True, slots=True)
class Beams:
    """Continuations of some requests.

    Attributes:
        tokens: `[requests, beams, length]`, int64; padded with `NO_TOKEN`.
        scores: `[requests, beams, length]`, float32: log probabilities of their prefixes, or other numbers above -inf
            that never rise along a beam and are equal for equal prefixes; arbitrary after a beam's end.
    """

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True)
class MergedBeams:
    """The nodes of the trees of beams.

    Attributes:
        tokens: `[requests, nodes]`, int64: those with the largest scores first, a parent before its children.
        parents: `[requests, nodes]`, int64: number of the parent, -1 for the root.
        node_of: `[requests, beams, length]`, int64: the node of each token of the beams; -1 without a token or node.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    node_of: Tensor


def beam_search(
    runner: RedrafterRunner, hidden: Tensor, drawn: Tensor, beams: int, scores: Scores = as_they_are
) -> Iterator[Beams]:
    """The likeliest continuations under a recurrent head (ReDrafter 2403.09919, section 3.1), of one token, of two, ...

    Each beam is extended by its likeliest tokens, and the `beams` likeliest of all are kept, the best first, with sums
    of `scores`. A request's result does not depend on other requests.

    Args:
        hidden: `[requests, width]`: hidden states from which the requests' last tokens were drawn.
        drawn: `[requests]`, int64: those tokens, on the target's device.
        beams: at most the number of token ids.
    """
    with torch.inference_mode():
        context = runner.context(hidden)
        state = runner.advance(None, drawn)
        found = runner.likeliest(context, state, beams)
        now = Beams(found.ids[:, :, None], scores(_possible(found.log_probs), 1)[:, :, None])
        context = context.repeat_interleave(beams, dim=0)
        first = torch.arange(len(hidden), device=hidden.device)[:, None]
        parents = first.expand(-1, beams)  # the row of `state` that each beam continues
    while True:
        yield now
        with torch.inference_mode():  # not around the yield: the caller has its own mode
            state = runner.advance(state[parents.flatten()], now.tokens[:, :, -1].flatten())
            now, come_from = _continued(now, runner.likeliest(context, state, beams), scores)
            parents = first * beams + come_from


def _continued(beams: Beams, found: TopK, score: Scores) -> tuple[Beams, Tensor]:
    """The best beams with one more token, and the beams `[requests, beams]` before."""
    requests, count, length = beams.tokens.shape
    gains = score(_possible(found.log_probs).view(requests, count, count), length + 1)
    totals = (beams.scores[:, :, -1:] + gains).flatten(1)
    chosen = stable_topk(totals, count)  # [requests, beams]: beam * beams + rank
    come_from = chosen // count
    before = come_from[:, :, None].expand(-1, -1, length)
    newest = found.ids.view(requests, -1).gather(1, chosen)[:, :, None]
    tokens = torch.cat([beams.tokens.gather(1, before), newest], dim=-1)
    scores = torch.cat([beams.scores.gather(1, before), totals.gather(1, chosen)[:, :, None]], dim=-1)
    return Beams(tokens, scores), come_from


def _possible(log_probs: Tensor) -> Tensor:
    return log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE).clamp(max=0.0)


def with_dropped(steps: Sequence[Beams]) -> Beams:
    """The beams of all steps, dropped ones too, as these are often likelier than the end of a longer one."""
    longest = len(steps)
    tokens = [pad(each.tokens, (0, longest - length), value=NO_TOKEN) for length, each in enumerate(steps, 1)]
    scores = [pad(each.scores, (0, longest - length)) for length, each in enumerate(steps, 1)]
    return Beams(torch.cat(tokens, dim=1), torch.cat(scores, dim=1))


def first_with_prefix(tokens: Tensor) -> Tensor:
    """The first beam with the same prefix, int64, for tokens `[requests, beams, length]`."""
    same: Tensor | None = None
    first = []
    for column in tokens.unbind(dim=-1):  # over the length, never over the beams
        alike = column[:, :, None] == column[:, None]
        same = alike if same is None else same.logical_and_(alike)
        first.append(same.to(torch.uint8).argmax(dim=-1))  # argmax finds the first of equals
    return torch.stack(first, dim=-1)


def merge(beams: Beams, nodes: int, depths: Tensor | None = None) -> MergedBeams:
    """Merge equal prefixes, and keep the `nodes` nodes of a request with the largest scores.

    A tree cut to `depths` `[requests]` equals that of a shorter search, as continuing changes nothing earlier.
    Of equal scores the shorter prefix comes first, then the earlier beam, so the kept nodes are a tree.
    """
    count, length = beams.tokens.shape[1:]
    # Index l * beams + b holds token l of beam b: shorter prefixes come first.
    tokens, scores, first = (
        each.transpose(1, 2).flatten(1) for each in (beams.tokens, beams.scores, first_with_prefix(beams.tokens))
    )
    place = torch.arange(count * length, device=tokens.device)
    holder = first + (place - place % count)  # the index of the first beam with this prefix
    own = (holder == place) & (tokens != NO_TOKEN)
    if depths is not None:
        own &= place // count < depths[:, None]
    places = stable_topk(scores.masked_fill(~own, -torch.inf), min(nodes, count * length))
    kept = own.gather(1, places)
    number = torch.full_like(tokens, -1)
    rows = torch.arange(places.shape[1], device=tokens.device).expand_as(places)
    number.scatter_(1, places, rows.masked_fill(~kept, -1))
    node_of = number.gather(1, holder)
    above = node_of.gather(1, (places - count).clamp(min=0))  # of the same beam's previous token
    parents = above.masked_fill(places < count, -1)
    spread = node_of.unflatten(1, (length, count)).transpose(1, 2)
    return MergedBeams(tokens.gather(1, places), parents, kept.sum(dim=1), spread)


class BeamTrees:
    """Searches and merges beams; also runs single steps of the head, for beams that are drawn on the host.

    Recorded searches have one length, so that all budgets share a graph; trees are cut when they are merged.
    """

    def __init__(self, runner: RedrafterRunner, length: int, recorder: Recorder | None) -> None:
        self._runner = runner
        self._length = length
        self._is_recorded = recorder is not None
        self._merged = RecordedFunction(self._merge, recorder)
        self._first = RecordedFunction(self._read_first, recorder)
        self._next = RecordedFunction(self._read_next, recorder)

    @property
    def warmups(self) -> int:
        return sum(each.warmups for each in (self._merged, self._first, self._next))

    def trees(
        self,
        hidden: Tensor,
        drawn: Tensor,
        depths: Sequence[int],
        odds: Sequence[AcceptanceOdds | None],
        beams: int,
        nodes: int,
    ) -> list[TokenTree]:
        """The tree of each request, of depth 1 to `length`; the host waits once, for their shapes.

        `hidden` and `drawn` as of `beam_search`; `odds` None: the head's probabilities.
        """
        length = self._length if self._is_recorded else max(depths)
        numbers = numbers_of(odds, length, beams, hidden.device)
        deep = transfers.upload(depths, hidden.device)
        return trees_of(*self._merged((hidden, drawn, deep, numbers), beams, length, nodes))

    def start(self, hidden: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts and states `[requests, ...]`, and the logits `[requests, vocab]`."""
        context, state, logits = self._first((hidden, drawn))
        return context, state, logits

    def step(self, context: Tensor, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States `[rows, ...]` one token further, and the logits `[rows, vocab]`."""
        state, logits = self._next((context, state, tokens))
        return state, logits

    def _merge(
        self, hidden: Tensor, drawn: Tensor, depths: Tensor, numbers: Tensor, beams: int, length: int, nodes: int
    ) -> Outputs:
        growing = beam_search(self._runner, hidden, drawn, beams, scores_by(numbers))
        merged = merge(with_dropped(list(itertools.islice(growing, length))), nodes, depths)
        return merged.tokens, merged.parents, merged.counts

    def _read_first(self, hidden: Tensor, drawn: Tensor) -> Outputs:
        context, state = self._runner.context(hidden), self._runner.advance(None, drawn)
        return context, state, self._runner.logits(context, state)

    def _read_next(self, context: Tensor, state: Tensor, tokens: Tensor) -> Outputs:
        state = self._runner.advance(state, tokens)
        return state, self._runner.logits(context, state)
