"""Medusa heads as drafter: one vector of the target gives guesses for several tokens, and they fill in a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
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
from truedraft.core.trees import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.errors import CompositionError, DrafterError, OptionError
from truedraft.heads.checkpoint import MedusaCheckpoint, load_medusa
from truedraft.heads.medusa import MedusaHeads
from truedraft.heads.medusa_runner import MedusaRunner
from truedraft.models.base import LanguageModel

GREEDY, SAMPLED = "greedy", "sampled"
DEFAULT_NODES = 16
"""Nodes of a tree whose size nobody chose; what is best depends on the machine and is measured (planning)."""


class Medusa(Drafter):
    """Drafts with heads on the target's last hidden state (Medusa 2401.10774, section 2.1).

    Each head's likeliest tokens are candidates, put together by a tree of ranks that was fixed before. They were
    chosen, not drawn, so the rule follows the child that carries the token it draws from the target's law: exact at
    every temperature. Ties go to the lowest id, so a request's candidates do not depend on its neighbours.

    The target's own LM head ends tied heads, so the drafter runs with the target that it was last checked against,
    which an engine does when it is made.

    Args:
        heads: trained for the target.
        trees: a tree for requests at temperature 0, "greedy", and one for others, "sampled"; if one is missing, the
            other serves for both.
        nodes: most nodes of a proposal, the first of the tree; None takes 16 until `with_nodes` says better.
        target_name: what the heads' target was called, for messages.
        fingerprint: of the heads' target; None where nobody knows, then any target of their sizes is taken.
        note: what a user should know of these heads.
        facts: what was found out about them when they were trained.

    Attributes:
        nodes: most nodes of a proposal.
        nodes_chosen: whether the number of nodes was chosen, by the caller or by measuring.
        sizes: of the heads, as `MedusaConfig` lists them; what a proposal costs depends on them.
        note: as given.
        facts: as given.

    Raises:
        OptionError: no tree, one that is deeper than there are heads, or a number of nodes below 0.
    """

    name: ClassVar[str] = "medusa"
    needs_hidden: ClassVar[bool] = True

    def __init__(
        self,
        heads: MedusaHeads,
        trees: Mapping[str, RankTree],
        *,
        nodes: int | None = None,
        target_name: str = "",
        fingerprint: str | None = None,
        note: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._trees = _trees_for(trees, heads)
        self.nodes_chosen = nodes is not None
        self.nodes = DEFAULT_NODES if nodes is None else nodes
        if self.nodes < 0:
            raise OptionError(f"nodes of a Medusa tree must be 0 or more, got {nodes}")
        self.note = note
        self.facts = dict(facts or {})
        self.sizes = astuple(heads.config)
        self._heads = heads
        self._target_name = target_name
        self._fingerprint = fingerprint
        kept = [tree.first(self.nodes) for tree in self._trees.values()]
        # Limits of the whole trees: a deeper node may come first in one of them, and cutting is done by order.
        self.limits = Budget(max(tree.depth for tree in kept), max(tree.width for tree in kept), max(map(len, kept)))
        self._cut: dict[tuple[str, int, int, int], RankTree] = {}
        self._runner: MedusaRunner | None = None
        self._runs_with: LanguageModel | None = None
        self._vectors: dict[int, Tensor | None] = {}

    @classmethod
    def load(
        cls, folder: Path | str, *, nodes: int | None = None, trees: Mapping[str, RankTree] | None = None
    ) -> Medusa:
        """Heads of a folder that `truedraft train medusa` wrote, or of the original Medusa project.

        Args:
            folder: with the heads.
            nodes: as for `Medusa`.
            trees: in place of those in the folder.

        Raises:
            ModelError: there are no heads, or their files are damaged.
            OptionError: as `Medusa`.
        """
        return cls.of(load_medusa(folder), nodes=nodes, trees=trees)

    @classmethod
    def of(
        cls, checkpoint: MedusaCheckpoint, *, nodes: int | None = None, trees: Mapping[str, RankTree] | None = None
    ) -> Medusa:
        """Heads of a checkpoint; see `load`."""
        return cls(
            checkpoint.heads,
            checkpoint.trees if trees is None else trees,
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
            target_name=self._target_name,
            fingerprint=self._fingerprint,
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

    def tree_for(self, params: SamplingParams) -> RankTree:
        """The whole tree, all of its nodes, that requests with these sampling options are drafted by."""
        return self._trees[_kind(params)]

    def check(self, target: LanguageModel) -> None:
        """Refuse another target than that of the heads; from now on drafts with this one.

        Raises:
            CompositionError: names both targets, or what does not fit.
            ModelError: the target has no LM head that could be shared, or its weights cannot be read again.
        """
        if target is self._runs_with:
            return
        config = self._heads.config
        if target.head_width == 0:
            raise CompositionError(f"the target {target.name} has no vectors that heads could read")
        # With free outputs a head may know more ids than there are, as the rows of a padded embedding; never fewer.
        fits = config.vocab_size >= target.vocab_size
        if config.width != target.head_width or not fits:
            trained_for = f" for {self._target_name}" if self._target_name else ""
            raise CompositionError(
                f"these Medusa heads{trained_for} read {config.width} numbers and know {config.vocab_size} ids, but "
                f"{target.name} has {target.head_width} numbers and {target.vocab_size} ids; take heads that were "
                "trained for it"
            )
        if self._fingerprint is not None and self._fingerprint != target.fingerprint:
            raise CompositionError(
                f"these Medusa heads were trained for {self._target_name} (fingerprint {self._fingerprint}), and the "
                f"target is {target.name} (fingerprint {target.fingerprint}); take heads that were trained for it"
            )
        widest = max(tree.width for tree in self._trees.values())
        if config.reads_token:
            target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))  # raises where it cannot
        if widest > target.vocab_size:
            raise CompositionError(f"a Medusa tree {widest} ranks wide needs as many ids; {target.name} has fewer")
        self._runner = MedusaRunner(self._heads, target, max(tree.depth for tree in self._trees.values()))
        self._runs_with = target

    def begin(self, request: DraftRequest) -> None:
        """A request starts; its first vector comes with the end of its prompt."""
        self._vectors[request.id] = None

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """A tree for each request, by one pass of the heads over all their vectors."""
        proposals = [Proposal.empty()] * len(batch)
        places: list[int] = []
        trees: list[RankTree] = []
        vectors: list[Tensor] = []
        drawn: list[int] = []
        for place, (request, budget) in enumerate(zip(batch, budgets, strict=True)):
            vector, tree = self._vectors.get(request.id), self._tree(request.params, budget)
            if vector is not None and len(tree):
                places.append(place)
                trees.append(tree)
                vectors.append(vector)
                drawn.append(request.tokens[-1])
        if not places:
            return proposals
        guesses = self._guess(vectors, drawn, max(tree.depth for tree in trees), max(tree.width for tree in trees))
        for row, (place, tree) in enumerate(zip(places, trees, strict=True)):
            proposals[place] = Proposal.deterministic(TokenTree(tree.fill(guesses[:, row]), tree.shape))
        return proposals

    def _guess(self, vectors: Sequence[Tensor], drawn: Sequence[int], depth: int, ranks: int) -> Tensor:
        """Token ids `[depth, requests, ranks]`; on a device they stay there, for nobody needs to see them yet."""
        if self._runner is None:
            raise DrafterError("Medusa heads need the target's LM head: call check(target) first, as an engine does")
        with torch.inference_mode():
            hidden = torch.stack(list(vectors))
            return self._runner.largest(hidden, depth, ranks, transfers.upload(drawn, hidden.device))

    def _tree(self, params: SamplingParams, budget: Budget) -> RankTree:
        """The part of a request's tree that fits its budget: the first of the nodes that are not too deep or wide."""
        key = (_kind(params), budget.depth, budget.width, min(budget.nodes, self.nodes))
        if key not in self._cut:
            kind, depth, width, nodes = key
            self._cut[key] = self._trees[kind].first(nodes).within(depth, width)
        return self._cut[key]

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Keep the vector from which each request's last token was drawn: at the end of its accepted path."""
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.hidden is None:
                self._vectors[request.id] = None
                continue
            row = outcome.path[-1] + 1 if outcome.path else 0
            # A copy: the next forward may write over the rows, and one row should not hold on to all of them. Behind
            # the heads' width there are the zeros of a padded target.
            self._vectors[request.id] = outcome.hidden[row, : self._heads.config.width].clone()

    def end(self, request: DraftRequest) -> None:
        """Drop the vector."""
        self._vectors.pop(request.id, None)


def _kind(params: SamplingParams) -> str:
    return GREEDY if params.greedy else SAMPLED


def _trees_for(trees: Mapping[str, RankTree], heads: MedusaHeads) -> dict[str, RankTree]:
    """A tree for both kinds of requests."""
    unknown = set(trees) - {GREEDY, SAMPLED}
    if unknown or not trees:
        raise OptionError(
            f"trees of Medusa heads are {GREEDY!r} and {SAMPLED!r}, got {sorted(trees)}; count them, or give one"
        )
    for tree in trees.values():
        if tree.depth > heads.config.heads:
            raise OptionError(
                f"a Medusa tree {tree.depth} deep needs as many heads, and there are {heads.config.heads}; "
                "give a shallower tree"
            )
    either = next(iter(trees.values()))
    return {kind: trees.get(kind, either) for kind in (GREEDY, SAMPLED)}
