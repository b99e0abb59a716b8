"""Builds a tree per request from the guesses of several heads: by a tree of ranks, or by probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import Noise, gumbel_of
from truedraft.core.params import SamplingParams
from truedraft.core.probs import by_rows
from truedraft.core.rank_tree import RankTree, likeliest_paths
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import FACT, GREEDY, SAMPLED, Calibration, fixed_for, kind_of, tree_curves
from truedraft.errors import CompositionError, OptionError

MOST_RANKS = 64
"""Maximum number of a head's guesses in a tree chosen at each step."""
MOST_CHOSEN_NODES = 256
"""Maximum number of nodes of a tree chosen at each step; the number of paths to choose from grows faster."""

_KINDS = (GREEDY, SAMPLED)

Wanted: TypeAlias = tuple[SamplingParams, Budget]


class GuessTrees:
    """Makes trees from the heads' guesses: fixed trees of ranks, or at each step the likeliest rank paths.

    The likeliest paths have the largest product of their tokens' calibrated survival, or of the heads' own
    probabilities at temperature 1. Trees depend only on the hidden state and the token before the draft, so candidates
    are deterministic. On a device the likeliest paths cost one more wait per step. `name`, for reports and stored
    costs, is "fixed" if every request gets a fixed tree, otherwise "likeliest". Raises `OptionError` for no tree, an
    unknown kind of requests, or `fixed_for` without fixed trees.

    Args:
        curves: of trees chosen at each step, for "greedy" and "sampled" requests; default: the fixed tree's counts.
        fixed: trees of ranks for "greedy" and "sampled" requests; a missing one is replaced by the other.
        calibration: survival of guesses; None uses the heads' probabilities.
        fixed_for: kinds of requests that get the fixed tree.
    """

    def __init__(
        self,
        heads: int,
        curves: Mapping[str, AcceptanceCurve] | None = None,
        fixed: Mapping[str, RankTree] | None = None,
        calibration: Calibration | None = None,
        fixed_for: Collection[str] = (),
    ) -> None:
        if fixed is None and fixed_for:
            raise OptionError(f"requests of the kind {sorted(fixed_for)} get a fixed tree, and there is none; give one")
        if fixed is not None and (not fixed or set(fixed) - set(_KINDS)):
            raise OptionError(
                f"trees of Medusa heads are {GREEDY!r} and {SAMPLED!r}, got {sorted(fixed)}; count them, or give one"
            )
        self._heads = heads
        self._curves = dict(curves or {})
        self._counted = {} if fixed is None else {kind: fixed.get(kind, next(iter(fixed.values()))) for kind in _KINDS}
        self._calibration = calibration or Calibration()
        self._drafted = {kind: tree for kind, tree in self._counted.items() if kind in fixed_for}
        self._chooses = len(self._drafted) < len(_KINDS)
        self._cut: dict[tuple[str, int, int, int], RankTree] = {}
        self.name = "likeliest" if self._chooses else "fixed"

    def extent(self, nodes: int) -> Budget:
        """Limits of trees of at most `nodes` nodes; raises `OptionError` if these are too many."""
        # Trees are cut by order, not by depth or rank.
        kept = [tree.first(nodes) for tree in self._drafted.values()]
        limits = [(tree.depth, tree.width, len(tree)) for tree in kept]
        if self._chooses:
            if nodes > MOST_CHOSEN_NODES:
                raise OptionError(
                    f"a tree chosen at each step has at most {MOST_CHOSEN_NODES} nodes, got {nodes}; give fewer, or a "
                    "fixed tree"
                )
            limits.append((min(self._heads, nodes), min(MOST_RANKS, nodes), nodes))
        return Budget(*map(max, zip(*limits, strict=True)))

    def check(self, heads: int, vocab_size: int | None = None) -> None:
        """Raise `OptionError` for too few heads, or `CompositionError` for too few ids of a target."""
        # A tree chosen at each step may have fewer ranks.
        if self._chooses and self._heads > heads:
            raise OptionError(f"trees of {self._heads} heads need as many, and there are {heads}; choose by fewer")
        for tree in self._drafted.values():
            if tree.depth > heads:
                raise OptionError(
                    f"a Medusa tree {tree.depth} deep needs as many heads, and there are {heads}; give a shallower tree"
                )
            if vocab_size is not None and tree.width > vocab_size:
                raise CompositionError(
                    f"a Medusa tree {tree.width} ranks wide needs as many ids, and the target has {vocab_size}; give a "
                    "narrower tree"
                )

    def wanted(self, params: SamplingParams, budget: Budget) -> Budget:
        """Number of heads (`depth`), guesses (`width`) and nodes within a budget; zero if it drafts nothing."""
        if self.is_fixed(params):
            tree = self._fitting(params, budget)
            return Budget(tree.depth, tree.width, len(tree))
        if budget.is_zero:
            return NO_DRAFT
        nodes = budget.nodes
        return Budget(min(budget.depth, self._heads, nodes), min(budget.width, MOST_RANKS, nodes), nodes)

    def trees(self, guesses: TopK, requests: Sequence[Wanted]) -> list[TokenTree]:
        """A tree for each request, from guesses `[depth, requests, ranks]` of at least its `wanted` size."""
        found: dict[int, TokenTree] = {}
        fixed: dict[tuple[str, Budget], list[int]] = {}
        alike: dict[tuple[Budget, AcceptanceOdds | None], list[int]] = {}
        for row, (params, budget) in enumerate(requests):
            if self.is_fixed(params):
                fixed.setdefault((kind_of(params), budget), []).append(row)
            else:
                alike.setdefault((self.wanted(params, budget), self._calibration(params)), []).append(row)
        for rows in fixed.values():
            tree = self._fitting(*requests[rows[0]])
            own = guesses.ids
            if len(rows) < len(requests):
                own = own.index_select(1, transfers.upload(rows, own.device))
            tokens = tree.fill(own.transpose(1, 2)).t().contiguous()  # [requests, nodes]
            found.update(zip(rows, (TokenTree(each, tree.shape) for each in tokens), strict=True))
        if alike:
            ids, log_probs = _on_host(guesses)
            for (size, survival), rows in alike.items():
                every = slice(None) if len(rows) == len(requests) else rows  # a view if all are alike
                within = slice(size.depth), every, slice(size.width)
                found.update(zip(rows, _likeliest(ids[within], log_probs[within], size.nodes, survival), strict=True))
        return [found[row] for row in range(len(requests))]

    def counted(self, params: SamplingParams) -> RankTree | None:
        """The whole fixed tree of ranks, if any."""
        return self._counted.get(kind_of(params))

    def is_fixed(self, params: SamplingParams) -> bool:
        return kind_of(params) in self._drafted

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """Expected tokens by number of nodes, as measured."""
        curve = self._curves.get(kind_of(params))
        if curve is not None and not self.is_fixed(params):
            return curve
        tree = self.counted(params)
        if tree is None or not tree.survival:
            return None
        return AcceptanceCurve(tree.survival, tuple(itertools.accumulate(map(len, tree.paths), max, initial=0)))

    def _fitting(self, params: SamplingParams, budget: Budget) -> RankTree:
        """The first nodes of a request's tree that are not too deep or wide."""
        key = (kind_of(params), budget.depth, budget.width, budget.nodes)
        if key not in self._cut:
            kind, depth, width, nodes = key
            self._cut[key] = self._drafted[kind].first(nodes).within(depth, width)
        return self._cut[key]


def fixed_trees(trees: Mapping[str, RankTree]) -> GuessTrees:
    """Fixed trees of ranks for every request; raises `OptionError` for no tree, or an unknown kind of requests."""
    return GuessTrees(max((tree.depth for tree in trees.values()), default=0), fixed=trees, fixed_for=_KINDS)


def trees_for(heads: int, counted: Mapping[str, RankTree], facts: Mapping[str, Any]) -> GuessTrees:
    """The default trees: chosen at each step, unless counted ones were better; `ModelError` for damaged facts."""
    calibration = Calibration.of(facts.get(FACT, {}))
    better = fixed_for(facts) if counted else ()
    return GuessTrees(heads, tree_curves(facts, heads), counted or None, calibration, better)


def _likeliest(
    ids: NDArray[Any], log_probs: NDArray[Any], nodes: int, survival: AcceptanceOdds | None
) -> list[TokenTree]:
    if survival is not None:
        log_probs = survival.of_depths(torch.from_numpy(log_probs)).numpy()
    chosen = likeliest_paths(log_probs, nodes)
    rows = ids.shape[1]
    own = ids.transpose(1, 0, 2).reshape(rows, -1)
    tokens = own[np.arange(rows)[:, None], chosen.places].tolist()
    return [TokenTree.of_ids(of_row, shape) for of_row, shape in zip(tokens, chosen.shapes, strict=True)]


def _on_host(guesses: TopK) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids, int64, and log probabilities, float32, in one transfer."""
    ids, log_probs = guesses.ids, guesses.log_probs
    if not transfers.waits(ids.device):
        return ids.numpy(), log_probs.numpy()
    read = transfers.fetch([ids, log_probs])
    return np.array(read[0], np.int64).reshape(ids.shape), np.array(read[1], np.float32).reshape(ids.shape)


def coupled_guesses(logits: Tensor, temperatures: Sequence[float], noise: Sequence[Noise], ranks: int) -> TopK:
    """The likeliest choices of a target that draws by coupled noise, as predicted by the heads (arXiv 2408.07978).

    The target's choice is argmax(log p + G), with noise G that is known before drafting (docs/concepts.md). With the
    head's distribution q it would be the argmax of its logits plus T G at temperature T. But a head does not see the
    tokens in between, so its distribution is a mixture, the target's is sharper, and its noise decides less often: the
    noise is scaled by `noise_weight`. Top-k, top-p and min-p are ignored, as measured acceptance is the same.

    `logits` are `[depth, rows, vocab]`: row 0 of the first axis guesses the first token of the step; temperatures are
    above 0. The guesses are `[depth, rows, ranks]`, on the device; a row depends only on itself.
    """
    depth, rows, vocab = logits.shape
    scores = logits.float().clone()
    for row, (temperature, own) in enumerate(zip(temperatures, noise, strict=True)):
        for head in range(depth):
            scores[head, row].add_(own.gumbel(head, vocab, logits.device) * noise_weight(temperature))
    return TopK.of(scores.flatten(0, 1), ranks).view(depth, rows)


def keyed_guesses(logits: Tensor, weights: Tensor, keys: Tensor, ranks: int) -> TopK:
    """The same with tensors only, so that it can be recorded.

    `weights`, `[rows]`, float64, are `noise_weight` of each row's temperature; `keys`, `[rows, depth]`, int64, the 64
    bits of `gumbel_key` for each head.
    """
    depth, rows, vocab = logits.shape
    tokens = torch.arange(vocab, device=logits.device)

    def guessed(some: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = gumbel_of(key[:, None], tokens).mul_(weight[:, None]).add_(some.float())  # float64
        found = TopK.of(scores.float(), ranks)
        return found.ids, found.log_probs

    found = by_rows(guessed, logits.flatten(0, 1), keys.t().flatten(), weights.repeat(depth))
    return TopK(*found).view(depth, rows)


def noise_weight(temperature: float) -> float:
    """Scale of the target's noise when added to a head's logits: T min(T, 1).

    T would be right if the head's distribution were the target's. Fits on the embedded target gave about T squared
    below 1 (0.5 at T = 0.7, 0.9 at T = 1), and more accepted tokens than T.
    """
    return temperature * min(temperature, 1.0)
