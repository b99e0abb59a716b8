"""Medusa heads as drafter: heads on one hidden state of the target guess several tokens, which fill a tree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, gumbel_key, signed
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.top_k import TopK
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.heads.base import HeadDrafter, SizePlan, TreeFacts
from truedraft.drafters.heads.calibration import GREEDY, PROMISED_ON, SAMPLED, kind_of
from truedraft.errors import OptionError
from truedraft.kinds.medusa.guess_trees import (
    GuessTrees,
    coupled_guesses,
    fixed_trees,
    keyed_guesses,
    noise_weight,
    trees_for,
)
from truedraft.kinds.medusa.module import MedusaHeads, MedusaRunner
from truedraft.models.backends.graphs.replay import Outputs, RecordedFunction, Recorder
from truedraft.models.base import LanguageModel

DEFAULT_NODES = 16
"""Default number of nodes; the best number depends on the machine and is measured (planning)."""


class MedusaGuesses:
    """Guesses of the heads from hidden states of the target and the tokens drawn from them, on the device.

    Recorded heads always compute the maximum number of guesses, so that all budgets share a graph.
    """

    def __init__(self, runner: MedusaRunner, depth: int, ranks: int, recorder: Recorder | None) -> None:
        self._runner = runner
        self._most = None if recorder is None else (depth, ranks)
        self._likeliest = RecordedFunction(self._find_likeliest, recorder)
        self._coupled = RecordedFunction(self._find_coupled, recorder)

    @property
    def warmups(self) -> int:
        return self._likeliest.warmups + self._coupled.warmups

    def likeliest(self, hidden: Tensor, drawn: Tensor, depth: int, ranks: int) -> TopK:
        """The likeliest tokens by the heads' own distributions, `[depth or more, rows, ranks or more]`."""
        return _by_head(self._likeliest((hidden, drawn), *(self._most or (depth, ranks))))

    def coupled(
        self,
        hidden: Tensor,
        drawn: Tensor,
        temperatures: Sequence[float],
        noise: Sequence[Noise],
        depth: int,
        ranks: int,
    ) -> TopK:
        """The likeliest choices of a target that draws by coupled noise at temperatures above 0."""
        most = self._most
        keys = [] if most is None else [gumbel_key(own, head) for own in noise for head in range(most[0])]
        known = [signed(key) for key in keys if key is not None]
        if most is None or len(known) < len(keys):
            return coupled_guesses(self._runner.logits(hidden, depth, drawn), temperatures, noise, ranks)
        weights = transfers.upload([noise_weight(each) for each in temperatures], hidden.device, torch.float64)
        of_heads = transfers.upload(np.array(known).reshape(len(noise), -1), hidden.device)
        return _by_head(self._coupled((hidden, drawn, weights, of_heads), *most))

    def _find_likeliest(self, hidden: Tensor, drawn: Tensor, depth: int, ranks: int) -> Outputs:
        return _by_row(self._runner.likeliest(hidden, depth, ranks, drawn))

    def _find_coupled(
        self, hidden: Tensor, drawn: Tensor, weights: Tensor, keys: Tensor, depth: int, ranks: int
    ) -> Outputs:
        return _by_row(keyed_guesses(self._runner.logits(hidden, depth, drawn), weights, keys, ranks))


def _by_row(guesses: TopK) -> Outputs:
    """`[depth, rows, ranks]` to `[rows, depth, ranks]`."""
    return guesses.ids.transpose(0, 1), guesses.log_probs.transpose(0, 1)


def _by_head(outputs: Outputs) -> TopK:
    ids, log_probs = (each.transpose(0, 1) for each in outputs)
    return TopK(ids, log_probs)


class Medusa(HeadDrafter[MedusaHeads, MedusaGuesses]):
    """Drafts with heads on the target's last hidden state (Medusa 2401.10774, section 2.1).

    Each head's likeliest tokens are candidates, combined by a tree of ranks; for seeded requests those that their noise
    makes likeliest (`coupled_guesses`). They are chosen, not drawn, so verification is exact at every temperature. Ties
    go to the lowest id, so a request's candidates do not depend on other requests.

    Args:
        trees: a mapping means `fixed_trees` of it; None is the best on held-out text, see `trees_for`.
        nodes: maximum number of nodes of a proposal; None is 16 until `with_nodes`.

    Raises:
        OptionError: no tree, one that is deeper than the number of heads, or an invalid number of nodes.
        ModelError: the heads' facts are damaged.
    """

    name = "medusa"

    def __init__(
        self, heads: MedusaHeads, trees: GuessTrees | Mapping[str, RankTree] | None = None, *, nodes: int | None = None
    ) -> None:
        super().__init__(heads)
        if trees is None:
            trees = trees_for(heads.reach, heads.record.trees, heads.record.facts)
        self.guess_trees = trees if isinstance(trees, GuessTrees) else fixed_trees(trees)
        self.guess_trees.check(heads.reach)
        self.nodes_chosen = nodes is not None
        self.nodes = DEFAULT_NODES if nodes is None else nodes
        if self.nodes < 0:
            raise OptionError(f"nodes of a Medusa tree must be 0 or more, got {nodes}")
        self.limits = self.guess_trees.extent(self.nodes)
        self.tree_kind = self.guess_trees.name

    def with_nodes(self, nodes: int) -> Medusa:
        """The same drafter with another number of nodes, and without requests."""
        return Medusa(self.head, self.guess_trees, nodes=nodes)

    def tree_for(self, params: SamplingParams) -> RankTree | None:
        """The whole fixed tree of ranks, if any."""
        return self.guess_trees.counted(params)

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        curve = self.guess_trees.acceptance_curve(params)
        return None if curve is None else replace(curve, text=str(self.facts.get(PROMISED_ON, "")))

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        curve = None if self.nodes_chosen else self.acceptance_curve(params)
        if curve is None:
            return ()
        return (SizePlan("", curve, self.with_nodes(len(curve.marginal_gains)), self.with_nodes),)

    def tree_facts(self, params: SamplingParams) -> TreeFacts | None:
        """The counted tree, with stored accuracies, if any."""
        whole = self.tree_for(params)
        if whole is None or not self.nodes:
            return None
        accuracy = self.facts.get("trees", {}).get(kind_of(params), {}).get("rank_accuracy")
        tree, fixed = whole.first(self.nodes), self.guess_trees.is_fixed(params)
        return TreeFacts(tree, fixed, self.nodes, self.acceptance_curve(params), accuracy)

    def _runner_for(self, target: LanguageModel) -> MedusaGuesses:
        self.guess_trees.check(self.head.reach, target.vocab_size)
        depth, ranks = max(1, self.limits.depth), min(self.limits.width, target.vocab_size)
        return MedusaGuesses(MedusaRunner(self.head, target, depth), depth, ranks, self._recorder(target))

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = [Proposal.empty()] * len(batch)
        allowed = [Budget(each.depth, each.width, min(each.nodes, self.nodes)) for each in budgets]
        sizes = [self.guess_trees.wanted(each.params, own) for each, own in zip(batch, allowed, strict=True)]
        places = [
            place
            for place, (request, own) in enumerate(zip(batch, sizes, strict=True))
            if self._vectors.get(request.id) is not None and not own.is_zero
        ]
        if not places:
            return proposals
        # Seeded requests last, so that each kind is computed together.
        places.sort(key=lambda place: batch[place].params.seeded)
        guesses = self._guess(
            [batch[place] for place in places], [sizes[place] for place in places], [noise[place] for place in places]
        )
        trees = self.guess_trees.trees(guesses, [(batch[place].params, allowed[place]) for place in places])
        for place, tree in zip(places, trees, strict=True):
            proposals[place] = Proposal.deterministic(tree)
        return proposals

    def _guess(self, requests: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> TopK:
        """`[depth, requests, ranks]` on the device, seeded requests last; budgets: heads, guesses and nodes."""
        guesses, target = self._running
        depth = max(each.depth for each in budgets)
        ranks = min(max(each.width for each in budgets), target.vocab_size)
        split = sum(not each.params.seeded for each in requests)
        found = []
        with torch.inference_mode():
            hidden, drawn = self._last_vectors(requests)
            if split:
                found.append(guesses.likeliest(hidden[:split], drawn[:split], depth, ranks))
            if split < len(requests):
                temperatures = [each.params.temperature for each in requests[split:]]
                found.append(guesses.coupled(hidden[split:], drawn[split:], temperatures, noise[split:], depth, ranks))
            return found[0] if len(found) == 1 else _side_by_side(found)


def _side_by_side(guesses: Sequence[TopK]) -> TopK:
    ids = torch.cat([each.ids for each in guesses], dim=1)
    return TopK(ids, torch.cat([each.log_probs for each in guesses], dim=1))


def medusa(
    head: MedusaHeads, nodes: int | None = None, branching: Sequence[int] | None = None, tree: str | None = None
) -> Medusa:
    """A drafter with trees chosen at each step, or one fixed tree: `branching`, "counted", or that of a JSON file."""
    if branching is not None and tree is not None:
        raise OptionError("drafter 'medusa' takes branching or tree, not both")
    if branching is None and tree is None:
        return Medusa(head, nodes=nodes)
    if tree == "counted":
        return Medusa(head, fixed_trees(head.record.trees), nodes=nodes)
    ranks = RankTree.cartesian(branching or ()) if tree is None else _listed(tree)
    trees = fixed_trees({GREEDY: ranks, SAMPLED: ranks})
    return Medusa(head, trees, nodes=len(ranks) if nodes is None else nodes)


def _listed(file: str) -> RankTree:
    try:
        paths = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown home folder, or recursive lists
        raise OptionError(f"cannot read the tree {file!r} ({error}); give a JSON list of rank paths") from error
    whole = isinstance(paths, list) and all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
    )
    if not whole or not paths:
        raise OptionError(f"the tree {file!r} is no list of rank paths; write for example [[0], [0, 0], [1]]")
    return RankTree.listed(paths)
