"""Medusa heads as drafter: heads on one hidden state of the target guess several tokens, which fill a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.top_k import TopK
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.heads.base import HeadDrafter, SizePlan, TreeFacts
from truedraft.drafters.heads.calibration import PROMISED_ON, kind_of
from truedraft.errors import OptionError
from truedraft.kinds.medusa.guess_trees import GuessTrees, fixed_trees, trees_for
from truedraft.kinds.medusa.guesses import MedusaGuesses
from truedraft.kinds.medusa.module import MedusaHeads, MedusaRunner
from truedraft.models.base import LanguageModel

DEFAULT_NODES = 16
"""Default number of nodes; the best number depends on the machine and is measured (planning)."""


class Medusa(HeadDrafter[MedusaHeads, MedusaGuesses]):
    """Drafts with heads on the target's last hidden state (Medusa 2401.10774, section 2.1).

    Each head's likeliest tokens are candidates, combined by a tree of ranks. They are chosen, not drawn, so
    verification is exact at every temperature. Ties go to the lowest id, so a request's candidates do not depend on
    other requests.

    Seeded requests get the tokens that their noise makes likeliest (`coupled_guesses`), in the same trees. They are
    verified by comparison, so these candidates are deterministic too.

    Args:
        trees: how guesses become trees; a mapping means `fixed_trees` of it; None is the best on held-out text, see
            `trees_for`.
        nodes: maximum number of nodes of a proposal; None is 16 until `with_nodes`.

    Attributes:
        nodes_chosen: whether the number of nodes was chosen, by the caller or by measuring.

    Raises:
        OptionError: no tree, one that is deeper than the number of heads, or an invalid number of nodes.
        ModelError: the heads' facts are damaged.
    """

    name: ClassVar[str] = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        trees: GuessTrees | Mapping[str, RankTree] | None = None,
        *,
        nodes: int | None = None,
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
        """The same heads and trees with another number of nodes, and without requests; 0 drafts nothing."""
        return Medusa(self.head, self.guess_trees, nodes=nodes)

    def tree_for(self, params: SamplingParams) -> RankTree | None:
        """The whole fixed tree of ranks for requests with these options; None if there is none."""
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
        """The counted tree, with accuracies stored with the heads; None without such a tree or nodes."""
        whole = self.tree_for(params)
        if whole is None or not self.nodes:
            return None
        accuracy = self.facts.get("trees", {}).get(kind_of(params), {}).get("rank_accuracy")
        tree, fixed = whole.first(self.nodes), self.guess_trees.is_fixed(params)
        return TreeFacts(tree, fixed, self.nodes, self.acceptance_curve(params), accuracy)

    @property
    def warmups(self) -> int:
        return 0 if self._runner is None else self._runner.warmups

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
        # Seeded requests last, so that each kind is computed together; one transfer copies all guesses to the host.
        places.sort(key=lambda place: batch[place].params.seeded)
        guesses = self._guess(
            [batch[place] for place in places], [sizes[place] for place in places], [noise[place] for place in places]
        )
        trees = self.guess_trees.trees(guesses, [(batch[place].params, allowed[place]) for place in places])
        for place, tree in zip(places, trees, strict=True):
            proposals[place] = Proposal.deterministic(tree)
        return proposals

    def _guess(self, requests: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> TopK:
        """Guesses `[depth, requests, ranks]` for requests, seeded ones last; on a device they stay there.

        Args:
            budgets: number of heads, guesses and nodes of each request.
        """
        guesses, target = self._running
        depth = max(each.depth for each in budgets)
        ranks = min(max(each.width for each in budgets), target.vocab_size)
        split = sum(not each.params.seeded for each in requests)
        vectors = [vector for each in requests if (vector := self._vectors[each.id]) is not None]
        found = []
        with torch.inference_mode():
            hidden = torch.stack(vectors)
            drawn = transfers.upload([each.tokens[-1] for each in requests], hidden.device)
            if split:
                found.append(guesses.likeliest(hidden[:split], drawn[:split], depth, ranks))
            if split < len(requests):
                temperatures = [each.params.temperature for each in requests[split:]]
                found.append(guesses.coupled(hidden[split:], drawn[split:], temperatures, noise[split:], depth, ranks))
            return found[0] if len(found) == 1 else _side_by_side(found)


def _side_by_side(guesses: Sequence[TopK]) -> TopK:
    ids = torch.cat([each.ids for each in guesses], dim=1)
    return TopK(ids, torch.cat([each.log_probs for each in guesses], dim=1))
