"""Sampled beams: paths without replacement from a recurrent distribution, or those that coupled noise makes likeliest.

Stochastic beam search (Kool et al. 1903.06059; for drafting RSD-S of 2402.14160): every path has a Gumbel-perturbed log
probability, and the paths with the largest ones are a sample without replacement. From the top down, a node's first
child has the node's own score, and the next ones smaller scores: after the score g, the next is

    -log(exp(-g) + E / m),   E a standard exponential, m the probability of all that is left below the node,

which is independent of *which* token is drawn. So the children can be drawn first, without replacement, and their
scores after. Cutting by score is then a predictable choice (docs/concepts.md): recursive rejection stays exact.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.probs import probs_at
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.drafters.base import CutShortError, DraftRequest
from truedraft.drafters.draws import Child, OpenNode, drawing_for, fetch_children
from truedraft.drafters.tree_builder import ScoredTree
from truedraft.kinds.redrafter.beams import BeamTrees

_DRAWS = 4
"""Draws at a node below the root: each reads the whole distribution, and later ones are rarely among the best."""
_SCORES, _SIBLINGS = 1 << 40, 1 << 20
"""First key of the scores' noise (draws begin at 0), and a number that is larger than that of a node's children."""


class _BeamTree(ScoredTree):
    """The tree of one request while it is drawn; scores are perturbed log probabilities of paths, or their closeness to
    the choice of coupled noise.

    `masses` are log probabilities of the nodes' paths, if scores need them; `rows` are of the open nodes' parents.
    """

    def __init__(self, request: DraftRequest, budget: Budget, noise: Noise, row: int) -> None:
        super().__init__(request, budget)
        self.noise, self.row = noise, row
        self.masses: list[float] = []
        self.rows: list[int] = []
        self.probs: dict[int, Tensor] = {}
        self.kind = DrawKind.WITHOUT_REPLACEMENT

    def open_nodes(self, depth: int, width: int) -> list[OpenNode]:
        return [OpenNode(self.noise, depth, number * width, width) for number in range(len(self.open))]

    def proposal(self) -> Proposal:
        kept, tree = self.best()
        if not kept:
            return Proposal.empty()
        draws: list[list[Draw]] = [[] for _ in range(len(kept) + 1)]
        dists: dict[int, int] = {}
        for place, (node, parent) in enumerate(zip(kept, tree.shape.parents, strict=True)):
            row = self.parents[node] + 1
            draws[parent + 1].append(Draw(place, dists.setdefault(row, len(dists)), self.kind))
        return Proposal(tree, tuple(map(tuple, draws)), torch.stack([self.probs[row] for row in dists]))


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
        """A tree for each request, within its budget; consecutive requests with the same options share computations.

        `hidden` and `drawn` as of `beam_search`.
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
                state, logits = self._next_separately(trees[0], context, state)
                if not trees[0].open:
                    break
        proposals = [tree.proposal() for tree in trees]
        if failure is not None:
            raise CutShortError(proposals[0]) from failure
        return proposals

    def _next(self, level: Sequence[_BeamTree], context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The states of all open nodes, and logits `[open nodes, vocab]`."""
        opened = [(tree.row, tree.rows[node], tree.tokens[node]) for tree in level for node in tree.open]
        rows, above, tokens = (transfers.upload(each, context.device) for each in zip(*opened, strict=True))
        return self._head.step(context[rows], state[above], tokens)

    def _next_separately(self, tree: _BeamTree, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`_next` for each open node separately, because all together failed; closes nodes that fail.

        Dropping all would bias the answer, as whether a failing node exists would depend on its token.
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
        for _, group in itertools.groupby(
            level, lambda tree: (*tree.request.params.probs_key, tree.request.params.seeded)
        ):
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
            children = fetch_children(tokens, probs_at(probs, tokens), together, probs.shape[-1])
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
        """Keep the children with the best scores; `noise` is their coupled noise, if any."""
        tree.kind = DrawKind.WITHOUT_REPLACEMENT if noise is None else DrawKind.COUPLED
        found: list[tuple[float, int, int, float, int]] = []  # score, parent, token, mass, row
        for number, (parent, drawn) in enumerate(zip(tree.open, children, strict=True)):
            tree.probs[parent + 1] = probs[number]
            if noise is None:
                scored = _perturbed_scores(tree, parent, drawn, depth, number)
            else:
                scored = _coupled_scores(tree, parent, drawn, noise[number])
            own = zip(drawn, scored, strict=True)
            found += [(score, parent, token, mass, first_row + number) for (token, _), (score, mass) in own]
        found.sort(key=lambda each: -each[0])  # stable: earlier draws of a node come first
        first = len(tree.tokens)
        for score, parent, token, mass, row in found[: self._beams]:
            tree.add(parent, token, score)
            tree.masses.append(mass)
            tree.rows.append(row)
        tree.open = range(first, len(tree.tokens))


def _perturbed_scores(
    tree: _BeamTree, parent: int, drawn: Sequence[Child], depth: int, number: int
) -> list[tuple[float, float]]:
    """Perturbed log probabilities in the order of draws, and log masses."""
    if parent < 0:
        mass, score = 0.0, -math.log(-math.log(tree.noise.uniform(Purpose.DRAFT, depth, _SCORES - 1)))
    else:
        mass, score = tree.masses[parent], tree.scores[parent]
    scored = []
    left = 1.0
    for index, (_, probability) in enumerate(drawn):
        if index:
            uniform = tree.noise.uniform(Purpose.DRAFT, depth, _SCORES + number * _SIBLINGS + index)
            later = math.log(-math.log(uniform)) - mass - math.log(max(left, 1e-300))
            score = -float(np.logaddexp(-score, later))
        scored.append((score, mass + math.log(max(probability, 1e-300))))
        left -= probability
    return scored


def _noise_of(
    children: Sequence[Sequence[Child]], nodes: Sequence[Sequence[OpenNode]], depth: int, probs: Tensor
) -> list[list[float]]:
    """The Gumbel noise of children, which the target shares; one transfer."""
    gathered = []
    for drawn, node in zip(children, itertools.chain.from_iterable(nodes), strict=True):
        noise = node.noise.gumbel(depth, probs.shape[-1], probs.device)
        gathered.append(noise[transfers.upload([token for token, _ in drawn], noise.device)])
    return transfers.fetch(gathered)


def _coupled_scores(
    tree: _BeamTree, parent: int, drawn: Sequence[Child], noise: Sequence[float]
) -> list[tuple[float, float]]:
    """Difference of each child's log q + G from the largest, summed along the path."""
    score = 0.0 if parent < 0 else tree.scores[parent]
    values = [math.log(max(q, 1e-300)) + g for (_, q), g in zip(drawn, noise, strict=True)]
    return [(score + (value - values[0]), 0.0) for value in values]  # the first has exactly its parent's score
