"""How the guesses of several heads become a tree for each request: by a tree of ranks, or by their probabilities."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.likeliest_paths import likeliest_paths
from truedraft.core.rank_tree import RankTree
from truedraft.core.sampling import SamplingParams
from truedraft.core.trees import TokenTree
from truedraft.drafters.size_plans import Promise
from truedraft.errors import CompositionError, ModelError, OptionError
from truedraft.models.ranking import Likeliest
from truedraft.theory.node_curve import NodeCurve

GREEDY, SAMPLED = "greedy", "sampled"
MOST_RANKS = 64
"""Guesses of a head that a tree chosen at each step may take up."""
MOST_NODES = 256
"""Nodes of a tree chosen at each step; the paths to choose from grow faster than these."""

Wanted: TypeAlias = tuple[SamplingParams, Budget]


class GuessTrees(ABC):
    """Makes trees of what heads guess.

    Attributes:
        name: of the way, for reports and kept costs.
    """

    name: ClassVar[str]

    @abstractmethod
    def extent(self, nodes: int) -> Budget:
        """The largest depth, width and number of nodes of trees of at most so many nodes.

        Raises:
            OptionError: more nodes than it can deal with.
        """

    @abstractmethod
    def check(self, heads: int, vocab_size: int | None = None) -> None:
        """Refuse so few heads, or so few ids of a target.

        Raises:
            OptionError: there are too few heads.
            CompositionError: the target has too few ids.
        """

    @abstractmethod
    def wanted(self, params: SamplingParams, budget: Budget) -> Budget:
        """How many heads (`depth`), guesses (`width`) and nodes a request takes; a budget of zero if it drafts nothing.

        Args:
            params: of the request.
            budget: of this step, the drafter's own number of nodes included.
        """

    @abstractmethod
    def trees(self, guesses: Likeliest, requests: Sequence[Wanted]) -> list[TokenTree]:
        """A tree for each request.

        Args:
            guesses: `[depth, requests, ranks]`, at least as deep and wide as every request wanted.
            requests: their options and budgets, for which `wanted` is not zero.
        """

    @abstractmethod
    def counted(self, params: SamplingParams) -> RankTree | None:
        """The whole tree of ranks for requests with such options; None where there is none."""

    @abstractmethod
    def promise(self, params: SamplingParams) -> Promise | None:
        """What nodes are expected to bring to requests with such options; None where nobody measured that."""


class FixedTrees(GuessTrees):
    """Trees of ranks that were fixed before: counted on the target's text, or by hand.

    On a device the guesses are not looked at: filling in a tree takes none of them to the host.

    Args:
        trees: for requests at temperature 0, "greedy", and for others, "sampled"; if one is missing, the other serves
            for both.

    Raises:
        OptionError: no tree, or one for other requests.
    """

    name: ClassVar[str] = "fixed"

    def __init__(self, trees: Mapping[str, RankTree]) -> None:
        unknown = set(trees) - {GREEDY, SAMPLED}
        if unknown or not trees:
            raise OptionError(
                f"trees of Medusa heads are {GREEDY!r} and {SAMPLED!r}, got {sorted(trees)}; count them, or give one"
            )
        either = next(iter(trees.values()))
        self._trees = {kind: trees.get(kind, either) for kind in (GREEDY, SAMPLED)}
        self._cut: dict[tuple[str, int, int, int], RankTree] = {}

    def extent(self, nodes: int) -> Budget:
        """See `GuessTrees.extent`: limits of whole trees, for cutting is done by order, not by depth or rank."""
        kept = [tree.first(nodes) for tree in self._trees.values()]
        return Budget(max(tree.depth for tree in kept), max(tree.width for tree in kept), max(map(len, kept)))

    def check(self, heads: int, vocab_size: int | None = None) -> None:
        """See `GuessTrees.check`."""
        depth = max(tree.depth for tree in self._trees.values())
        if depth > heads:
            raise OptionError(
                f"a Medusa tree {depth} deep needs as many heads, and there are {heads}; give a shallower tree"
            )
        widest = max(tree.width for tree in self._trees.values())
        if vocab_size is not None and widest > vocab_size:
            raise CompositionError(
                f"a Medusa tree {widest} ranks wide needs as many ids, and the target has {vocab_size}; give a "
                "narrower tree"
            )

    def wanted(self, params: SamplingParams, budget: Budget) -> Budget:
        """See `GuessTrees.wanted`."""
        tree = self._fitting(params, budget)
        return Budget(tree.depth, tree.width, len(tree))

    def trees(self, guesses: Likeliest, requests: Sequence[Wanted]) -> list[TokenTree]:
        """See `GuessTrees.trees`."""
        found = []
        for row, (params, budget) in enumerate(requests):
            tree = self._fitting(params, budget)
            found.append(TokenTree(tree.fill(guesses.ids[:, row]), tree.shape))
        return found

    def counted(self, params: SamplingParams) -> RankTree:
        """See `GuessTrees.counted`."""
        return self._trees[kind_of(params)]

    def promise(self, params: SamplingParams) -> Promise | None:
        """See `GuessTrees.promise`: how often each node was accepted."""
        tree = self.counted(params)
        if not tree.reach:
            return None
        depths = itertools.accumulate(map(len, tree.paths), max, initial=0)
        return Promise(tree.reach, tuple(depths))

    def _fitting(self, params: SamplingParams, budget: Budget) -> RankTree:
        """The part of a request's tree that fits a budget: the first of the nodes that are not too deep or wide."""
        key = (kind_of(params), budget.depth, budget.width, budget.nodes)
        if key not in self._cut:
            kind, depth, width, nodes = key
            self._cut[key] = self._trees[kind].first(nodes).within(depth, width)
        return self._cut[key]


class LikeliestTrees(GuessTrees):
    """At each step the rank paths that the heads then hold likeliest, by the product of their probabilities.

    The heads' own laws at temperature 1 choose, whatever the request's options are. They are functions of the vector
    and the token that are known before the draw that judges, so the candidates are as deterministic as fixed ones, and
    the rule is as exact. On a device the guesses come to the host once: one wait more in a step than with fixed trees.

    Args:
        heads: that guess.
        curves: by the kind of requests, "greedy" and "sampled", the tokens that so many nodes bring; where one is
            missing, the fixed tree's counts stand in for it.
        fixed: the heads' counted trees, if there are any.
    """

    name: ClassVar[str] = "likeliest"

    def __init__(
        self, heads: int, curves: Mapping[str, NodeCurve] | None = None, fixed: FixedTrees | None = None
    ) -> None:
        self._heads = heads
        self._curves = dict(curves or {})
        self._fixed = fixed

    def extent(self, nodes: int) -> Budget:
        """See `GuessTrees.extent`."""
        if nodes > MOST_NODES:
            raise OptionError(
                f"a tree chosen at each step has at most {MOST_NODES} nodes, got {nodes}; give fewer, or a fixed tree"
            )
        return Budget(min(self._heads, nodes), min(MOST_RANKS, nodes), nodes)

    def check(self, heads: int, vocab_size: int | None = None) -> None:
        """See `GuessTrees.check`: of fewer ids it takes them all."""
        if self._heads > heads:
            raise OptionError(f"trees of {self._heads} heads need as many, and there are {heads}; choose by fewer")

    def wanted(self, params: SamplingParams, budget: Budget) -> Budget:
        """See `GuessTrees.wanted`."""
        if budget.is_zero:
            return NO_DRAFT
        nodes = budget.nodes
        return Budget(min(budget.depth, self._heads, nodes), min(budget.width, MOST_RANKS, nodes), nodes)

    def trees(self, guesses: Likeliest, requests: Sequence[Wanted]) -> list[TokenTree]:
        """See `GuessTrees.trees`."""
        ids, log_probs = _on_host(guesses)
        alike: dict[Budget, list[int]] = {}
        for row, (params, budget) in enumerate(requests):
            alike.setdefault(self.wanted(params, budget), []).append(row)
        found: dict[int, TokenTree] = {}
        for wanted, rows in alike.items():
            every = slice(None) if len(alike) == 1 else rows  # a view, where there is nothing to pick out
            chosen = likeliest_paths(log_probs[: wanted.depth, every, : wanted.width], wanted.nodes)
            own = ids[: wanted.depth, every, : wanted.width].transpose(1, 0, 2).reshape(len(rows), -1)
            tokens = own[np.arange(len(rows))[:, None], chosen.places].tolist()
            for row, of_row, shape in zip(rows, tokens, chosen.shapes, strict=True):
                found[row] = TokenTree.of_ids(of_row, shape)
        return [found[row] for row in range(len(requests))]

    def counted(self, params: SamplingParams) -> RankTree | None:
        """See `GuessTrees.counted`."""
        return None if self._fixed is None else self._fixed.counted(params)

    def promise(self, params: SamplingParams) -> Promise | None:
        """See `GuessTrees.promise`."""
        curve = self._curves.get(kind_of(params))
        if curve is None:
            return None if self._fixed is None else self._fixed.promise(params)
        gains = curve.gains
        return Promise(gains, tuple(min(nodes, self._heads) for nodes in range(len(gains) + 1)))


def curves_of(facts: Mapping[str, Any]) -> dict[str, NodeCurve]:
    """The curves in what was found out about heads when they were trained; none where nobody measured them.

    Raises:
        ModelError: there is something else in their place.
    """
    try:
        trees = facts.get("trees", {}).items()
        kept = {kind: tree["likeliest"] for kind, tree in trees if "likeliest" in tree}
        return {kind: NodeCurve.fit(zip(each["nodes"], each["tokens"], strict=True)) for kind, each in kept.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OptionError) as error:
        raise ModelError(
            f"what was measured of the trees of these heads is damaged ({error}); fetch or train them again"
        ) from error


def kind_of(params: SamplingParams) -> str:
    """Which of the trees is for requests with such options."""
    return GREEDY if params.greedy else SAMPLED


def _on_host(guesses: Likeliest) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids, int64, and log probabilities, float32, `[depth, requests, ranks]`; read from a device at once."""
    ids, log_probs = guesses.ids, guesses.log_probs
    if not transfers.waits(ids.device):
        return ids.numpy(), log_probs.numpy()
    read = transfers.fetch([ids, log_probs])
    return np.array(read[0], np.int64).reshape(ids.shape), np.array(read[1], np.float32).reshape(ids.shape)
