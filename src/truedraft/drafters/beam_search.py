"""Beam search with a recurrent head: the likeliest continuations of all requests, in batched tensor operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.core.beams import NO_TOKEN, Beams
from truedraft.core.ordering import first_by_value
from truedraft.core.survival import Scores, as_they_are
from truedraft.heads.redrafter_runner import RedrafterRunner
from truedraft.models.ranking import Likeliest

_IMPOSSIBLE = -1e30  # a sum of many is still a number, and below every log probability


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
        scores: what beams are chosen by: for one row or beam after another of each request, by `survival.scores_for`.

    Yields:
        For length 1, 2, 3, ... the beams that are kept, the best first; their scores are sums of what `scores` makes of
        the log probabilities under the head's law at temperature 1.
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


def _continued(beams: Beams, found: Likeliest, score: Scores) -> tuple[Beams, Tensor]:
    """The best of all beams with one token more, and the beam `[requests, beams]` that each comes from.

    Args:
        beams: of some requests.
        found: `[requests * beams, beams]`: the likeliest next tokens of each.
        score: of these.
    """
    requests, count, length = beams.tokens.shape
    gains = score(_possible(found.log_probs).view(requests, count, count), length + 1)
    totals = (beams.scores[:, :, -1:] + gains).flatten(1)
    chosen = first_by_value(totals, count)  # [requests, beams]: beam * beams + rank
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
