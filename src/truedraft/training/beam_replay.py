"""What beams of a recurrent head would bring: their trees replayed along what the target wrote.

As with trees of ranks (`rank_paths`): drawing from the target and following the child that carries the drawn token is
the rule itself, so along a trace of the target's own draws no chance is left, and walking it as decoding would is
exact for every number of beams, length and nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.core.beams import Beams, merge
from truedraft.core.survival import Survival, scores_for
from truedraft.drafters.beam_search import beam_search, with_dropped
from truedraft.heads.redrafter_runner import RedrafterRunner
from truedraft.training.likely_paths import CURVE_NODES, tree_depths
from truedraft.training.survival_fit import Guesses
from truedraft.training.traces import Trace
from truedraft.training.walks import Walk

_ROWS = 2048  # beams that are continued at once
_NO_NODE = 1 << 40  # behind all nodes
_UNDRAFTED = -2  # no token, and not the end of a beam either


@dataclass(frozen=True, slots=True)
class BeamPromise:
    """What beams of a width and length bring, in tokens per target call.

    Attributes:
        beams: continuations that are kept.
        length: newly drafted tokens of each.
        nodes: numbers of nodes that the merged trees are cut to, rising.
        tokens: for each of them the mean acceptance length, replayed.
        listed: tokens of the longest beams of a step, in a plain list: those that there can be, times length.
        merged: nodes that they come to when merged, the mean over positions.
    """

    beams: int
    length: int
    nodes: tuple[int, ...]
    tokens: tuple[float, ...]
    listed: int
    merged: float

    def at(self, nodes: int) -> float:
        """Tokens per target call with so many nodes or, where the beams never come to that, with all of them."""
        points = list(zip(self.nodes, self.tokens, strict=True))
        return next(tokens for at, tokens in reversed(points) if at <= nodes)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def promises_of_beams(
    runner: RedrafterRunner,
    traces: Sequence[Trace],
    widths: Sequence[int],
    length: int,
    survival: Survival | None = None,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[BeamPromise]:
    """Replay the trees of beams of some widths and all lengths up to one.

    Args:
        runner: of the head, with the target that wrote the traces.
        traces: written at the temperature of use.
        widths: numbers of beams; of those above the number of token ids as many are kept.
        length: the longest.
        survival: what beams are chosen by; None takes the head's own probabilities.
        on_progress: called with the widths that are done, and all.

    Returns:
        For each width all lengths, rising; none at all where no trace has two tokens, for then nothing is drafted.
    """
    if not any(trace.steps for trace in traces):
        return []
    found: list[BeamPromise] = []
    walk, numbers = Walk.along(traces), range(1, length + 1)
    depths = [torch.from_numpy(tree_depths(traces, number)) for number in numbers]
    for done, width in enumerate(widths):
        on_progress(done, len(widths))
        kept = min(width, runner.vocab_size)
        orders, merged = _orders(runner, traces, kept, length, survival)
        for number in numbers:
            order = _at_depths(orders[:number], depths[number - 1])
            nodes = tuple(each for each in CURVE_NODES if each <= width * number)
            tokens = tuple(walk.mean_length((order < most).cumprod(dim=1).sum(dim=1)) for most in nodes)
            found.append(BeamPromise(width, number, nodes, tokens, kept * number, merged[number - 1]))
    on_progress(len(widths), len(widths))
    return found


def _at_depths(orders: Sequence[Tensor], depths: Tensor) -> Tensor:
    """At each position the order of nodes in a tree of the depth there: `[positions, len(orders)]`.

    Near the end of an answer the engine searches less deep, so other nodes come first than in a deeper tree.

    Args:
        orders: of trees of depth 1, 2, ...: `[positions, depth]`.
        depths: `[positions]`, int64, 0 to `len(orders)`.
    """
    found = torch.full((len(depths), len(orders)), _NO_NODE)
    for depth, order in enumerate(orders, 1):
        rows = depths == depth
        found[rows, :depth] = order[rows]
    return found


def _orders(
    runner: RedrafterRunner, traces: Sequence[Trace], width: int, length: int, survival: Survival | None
) -> tuple[list[Tensor], list[float]]:
    """For each length, at each position, the place of the true continuation's prefixes in the order of nodes.

    Args:
        runner: of the head.
        traces: of which one has two tokens or more.
        width: beams that are kept, at most as many as there are token ids.
        length: the longest.
        survival: what beams are chosen by.

    Returns:
        For each length `[positions, length]`, int64, `_NO_NODE` where a prefix is no node; and the mean number of nodes
        that the longest beams alone come to.
    """
    places = [(trace, step) for trace in traces for step in range(trace.steps)]
    orders: list[list[Tensor]] = [[] for _ in range(length)]
    merged = [0.0] * length
    together = max(1, _ROWS // width)
    for start in range(0, len(places), together):
        some = places[start : start + together]
        hidden = torch.stack([trace.hidden[step] for trace, step in some])
        drawn = torch.tensor([int(trace.tokens[step]) for trace, step in some])
        truth = torch.stack([_behind(trace, step, length) for trace, step in some])
        device = runner.device
        scores = scores_for([survival], device)
        growing = beam_search(runner, hidden.to(device), drawn.to(device), width, scores)
        steps: list[Beams] = []
        for number, longest in enumerate(itertools.islice(growing, length)):
            steps.append(longest)
            beams = with_dropped(steps)
            node_of = merge(beams, beams.tokens[0].numel()).node_of
            orders[number].append(_order_of(beams, node_of, truth[:, : number + 1].to(device)).cpu())
            merged[number] += float(merge(longest, longest.tokens[0].numel()).counts.sum())
    return [torch.cat(each) for each in orders], [each / len(places) for each in merged]


@torch.inference_mode()
def beam_guesses(runner: RedrafterRunner, traces: Sequence[Trace], length: int, count: int) -> list[Guesses]:
    """What a head gave to its guesses behind the text's own tokens, at depth 1, 2, ... up to `length`.

    Args:
        runner: of the head, with the target that wrote the traces.
        traces: written at the temperature of use.
        length: the largest depth.
        count: guesses that are kept at each depth, at most as many as there are token ids.
    """
    places = [(trace, step) for trace in traces for step in range(trace.steps)]
    log_probs = [torch.zeros(length, 0, count)]
    ranks = [torch.zeros(0, length, dtype=torch.int64)]
    for start in range(0, len(places), _ROWS):
        some = places[start : start + _ROWS]
        truth = torch.stack([_behind(trace, step, length) for trace, step in some])
        tokens = torch.cat([torch.tensor([[int(trace.tokens[step])] for trace, step in some]), truth], dim=1)
        tokens = tokens.to(runner.device)
        context, state = (
            runner.context(torch.stack([trace.hidden[step] for trace, step in some]).to(runner.device)),
            None,
        )
        of_depth = []
        for depth in range(length):
            state = runner.advance(state, tokens[:, depth].clamp(min=0))
            found = runner.likeliest(context, state, count)
            right = (found.ids == tokens[:, depth + 1, None]).to(torch.uint8)
            rank = torch.where(right.bool().any(dim=1), right.argmax(dim=1), count)
            of_depth.append((found.log_probs, rank.masked_fill(tokens[:, depth + 1] < 0, -1)))
        log_probs.append(torch.stack([each for each, _ in of_depth]).float().cpu())
        ranks.append(torch.stack([each for _, each in of_depth], dim=1).cpu())
    return Guesses.along(torch.cat(log_probs, dim=1), torch.cat(ranks))


def _behind(trace: Trace, step: int, length: int) -> Tensor:
    """The tokens that a step may draft: not the last one, for the step that emits it ends the answer."""
    tokens = trace.tokens[step + 1 : min(step + 1 + length, trace.steps)]
    return torch.nn.functional.pad(tokens, (0, length - len(tokens)), value=_UNDRAFTED)


def _order_of(beams: Beams, node_of: Tensor, truth: Tensor) -> Tensor:
    """The node of each prefix of `truth` `[rows, length]`, `_NO_NODE` where there is none."""
    right = (beams.tokens == truth[:, None]).to(torch.uint8).cumprod(dim=-1)  # [rows, beams, length]
    holder = right.argmax(dim=1, keepdim=True)  # the first beam that is right so far, if any is
    return torch.where(right.any(dim=1), node_of.gather(1, holder).squeeze(1), _NO_NODE)
