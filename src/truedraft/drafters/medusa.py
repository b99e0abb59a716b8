"""Medusa heads as drafter: one vector of the target gives guesses for several tokens, and they fill in a tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter, DraftRequest, Features, SizePlan, StepOutcome, TreeFacts
from truedraft.drafters.calibration import PROMISED_ON, kind_of
from truedraft.drafters.coupled_guesses import coupled_guesses
from truedraft.drafters.guess_trees import FixedTrees, GuessTrees, trees_for
from truedraft.drafters.last_vectors import LastVectors
from truedraft.drafters.trained_for import TrainedFor
from truedraft.errors import DrafterError, OptionError
from truedraft.heads.checkpoint import MedusaCheckpoint, load_medusa
from truedraft.heads.medusa import MedusaHeads
from truedraft.heads.medusa_runner import MedusaRunner
from truedraft.models.base import LanguageModel
from truedraft.models.ranking import Likeliest
from truedraft.theory import AcceptanceCurve

DEFAULT_NODES = 16
"""Nodes of a tree whose size nobody chose; what is best depends on the machine and is measured (planning)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request that a tree is drafted for.

    Attributes:
        place: in the batch.
        params: of the request.
        noise: of this step.
        budget: of this step, the drafter's own number of nodes included.
        extent: how many heads, guesses and nodes it takes.
        vector: `[width]`: what its heads read.
        drawn: the token drawn from the vector.
    """

    place: int
    params: SamplingParams
    noise: Noise
    budget: Budget
    extent: Budget
    vector: Tensor
    drawn: int

    @property
    def is_coupled(self) -> bool:
        """Whether its noise is known to the target and the heads."""
        return self.params.coupled and not self.params.greedy


class Medusa(Drafter):
    """Drafts with heads on the target's last hidden state (Medusa 2401.10774, section 2.1).

    Each head's likeliest tokens are candidates, put together by a tree of ranks. They were chosen, not drawn, so the
    rule follows the child that carries the token it draws from the target's law: exact at every temperature. Ties go
    to the lowest id, so a request's candidates do not depend on its neighbours.

    Coupled requests get the tokens that their noise makes likeliest (`coupled_guesses`), in the same trees. They are
    judged by comparison, so these candidates too are deterministic.

    The target's own LM head ends tied heads, so the drafter runs with the target that it was last checked against,
    which an engine does when it is made.

    Args:
        heads: trained for the target.
        trees: how guesses become trees; a mapping stands for `FixedTrees` of it.
        nodes: most nodes of a proposal; None takes 16 until `with_nodes` says better.
        target_name: what the heads' target was called, for messages.
        fingerprint: of the heads' target; None where nobody knows, then any target of their sizes is taken.
        note: what a user should know of these heads.
        facts: what was found out about them when they were trained.

    Attributes:
        nodes: most nodes of a proposal.
        nodes_chosen: whether the number of nodes was chosen, by the caller or by measuring.
        tree_kind: how guesses become trees, "likeliest" or "fixed".
        sizes: of the heads, as `MedusaConfig` lists them; what a proposal costs depends on them.
        note: as given.
        facts: as given.

    Raises:
        OptionError: no tree, one that is deeper than there are heads, or an unusable number of nodes.
    """

    name: ClassVar[str] = "medusa"
    features: ClassVar[Features | None] = Features()

    def __init__(
        self,
        heads: MedusaHeads,
        trees: GuessTrees | Mapping[str, RankTree],
        *,
        nodes: int | None = None,
        target_name: str = "",
        fingerprint: str | None = None,
        note: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._trees = trees if isinstance(trees, GuessTrees) else FixedTrees(trees)
        self._trees.check(heads.config.heads)
        self.nodes_chosen = nodes is not None
        self.nodes = DEFAULT_NODES if nodes is None else nodes
        if self.nodes < 0:
            raise OptionError(f"nodes of a Medusa tree must be 0 or more, got {nodes}")
        self.limits = self._trees.extent(self.nodes)
        self.tree_kind = self._trees.name
        self.note = note
        self.facts = dict(facts or {})
        self.sizes = astuple(heads.config)
        self._heads = heads
        config = heads.config
        self._trained_for = TrainedFor("Medusa heads", config.width, config.vocab_size, target_name, fingerprint)
        self._runner: MedusaRunner | None = None
        self._runs_with: LanguageModel | None = None
        self._vectors = LastVectors(config.width)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        nodes: int | None = None,
        trees: GuessTrees | Mapping[str, RankTree] | None = None,
    ) -> Medusa:
        """Heads of a folder that `truedraft train medusa` wrote, or of the original Medusa project.

        Args:
            folder: with the heads.
            nodes: as for `Medusa`.
            trees: as for `Medusa`; None takes what was found best on held-out text, see `trees_for`.

        Raises:
            ModelError: there are no heads, or their files are damaged.
            OptionError: as `Medusa`.
        """
        return cls.of(load_medusa(folder), nodes=nodes, trees=trees)

    @classmethod
    def of(
        cls,
        checkpoint: MedusaCheckpoint,
        *,
        nodes: int | None = None,
        trees: GuessTrees | Mapping[str, RankTree] | None = None,
    ) -> Medusa:
        """Heads of a checkpoint; see `load`."""
        if trees is None:
            trees = trees_for(checkpoint.heads.config.heads, checkpoint.trees, checkpoint.facts)
        return cls(
            checkpoint.heads,
            trees,
            nodes=nodes,
            target_name=checkpoint.target_name,
            fingerprint=checkpoint.fingerprint,
            note=checkpoint.note,
            facts=checkpoint.facts,
        )

    def with_nodes(self, nodes: int) -> Medusa:
        """The same heads and trees with another number of nodes, as measuring may show it to be best; 0 drafts nothing.

        The new drafter has no requests of the old one.
        """
        return Medusa(
            self._heads,
            self._trees,
            nodes=nodes,
            target_name=self._trained_for.name,
            fingerprint=self._trained_for.fingerprint,
            note=self.note,
            facts=self.facts,
        )

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Deterministic candidates."""
        return frozenset({DrawKind.DETERMINISTIC})

    @property
    def heads(self) -> MedusaHeads:
        """The heads."""
        return self._heads

    def tree_for(self, params: SamplingParams) -> RankTree | None:
        """The whole tree of ranks for requests with these sampling options, all of its nodes; None if there is none.

        Where `is_fixed` says so, it is what they are drafted by; otherwise what was counted for these heads.
        """
        return self._trees.counted(params)

    def is_fixed(self, params: SamplingParams) -> bool:
        """Whether that tree is what requests with these options are drafted by; otherwise each step chooses one."""
        return self._trees.is_fixed(params)

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """What nodes are expected to bring to requests with these options; None where nobody measured it."""
        curve = self._trees.acceptance_curve(params)
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
        tree, fixed = whole.first(self.nodes), self.is_fixed(params)
        return TreeFacts(tree, fixed, self.nodes, self.acceptance_curve(params), accuracy)

    def check(self, target: LanguageModel) -> None:
        """Refuse another target than that of the heads; from now on drafts with this one.

        Raises:
            CompositionError: names both targets, or what does not fit.
            ModelError: the target has no LM head that could be shared, or its weights cannot be read again.
        """
        if target is self._runs_with:
            return
        self._trained_for.check(target)
        config = self._heads.config
        if config.reads_token:
            target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))  # raises where it cannot
        self._trees.check(config.heads, target.vocab_size)
        self._runner = MedusaRunner(self._heads, target, max(1, self.limits.depth))
        self._runs_with = target

    def begin(self, request: DraftRequest) -> None:
        """A request starts; its first vector comes with the end of its prompt."""
        self._vectors.begin(request)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """A tree for each request, by one pass of the heads over all their vectors."""
        proposals = [Proposal.empty()] * len(batch)
        # Those alike stand side by side: their guesses are made together, and come to the host together with all.
        asked = sorted(self._asked(batch, budgets, noise), key=lambda each: each.is_coupled)
        if not asked:
            return proposals
        trees = self._trees.trees(self._guess(asked), [(each.params, each.budget) for each in asked])
        for each, tree in zip(asked, trees, strict=True):
            proposals[each.place] = Proposal.deterministic(tree)
        return proposals

    def _asked(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> Iterator[_Asked]:
        """The requests that have a vector and may draft something."""
        for place, (request, budget, own) in enumerate(zip(batch, budgets, noise, strict=True)):
            vector = self._vectors.get(request)
            allowed = Budget(budget.depth, budget.width, min(budget.nodes, self.nodes))
            extent = self._trees.wanted(request.params, allowed)
            if vector is not None and not extent.is_zero:
                yield _Asked(place, request.params, own, allowed, extent, vector, request.tokens[-1])

    def _guess(self, asked: Sequence[_Asked]) -> Likeliest:
        """Guesses `[depth, requests, ranks]` for requests, those that are coupled last; on a device they stay there."""
        if self._runner is None or self._runs_with is None:
            raise DrafterError("Medusa heads need the target's LM head: call check(target) first, as an engine does")
        depth = max(each.extent.depth for each in asked)
        ranks = min(max(each.extent.width for each in asked), self._runs_with.vocab_size)
        alone = sum(not each.is_coupled for each in asked)
        coupled = asked[alone:]
        found = []
        with torch.inference_mode():
            hidden = torch.stack([each.vector for each in asked])
            drawn = transfers.upload([each.drawn for each in asked], hidden.device)
            if alone:
                found.append(self._runner.likeliest(hidden[:alone], depth, ranks, drawn[:alone]))
            if coupled:
                logits = self._runner.logits(hidden[alone:], depth, drawn[alone:])
                temperatures = [each.params.temperature for each in coupled]
                found.append(coupled_guesses(logits, temperatures, [each.noise for each in coupled], ranks))
            return found[0] if len(found) == 1 else _side_by_side(found)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Keep the vector from which each request's last token was drawn: at the end of its accepted path."""
        self._vectors.observe(batch, outcomes)

    @property
    def holding(self) -> Collection[int]:
        return self._vectors.holding

    def end(self, request: DraftRequest) -> None:
        """Drop the vector."""
        self._vectors.end(request)


def _side_by_side(guesses: Sequence[Likeliest]) -> Likeliest:
    """Guesses `[depth, some requests, ranks]` of equal depth and ranks as those of all the requests."""
    ids = torch.cat([each.ids for each in guesses], dim=1)
    return Likeliest(ids, torch.cat([each.log_probs for each in guesses], dim=1))
