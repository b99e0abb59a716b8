"""Guesses of several heads, and how they become a tree for each request: by a tree of ranks, or by probabilities."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree, likeliest_paths
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import FACT, GREEDY, SAMPLED, Calibration, fixed_for, kind_of, tree_curves
from truedraft.errors import CompositionError, OptionError
from truedraft.theory import AcceptanceCurve

MOST_RANKS = 64
"""Guesses of a head that a tree chosen at each step may take up."""
MOST_CHOSEN_NODES = 256
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
    def trees(self, guesses: TopK, requests: Sequence[Wanted]) -> list[TokenTree]:
        """A tree for each request.

        Args:
            guesses: `[depth, requests, ranks]`, at least as deep and wide as every request wanted.
            requests: their options and budgets, for which `wanted` is not zero.
        """

    @abstractmethod
    def counted(self, params: SamplingParams) -> RankTree | None:
        """The whole tree of ranks for requests with such options; None where there is none."""

    @abstractmethod
    def is_fixed(self, params: SamplingParams) -> bool:
        """Whether requests with such options are drafted by the tree that `counted` gives."""

    @abstractmethod
    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
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
        # Limits of whole trees: cutting is done by order, not by depth or rank.
        kept = [tree.first(nodes) for tree in self._trees.values()]
        return Budget(max(tree.depth for tree in kept), max(tree.width for tree in kept), max(map(len, kept)))

    def check(self, heads: int, vocab_size: int | None = None) -> None:
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
        tree = self._fitting(params, budget)
        return Budget(tree.depth, tree.width, len(tree))

    def trees(self, guesses: TopK, requests: Sequence[Wanted]) -> list[TokenTree]:
        found = []
        for row, (params, budget) in enumerate(requests):
            tree = self._fitting(params, budget)
            found.append(TokenTree(tree.fill(guesses.ids[:, row]), tree.shape))
        return found

    def counted(self, params: SamplingParams) -> RankTree:
        return self._trees[kind_of(params)]

    def is_fixed(self, params: SamplingParams) -> bool:
        return True

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """By how often each node was accepted."""
        tree = self.counted(params)
        if not tree.survival:
            return None
        depths = itertools.accumulate(map(len, tree.paths), max, initial=0)
        return AcceptanceCurve(tree.survival, tuple(depths))

    def _fitting(self, params: SamplingParams, budget: Budget) -> RankTree:
        """The part of a request's tree that fits a budget: the first of the nodes that are not too deep or wide."""
        key = (kind_of(params), budget.depth, budget.width, budget.nodes)
        if key not in self._cut:
            kind, depth, width, nodes = key
            self._cut[key] = self._trees[kind].first(nodes).within(depth, width)
        return self._cut[key]


class LikeliestTrees(GuessTrees):
    """At each step the rank paths that are then likeliest to be accepted, as far as is known before.

    That is the product of their tokens' calibrated survivals, or of the heads' own probabilities at temperature 1 where
    nothing was calibrated. Both are functions of the vector and the token that are known before the draw that judges,
    so the candidates are as deterministic as fixed ones, and the rule is as exact. On a device the guesses come to the
    host once: one wait more in a step than with fixed trees.

    Args:
        heads: that guess.
        curves: by the kind of requests, "greedy" and "sampled", what nodes of such trees bring; where one is
            missing, the fixed tree's counts stand in for it.
        fixed: the heads' counted trees, if there are any.
        calibration: survival of guesses; None takes the heads' probabilities.
        fixed_for: kinds of requests that get the fixed tree, for it was measured to be the better one.

    Raises:
        OptionError: fixed trees are to be used, and there are none.
    """

    name: ClassVar[str] = "likeliest"

    def __init__(
        self,
        heads: int,
        curves: Mapping[str, AcceptanceCurve] | None = None,
        fixed: FixedTrees | None = None,
        calibration: Calibration | None = None,
        fixed_for: Collection[str] = (),
    ) -> None:
        if fixed_for and fixed is None:
            raise OptionError(f"requests of the kind {sorted(fixed_for)} get a fixed tree, and there is none; give one")
        self._heads = heads
        self._curves = dict(curves or {})
        self._fixed = fixed
        self._calibration = calibration or Calibration()
        self._fixed_for = frozenset(fixed_for)

    def extent(self, nodes: int) -> Budget:
        if nodes > MOST_CHOSEN_NODES:
            raise OptionError(
                f"a tree chosen at each step has at most {MOST_CHOSEN_NODES} nodes, got {nodes}; give fewer, or a "
                "fixed tree"
            )
        return Budget(min(self._heads, nodes), min(MOST_RANKS, nodes), nodes)

    def check(self, heads: int, vocab_size: int | None = None) -> None:
        # Of fewer ids than ranks it takes them all.
        if self._heads > heads:
            raise OptionError(f"trees of {self._heads} heads need as many, and there are {heads}; choose by fewer")

    def wanted(self, params: SamplingParams, budget: Budget) -> Budget:
        fixed = self._tree_of(params)
        if fixed is not None:
            return fixed.wanted(params, budget)
        if budget.is_zero:
            return NO_DRAFT
        nodes = budget.nodes
        return Budget(min(budget.depth, self._heads, nodes), min(budget.width, MOST_RANKS, nodes), nodes)

    def trees(self, guesses: TopK, requests: Sequence[Wanted]) -> list[TokenTree]:
        found: dict[int, TokenTree] = {}
        alike: dict[tuple[Budget, AcceptanceOdds | None], list[int]] = {}
        for row, (params, budget) in enumerate(requests):
            fixed = self._tree_of(params)
            if fixed is not None:
                own = TopK(guesses.ids[:, row : row + 1], guesses.log_probs[:, row : row + 1])
                found[row] = fixed.trees(own, [(params, budget)])[0]
            else:
                alike.setdefault((self.wanted(params, budget), self._calibration(params)), []).append(row)
        if alike:
            ids, log_probs = _on_host(guesses)
            for (wanted, survival), rows in alike.items():
                every = slice(None) if len(rows) == len(requests) else rows  # a view, where all are alike
                within = slice(wanted.depth), every, slice(wanted.width)
                found.update(zip(rows, _likeliest(ids[within], log_probs[within], wanted.nodes, survival), strict=True))
        return [found[row] for row in range(len(requests))]

    def _tree_of(self, params: SamplingParams) -> FixedTrees | None:
        """Fixed trees, where requests with such options get one."""
        return self._fixed if kind_of(params) in self._fixed_for else None

    def is_fixed(self, params: SamplingParams) -> bool:
        return self._tree_of(params) is not None

    def counted(self, params: SamplingParams) -> RankTree | None:
        return None if self._fixed is None else self._fixed.counted(params)

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        curve = self._curves.get(kind_of(params))
        if curve is None or self.is_fixed(params):
            return None if self._fixed is None else self._fixed.acceptance_curve(params)
        return curve


def trees_for(heads: int, counted: Mapping[str, RankTree], facts: Mapping[str, Any]) -> LikeliestTrees:
    """What heads draft by unless somebody says otherwise: trees chosen at each step where these were not worse.

    Args:
        heads: that guess.
        counted: trees that were counted for them, by the kind of requests; none for those of other projects.
        facts: what was found out about them.

    Raises:
        ModelError: the facts are damaged.
    """
    calibration = Calibration.of(facts.get(FACT, {}))
    if not counted:
        return LikeliestTrees(heads, tree_curves(facts, heads), None, calibration)
    return LikeliestTrees(heads, tree_curves(facts, heads), FixedTrees(counted), calibration, fixed_for(facts))


def _likeliest(
    ids: NDArray[Any], log_probs: NDArray[Any], nodes: int, survival: AcceptanceOdds | None
) -> list[TokenTree]:
    """The trees of the best paths among guesses `[depth, requests, ranks]`."""
    if survival is not None:
        scores = torch.from_numpy(log_probs)
        log_probs = torch.stack([survival(own, depth) for depth, own in enumerate(scores, 1)]).numpy()
    chosen = likeliest_paths(log_probs, nodes)
    rows = ids.shape[1]
    own = ids.transpose(1, 0, 2).reshape(rows, -1)
    tokens = own[np.arange(rows)[:, None], chosen.places].tolist()
    return [TokenTree.of_ids(of_row, shape) for of_row, shape in zip(tokens, chosen.shapes, strict=True)]


def _on_host(guesses: TopK) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids, int64, and log probabilities, float32, `[depth, requests, ranks]`; read from a device at once."""
    ids, log_probs = guesses.ids, guesses.log_probs
    if not transfers.waits(ids.device):
        return ids.numpy(), log_probs.numpy()
    read = transfers.fetch([ids, log_probs])
    return np.array(read[0], np.int64).reshape(ids.shape), np.array(read[1], np.float32).reshape(ids.shape)


def coupled_guesses(logits: Tensor, temperatures: Sequence[float], noise: Sequence[Noise], ranks: int) -> TopK:
    """The likeliest choices of a target that draws by coupled noise, as far as heads know (arXiv 2408.07978).

    The target's choice is argmax(log p + G), with noise G that is known before anything is drafted (docs/concepts.md).
    A head's own candidate for it would be argmax(log q + G) with its distribution q at the request's temperature T,
    which is the argmax of its logits plus T G. But a head does not know the tokens between, so its distribution is a
    mixture: the target's is sharper, and its noise decides less often. So the noise is weighed by `noise_weight`, and
    the softmax of what comes out stands for the probability that a token is the target's choice.

    Top-k, top-p and min-p are not asked for: a token that they take from the head's distribution may well be in the
    target's, and acceptance was measured to be the same with and without them.

    Args:
        logits: `[depth, rows, vocab]`: row 0 of the first axis guesses the first token that the step decides.
        temperatures: of the rows' requests, above 0.
        noise: of each row's request at this step.
        ranks: guesses of each head, at most `vocab`.

    Returns:
        The guesses `[depth, rows, ranks]`, on the device of the logits; a row depends on itself alone. The host does
        not wait.
    """
    depth, rows, vocab = logits.shape
    scores = logits.float().clone()
    for row, (temperature, own) in enumerate(zip(temperatures, noise, strict=True)):
        for head in range(depth):
            scores[head, row].add_(own.gumbel(head, vocab, logits.device), alpha=noise_weight(temperature))
    return TopK.of(scores.flatten(0, 1), ranks).view(depth, rows)


def noise_weight(temperature: float) -> float:
    """How much a target's noise counts beside a head's logits: T min(T, 1).

    T would be right if the head's distribution were the target's. Below 1, fitting the weight to the choices of the
    embedded target gave about T squared for every head (0.5 at T = 0.7, 0.9 at T = 1), and more accepted tokens than T.
    """
    return temperature * min(temperature, 1.0)
