"""Beams of a recurrent head: the search for the likeliest continuations, and the token tree that they make.

Beams that share prefixes are merged by comparing tensors.

ReDrafter (2403.09919), section 3.2, calls this dynamic tree attention: the tree is another at each step, so it is
found by the same few operations on tensors for all requests, on the device where the beams lie. The likeliest nodes of
it are kept.

Worked example, three beams with the log probabilities of their prefixes; the last one was dropped after one token:

    beam 0: 5 7 9    -0.1 -0.3 -2.0
    beam 1: 5 7 8    -0.1 -0.3 -1.0
    beam 2: 6        -1.5

Beams 0 and 1 share 5 and 5 7, whose first holder is beam 0. So a list of seven tokens makes five nodes, in the order of
their probabilities 5, 7, 8, 6, 9, with parents -1, 0, 1, -1, 1. Back in the places of the beams, these are the nodes

    beam 0: 0 1 4
    beam 1: 0 1 2
    beam 2: 3

Cut to four nodes, 9 is gone: there is no node for the last token of beam 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.core.top_k import TopK, stable_topk
from truedraft.drafters.heads.acceptance import Scores, as_they_are
from truedraft.kinds.redrafter.module import RedrafterRunner

NO_TOKEN = -1
"""Behind the end of a beam that is shorter than others."""
_IMPOSSIBLE = -1e30  # a sum of many is still a number, and below every log probability


@dataclass(frozen=True, slots=True)
class Beams:
    """Continuations of some requests.

    Attributes:
        tokens: `[requests, beams, length]`, int64; `NO_TOKEN` behind the end of a shorter beam.
        scores: `[requests, beams, length]`, float32: logs of the probabilities of their prefixes up to each token, or
            other numbers above -inf that never rise along a beam and are the same for equal prefixes; any number behind
            a beam's end.
    """

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True)
class MergedBeams:
    """The nodes of the trees that beams make.

    Attributes:
        tokens: `[requests, nodes]`, int64: those with the largest scores first, a parent before its children.
        parents: `[requests, nodes]`, int64: number of the parent, -1 for the root.
        counts: `[requests]`, int64: how many of the entries are nodes; the others lie behind them.
        node_of: `[requests, beams, length]`, int64: the node that holds each token of the beams; -1 where there is no
            token, or its node was cut.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    node_of: Tensor


def beam_search(
    runner: RedrafterRunner, hidden: Tensor, drawn: Tensor, beams: int, scores: Scores = as_they_are
) -> Iterator[Beams]:
    """The likeliest continuations under a recurrent head (ReDrafter 2403.09919, section 3.1), of one token, of two, ...

    Each beam is continued by its likeliest tokens, and the `beams` likeliest of all are kept. What one request gets
    does not depend on the others; nothing waits for a device.

    Args:
        runner: of the head.
        hidden: `[requests, width]`: the vectors from which the requests' last tokens were drawn.
        drawn: `[requests]`, int64: those tokens, on the target's device.
        beams: how many are kept, at most as many as there are token ids.
        scores: what beams are chosen by: for one row or beam after another of each request, by `acceptance.scores_for`.

    Yields:
        For length 1, 2, 3, ... the beams that are kept, the best first; their scores are sums of what `scores` makes of
        the log probabilities under the head's distribution at temperature 1.
    """
    with torch.inference_mode():
        context = runner.context(hidden)
        state = runner.advance(None, drawn)
        found = runner.likeliest(context, state, beams)
        now = Beams(found.ids[:, :, None], scores(_possible(found.log_probs), 1)[:, :, None])
        context = context.repeat_interleave(beams, dim=0)
        first = torch.arange(len(hidden), device=hidden.device)[:, None]
        parents = first.expand(-1, beams)  # the row of `state` that each beam goes on from
    while True:
        yield now
        with torch.inference_mode():  # not around the yield: whoever asks has a mode of their own
            state = runner.advance(state[parents.flatten()], now.tokens[:, :, -1].flatten())
            now, come_from = _continued(now, runner.likeliest(context, state, beams), scores)
            parents = first * beams + come_from


def _continued(beams: Beams, found: TopK, score: Scores) -> tuple[Beams, Tensor]:
    """The best of all beams with one token more, and the beam `[requests, beams]` that each comes from.

    Args:
        beams: of some requests.
        found: `[requests * beams, beams]`: the likeliest next tokens of each.
        score: of these.
    """
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
    """Log probabilities that are numbers, and not above 0 by rounding."""
    return log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE).clamp(max=0.0)


def with_dropped(steps: Sequence[Beams]) -> Beams:
    """The beams of some steps of a search, also those that were dropped on the way: they are as long as their step.

    A dropped beam is often likelier, as far as it goes, than the end of a longer one.

    Args:
        steps: the beams of length 1, 2, ...
    """
    longest = len(steps)
    tokens = [pad(each.tokens, (0, longest - length), value=NO_TOKEN) for length, each in enumerate(steps, 1)]
    scores = [pad(each.scores, (0, longest - length)) for length, each in enumerate(steps, 1)]
    return Beams(torch.cat(tokens, dim=1), torch.cat(scores, dim=1))


def first_with_prefix(tokens: Tensor) -> Tensor:
    """The first beam of a request that has the same prefix: `[requests, beams, length]`, int64.

    Args:
        tokens: `[requests, beams, length]`.
    """
    same: Tensor | None = None
    first = []
    for column in tokens.unbind(dim=-1):  # over the length, never over the beams
        alike = column[:, :, None] == column[:, None]
        same = alike if same is None else same.logical_and_(alike)
        first.append(same.to(torch.uint8).argmax(dim=-1))  # argmax finds the first of equals
    return torch.stack(first, dim=-1)


def merge(beams: Beams, nodes: int, depths: Tensor | None = None) -> MergedBeams:
    """Merge equal prefixes, and keep the `nodes` of a request with the largest scores.

    A search that goes on changes nothing of what it found before, so cut to `depths` a tree is what a search of that
    length gives.

    A parent's score is not below its children's, and of equal scores the shorter prefix comes first, then the earlier
    beam; so what is kept is a tree.

    Args:
        beams: of some requests.
        nodes: most nodes of a tree, 1 or more.
        depths: `[requests]`, int64: of each tree; None: as deep as the beams are long.
    """
    count, length = beams.tokens.shape[1:]
    # Place l * beams + b holds token l of beam b: shorter prefixes come first.
    tokens, scores, first = (
        each.transpose(1, 2).flatten(1) for each in (beams.tokens, beams.scores, first_with_prefix(beams.tokens))
    )
    place = torch.arange(count * length, device=tokens.device)
    holder = first + (place - place % count)  # the place of the first beam with this prefix
    own = (holder == place) & (tokens != NO_TOKEN)
    if depths is not None:
        own &= place // count < depths[:, None]
    places = stable_topk(scores.masked_fill(~own, -torch.inf), min(nodes, count * length))
    kept = own.gather(1, places)
    number = torch.full_like(tokens, -1)
    rows = torch.arange(places.shape[1], device=tokens.device).expand_as(places)
    number.scatter_(1, places, rows.masked_fill(~kept, -1))
    node_of = number.gather(1, holder)
    above = node_of.gather(1, (places - count).clamp(min=0))  # of the same beam's token one before
    parents = above.masked_fill(places < count, -1)
    spread = node_of.unflatten(1, (length, count)).transpose(1, 2)
    return MergedBeams(tokens.gather(1, places), parents, kept.sum(dim=1), spread)
