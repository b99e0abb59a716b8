"""Sampled beams: paths without replacement from a recurrent distribution, or those that coupled noise makes likeliest.

Stochastic beam search (Kool et al. 1903.06059; for drafting RSD-S of 2402.14160): every path has a Gumbel-perturbed log
probability, and the paths with the largest ones are a sample without replacement. From the top down, a node's first
child has the node's own score, and the next ones smaller scores: after the score g, the next is

    -log(exp(-g) + E / m),   E a standard exponential, m the probability of all that is left below the node,

which is independent of *which* token is drawn, just as the maximum of Gumbel variables is independent of its argmax. So
the children can be drawn first, without replacement, and their scores after. Cutting by score is then a predictable
choice (docs/concepts.md): recursive rejection stays exact.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree, TreeShape, path_to
from truedraft.drafters.base import CutShortError, DraftRequest
from truedraft.drafters.draws import Child, OpenNode, drawing_for, fetch_children
from truedraft.kinds.redrafter.beam_trees import BeamTrees

_DRAWS = 4
"""Draws at a node below the root: each reads the whole distribution, and later ones are rarely among the best."""
_SCORES, _SIBLINGS = 1 << 40, 1 << 20
"""First key of the scores' noise (draws begin at 0), and a number that is larger than that of a node's children."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A drawn token.

    Attributes:
        parent: number of its parent among the nodes of its tree, -1 for the root.
        score: perturbed log probability of its path, or its closeness to the choice of coupled noise.
        mass: log probability of its path under the head; only if scores need it.
    """

    token: int
    parent: int
    depth: int
    score: float
    mass: float
    row: int = -1


@dataclass(slots=True)
class _BeamTree:
    """The tree of one request while it is drawn, level by level."""

    request: DraftRequest
    budget: Budget
    noise: Noise
    row: int  # of the request in the batch
    nodes: list[_Node] = field(default_factory=list)
    open: list[int] = field(default_factory=lambda: [-1])  # nodes with children still to draw; -1 is the root
    probs: dict[int, Tensor] = field(default_factory=dict)  # by tree row
    kind: DrawKind = DrawKind.WITHOUT_REPLACEMENT

    def open_nodes(self, depth: int, width: int) -> list[OpenNode]:
        return [OpenNode(self.noise, depth, number * width, width) for number in range(len(self.open))]

    def shaped(self, logits: Tensor) -> Tensor:
        """Logits `[open nodes, vocab]` after the request's options, each for its node's path."""
        shaping = self.request.shaping
        if shaping is None:
            return logits
        paths = (path_to(node, [each.parent for each in self.nodes]) for node in self.open)
        return shaping.of_paths(logits, [tuple(self.nodes[node].token for node in path) for path in paths])


class SampledBeams:
    """Draws trees of beams for several requests at once."""

    def __init__(self, head: BeamTrees, beams: int, length: int) -> None:
        self._head = head
        self._beams = beams
        self._length = length

    @torch.inference_mode()
    def propose(
        self,
        batch: Sequence[DraftRequest],
        budgets: Sequence[Budget],
        noise: Sequence[Noise],
        hidden: Tensor,
        drawn: Tensor,
    ) -> list[Proposal]:
        """A tree for each request, within its budget.

        Args:
            batch: consecutive requests with the same options share computations.
            hidden: `[requests, width]`: hidden states from which their last tokens were drawn.
            drawn: `[requests]`: those tokens, on the target's device.
        """
        trees = [_BeamTree(*each, row) for row, each in enumerate(zip(batch, budgets, noise, strict=True))]
        context, state, logits = self._head.start(hidden, drawn)
        level = trees
        failure: Exception | None = None
        for depth in range(self._length):
            self._draw_level(level, depth, logits)
            level = [tree for tree in level if depth + 1 < min(tree.budget.depth, self._length) and tree.open]
            if not level:
                break
            try:
                state, logits = self._next(level, context, state)
            except Exception as error:
                if len(trees) > 1:
                    raise
                failure = error
                state, logits = self._those_that_can(trees[0], context, state)
                if not trees[0].open:
                    break
        proposals = [_proposal(tree) for tree in trees]
        if failure is not None:
            raise CutShortError(proposals[0]) from failure
        return proposals

    def _next(self, level: Sequence[_BeamTree], context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The states of all open nodes, and logits `[open nodes, vocab]` after them."""
        opened = [(tree, tree.nodes[node]) for tree in level for node in tree.open]
        tokens = transfers.upload([node.token for _, node in opened], context.device)
        above = transfers.upload([node.row for _, node in opened], context.device)
        rows = transfers.upload([tree.row for tree, _ in opened], context.device)
        return self._head.behind(context[rows], state[above], tokens)

    def _those_that_can(self, tree: _BeamTree, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`_next` for each open node separately, because all together failed; closes nodes that fail.

        Drawing nothing below the others would bias the answer: all scores decide which nodes are kept, so whether a
        failing node exists would depend on its token.
        """
        every, tree_open = [(state[:0], state[:0])], []
        for node in tree.open:
            tree.open = [node]
            with contextlib.suppress(Exception):
                every.append(self._next([tree], context, state))
                tree_open.append(node)
        tree.open = tree_open
        states, logits = zip(*every[len(every) > 1 :], strict=True)
        return torch.cat(states), torch.cat(logits)

    def _draw_level(self, level: Sequence[_BeamTree], depth: int, logits: Tensor) -> None:
        width = self._beams if depth == 0 else min(self._beams, _DRAWS)
        start = 0
        for _, group in itertools.groupby(level, key=lambda tree: _draws_alike(tree.request)):
            trees = list(group)
            params = trees[0].request.params
            drawing = drawing_for(params, max(2, width))
            nodes = [tree.open_nodes(depth, min(width, tree.budget.width)) for tree in trees]
            rows = slice(start, start + sum(map(len, nodes)))
            together = list(itertools.chain.from_iterable(nodes))
            parts = zip(trees, logits[rows].split(list(map(len, nodes))), strict=True)
            shaped = torch.cat([tree.shaped(own) for tree, own in parts])
            tokens, probs = drawing.draw(shaped, params, together)  # [nodes, draws], [nodes, vocab]
            assert probs is not None, "greedy requests are not drawn for"
            children = fetch_children(tokens, probs, together, probs.shape[-1])
            noise = _noise_of(children, nodes, depth, probs) if drawing.kind is DrawKind.COUPLED else None
            for tree, own in zip(trees, nodes, strict=True):
                here = slice(start - rows.start, start - rows.start + len(own))
                self._keep(tree, depth, children[here], probs[here], None if noise is None else noise[here], start)
                start += len(own)

    def _keep(
        self,
        tree: _BeamTree,
        depth: int,
        children: Sequence[Sequence[Child]],
        probs: Tensor,
        noise: Sequence[Sequence[float]] | None,
        first_row: int,
    ) -> None:
        """Keep the drawn children of the open nodes with the best scores; `noise` is their coupled noise, if any."""
        tree.kind = DrawKind.WITHOUT_REPLACEMENT if noise is None else DrawKind.COUPLED
        found: list[_Node] = []
        for number, (parent, drawn) in enumerate(zip(tree.open, children, strict=True)):
            tree.probs[parent + 1] = probs[number]
            if noise is None:
                scored = _perturbed_scores(tree, parent, drawn, depth, number)
            else:
                scored = _coupled_scores(tree, parent, drawn, noise[number])
            found += [
                _Node(token, parent, depth + 1, score, mass, first_row + number)
                for (token, _), (score, mass) in zip(drawn, scored, strict=True)
            ]
        found.sort(key=lambda node: -node.score)  # stable: earlier draws of a node come first
        first = len(tree.nodes)
        tree.nodes += found[: self._beams]
        tree.open = list(range(first, len(tree.nodes)))


def _draws_alike(request: DraftRequest) -> tuple[object, ...]:
    return (*request.params.probs_key, request.params.seeded)


def _perturbed_scores(
    tree: _BeamTree, parent: int, drawn: Sequence[Child], depth: int, number: int
) -> list[tuple[float, float]]:
    """Perturbed log probabilities of a node's children in the order of their draws, and their path's log masses."""
    if parent < 0:
        mass, score = 0.0, -math.log(-math.log(tree.noise.uniform(Purpose.DRAFT, depth, _SCORES - 1)))
    else:
        mass, score = tree.nodes[parent].mass, tree.nodes[parent].score
    scored = []
    left = 1.0
    for index, (_, probability) in enumerate(drawn):
        if index:
            uniform = tree.noise.uniform(Purpose.DRAFT, depth, _SCORES + number * _SIBLINGS + index)
            later = math.log(-math.log(uniform)) - mass - math.log(max(left, 1e-300))
            score = -_log_add(-score, later)
        scored.append((score, mass + math.log(max(probability, 1e-300))))
        left -= probability
    return scored


def _noise_of(
    children: Sequence[Sequence[Child]], nodes: Sequence[Sequence[OpenNode]], depth: int, probs: Tensor
) -> list[list[float]]:
    """The Gumbel noise of each node's children, which the target shares; one transfer."""
    gathered = []
    for drawn, node in zip(children, itertools.chain.from_iterable(nodes), strict=True):
        noise = node.noise.gumbel(depth, probs.shape[-1], probs.device)
        gathered.append(noise[transfers.upload([token for token, _ in drawn], noise.device)])
    return transfers.fetch(gathered)


def _coupled_scores(
    tree: _BeamTree, parent: int, drawn: Sequence[Child], noise: Sequence[float]
) -> list[tuple[float, float]]:
    """Difference of each child's log q + G from the largest, summed along the path; the target has the same G."""
    score = 0.0 if parent < 0 else tree.nodes[parent].score
    values = [math.log(max(q, 1e-300)) + g for (_, q), g in zip(drawn, noise, strict=True)]
    return [(score + (value - values[0]), 0.0) for value in values]  # the first has exactly its parent's score


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))


def _proposal(tree: _BeamTree) -> Proposal:
    """The nodes with the best scores as a proposal; a parent's score is never below its children's."""
    order = sorted(range(len(tree.nodes)), key=lambda node: (-tree.nodes[node].score, tree.nodes[node].depth, node))
    kept = order[: tree.budget.nodes]
    number = {node: place for place, node in enumerate(kept)} | {-1: -1}
    parents = tuple(number[tree.nodes[node].parent] for node in kept)
    draws: list[list[Draw]] = [[] for _ in range(len(kept) + 1)]
    dists: dict[int, int] = {}
    for place, node in enumerate(kept):
        tree_row = tree.nodes[node].parent + 1
        dist = dists.setdefault(tree_row, len(dists))
        draws[parents[place] + 1].append(Draw(place, dist, tree.kind))
    if not kept:
        return Proposal.empty()
    probs = torch.stack([tree.probs[tree_row] for tree_row in dists])
    ids = TokenTree.of_ids([tree.nodes[node].token for node in kept], TreeShape(parents))
    return Proposal(ids, tuple(tuple(each) for each in draws), probs)
