"""Medusa heads as drafter: one vector of the target gives guesses for several tokens, and they fill in a tree."""

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
"""Nodes of a tree whose size nobody chose; what is best depends on the machine and is measured (planning)."""


class Medusa(HeadDrafter[MedusaHeads, MedusaGuesses]):
    """Drafts with heads on the target's last hidden state (Medusa 2401.10774, section 2.1).

    Each head's likeliest tokens are candidates, put together by a tree of ranks. They were chosen, not drawn, so the
    rule follows the child that carries the token it draws from the target's distribution: exact at every temperature.
    Ties go to the lowest id, so a request's candidates do not depend on its neighbours.

    Seeded requests get the tokens that their noise makes likeliest (`coupled_guesses`), in the same trees. They are
    judged by comparison, so these candidates too are deterministic.

    Args:
        heads: trained for the target.
        trees: how guesses become trees; a mapping stands for `fixed_trees` of it; None takes what was found best on
            held-out text, see `trees_for`.
        nodes: most nodes of a proposal; None takes 16 until `with_nodes` says better.

    Attributes:
        nodes: most nodes of a proposal.
        nodes_chosen: whether the number of nodes was chosen, by the caller or by measuring.
        guess_trees: how guesses become trees.
        tree_kind: its name, "likeliest" or "fixed".

    Raises:
        OptionError: no tree, one that is deeper than there are heads, or an unusable number of nodes.
        ModelError: what is known about the heads is damaged.
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
        """The same heads and trees with another number of nodes, as measuring may show it to be best; 0 drafts nothing.

        The new drafter has no requests of the old one.
        """
        return Medusa(self.head, self.guess_trees, nodes=nodes)

    def tree_for(self, params: SamplingParams) -> RankTree | None:
        """The whole fixed tree of ranks for requests with these options, all of its nodes; None if there is none."""
        return self.guess_trees.counted(params)

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """What nodes are expected to bring to requests with these options; None where nobody measured it."""
        curve = self.guess_trees.acceptance_curve(params)
        return None if curve is None else replace(curve, text=str(self.facts.get(PROMISED_ON, "")))

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """One, unless the number of nodes was chosen."""
        curve = None if self.nodes_chosen else self.acceptance_curve(params)
        if curve is None:
            return ()
        return (SizePlan("", curve, self.with_nodes(len(curve.marginal_gains)), self.with_nodes),)

    def tree_facts(self, params: SamplingParams) -> TreeFacts | None:
        """The counted tree, with the accuracies that were kept with the heads; None without such a tree or nodes."""
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
        """A tree for each request, by one pass of the heads over all their vectors."""
        proposals = [Proposal.empty()] * len(batch)
        allowed = [Budget(each.depth, each.width, min(each.nodes, self.nodes)) for each in budgets]
        wanted = [self.guess_trees.wanted(each.params, own) for each, own in zip(batch, allowed, strict=True)]
        asked = [
            place
            for place, (request, own) in enumerate(zip(batch, wanted, strict=True))
            if self._vectors.get(request.id) is not None and not own.is_zero
        ]
        if not asked:
            return proposals
        # Those alike stand side by side: their guesses are made together, and come to the host together with all.
        asked.sort(key=lambda place: batch[place].params.seeded)
        guesses = self._guess(
            [batch[place] for place in asked], [wanted[place] for place in asked], [noise[place] for place in asked]
        )
        trees = self.guess_trees.trees(guesses, [(batch[place].params, allowed[place]) for place in asked])
        for place, tree in zip(asked, trees, strict=True):
            proposals[place] = Proposal.deterministic(tree)
        return proposals

    def _guess(self, asked: Sequence[DraftRequest], wanted: Sequence[Budget], noise: Sequence[Noise]) -> TopK:
        """Guesses `[depth, requests, ranks]` for requests, those that are seeded last; on a device they stay there.

        Args:
            asked: those that a tree is drafted for.
            wanted: how many heads, guesses and nodes each takes.
            noise: of each, at this step.
        """
        guesses, target = self._running
        depth = max(each.depth for each in wanted)
        ranks = min(max(each.width for each in wanted), target.vocab_size)
        alone = sum(not each.params.seeded for each in asked)
        vectors = [vector for each in asked if (vector := self._vectors[each.id]) is not None]
        found = []
        with torch.inference_mode():
            hidden = torch.stack(vectors)
            drawn = transfers.upload([each.tokens[-1] for each in asked], hidden.device)
            if alone:
                found.append(guesses.likeliest(hidden[:alone], drawn[:alone], depth, ranks))
            if alone < len(asked):
                temperatures = [each.params.temperature for each in asked[alone:]]
                found.append(guesses.coupled(hidden[alone:], drawn[alone:], temperatures, noise[alone:], depth, ranks))
            return found[0] if len(found) == 1 else _side_by_side(found)


def _side_by_side(guesses: Sequence[TopK]) -> TopK:
    """Guesses `[depth, some requests, ranks]` of equal depth and ranks as those of all the requests."""
    ids = torch.cat([each.ids for each in guesses], dim=1)
    return TopK(ids, torch.cat([each.log_probs for each in guesses], dim=1))
