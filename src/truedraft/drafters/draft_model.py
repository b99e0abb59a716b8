"""A smaller language model as drafter: chains and sampled trees, one packed forward a level for the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.core.trees import TokenTree, TreeShape, chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draws import DrawnChildren, OpenNode, drawing_for
from truedraft.errors import OptionError, VocabularyMismatchError
from truedraft.models.base import LanguageModel, Segment

_PREFILL_TOKENS = 512


class DraftModel(Drafter):
    """Drafts with a smaller model that shares the target's tokenizer (Leviathan et al. 2211.17192).

    A level of the tree is one packed forward over the nodes of the level above, for all requests at once. A chain
    is the tree with one draw at each node.

    Args:
        model: the draft model.
        num_speculative_tokens: length of a chain; ignored when `branching` is given.
        branching: draws at each node of depth 0, 1, ...; (3, 2, 1) makes 3 + 6 + 6 nodes at most.
        min_probability: draft no further below a token that the draft itself gave less than this; the token stays.

    Raises:
        OptionError: an option is out of range.
    """

    name: ClassVar[str] = "draft"

    def __init__(
        self,
        model: LanguageModel,
        num_speculative_tokens: int = 4,
        branching: Sequence[int] | None = None,
        min_probability: float = 0.0,
    ) -> None:
        if num_speculative_tokens < 1:
            raise OptionError(f"num_speculative_tokens must be 1 or more, got {num_speculative_tokens}")
        self.branching = tuple(branching) if branching is not None else (1,) * num_speculative_tokens
        if not self.branching or min(self.branching) < 1:
            raise OptionError(f"branching holds the draws at each depth, 1 or more each, got {self.branching}")
        self.model = model
        nodes = level = 0
        for width in self.branching:
            level = max(level, 1) * width
            nodes += level
        self.limits = Budget(len(self.branching), max(self.branching), nodes, min_probability)
        self._states: dict[int, RequestCache] = {}

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Independent draws where every node has one, else without replacement."""
        return frozenset({DrawKind.INDEPENDENT if self.limits.width == 1 else DrawKind.WITHOUT_REPLACEMENT})

    def check(self, target: LanguageModel) -> None:
        """Refuse a target with another tokenizer; vocabularies are compared by tokenizer, not by size.

        Raises:
            VocabularyMismatchError: names the first difference.
        """
        ours, theirs = self.model.tokenizer, target.tokenizer
        if ours is not None and theirs is not None and not ours.same_vocabulary(theirs):
            raise VocabularyMismatchError(
                f"draft {self.model.name!r} and target {target.name!r} have different tokenizers "
                f"({theirs.difference(ours)}); use a draft trained on the target's tokenizer"
            )
        if self.model.vocab_size != target.vocab_size:
            raise VocabularyMismatchError(
                f"draft {self.model.name!r} has {self.model.vocab_size} token ids and target {target.name!r} has "
                f"{target.vocab_size}; use a draft trained on the target's tokenizer"
            )

    def begin(self, request: DraftRequest) -> None:
        """Take a cache for the request; it is filled at the first proposal."""
        self._states[request.id] = self.model.new_cache()

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Catch up with the tokens emitted since the last proposal, then draw level by level."""
        growing = [
            _Growing(self._states[request.id], request, self._within(budget, request), each, self.branching)
            for request, budget, each in zip(batch, budgets, noise, strict=True)
        ]
        level = [tree for tree in growing if not tree.budget.is_zero]
        for tree in level:
            # A step that failed half-way may have left more in the cache than was committed.
            tree.cache.rollback(min(tree.cache.length, len(tree.request.tokens) - 1))
        logits = self._catch_up(level) if level else None
        while logits is not None:
            level = _draw_level(level, logits)
            logits = self._forward_level(level) if level else None
        return [tree.proposal() for tree in growing]

    def _within(self, budget: Budget, request: DraftRequest) -> Budget:
        """The budget cut to the options, and to what fits the draft model's own context."""
        room = self.model.context_length - len(request.tokens)
        return Budget(
            max(0, min(budget.depth, self.limits.depth, room)),
            min(budget.width, self.limits.width),
            min(budget.nodes, self.limits.nodes),
            max(budget.min_probability, self.limits.min_probability),
        )

    def _catch_up(self, growing: Sequence[_Growing]) -> Tensor:
        """Feed the committed tokens that the draft has not seen; logits `[requests, vocab]` at the last of each.

        After full acceptance these are two: the last drafted token was never fed. A long prompt is fed in parts;
        the last token of every request waits for the last forward, so that all logits come out together.
        """
        while True:
            last = all(tree.missed <= _PREFILL_TOKENS for tree in growing)
            segments = []
            for tree in growing:
                ids = tree.request.tokens[tree.cache.length :][:_PREFILL_TOKENS]
                if not last and len(ids) == tree.missed:
                    ids = ids[:-1]
                if ids:
                    tokens = torch.tensor(ids, device=self.model.device)
                    rows = (len(ids) - 1,) if last else ()
                    segments.append(Segment(tree.cache, tokens, chain_shape(len(ids)), rows))
            output = self.model.forward(segments)
            for segment in segments:
                segment.cache.commit(range(len(segment.shape)))
            if last:
                return output.logits

    def _forward_level(self, growing: Sequence[_Growing]) -> Tensor:
        """Feed the nodes that were drawn last; logits `[nodes, vocab]`."""
        segments = [tree.segment(self.model.device) for tree in growing]
        return self.model.forward(segments).logits

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Keep the accepted path of the draft's own tree; its last level was never fed, so it cannot be kept."""
        for request, outcome in zip(batch, outcomes, strict=True):
            cache = self._states[request.id]
            cache.commit([node for node in outcome.path if node < cache.uncommitted])

    def end(self, request: DraftRequest) -> None:
        """Give the cache back."""
        cache = self._states.pop(request.id, None)
        if cache is not None:
            self.model.release_cache(cache)


@dataclass(slots=True)
class _Growing:
    """A tree being drawn for one request. Nodes are numbered level by level."""

    cache: RequestCache
    request: DraftRequest
    budget: Budget
    noise: Noise
    branching: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    draws: dict[int, tuple[Draw, ...]] = field(default_factory=dict)  # by slot
    laws: list[Tensor] = field(default_factory=list)
    law_rows: int = 0
    open: list[int] = field(default_factory=lambda: [-1])  # nodes whose children are drawn next; -1 is the root
    depth: int = 0
    fed: int = 0

    @property
    def missed(self) -> int:
        """Committed tokens that the draft has not seen."""
        return len(self.request.tokens) - self.cache.length

    def open_nodes(self) -> list[OpenNode]:
        """What is drawn next; the node budget cuts by order, so before anything is drawn."""
        width = min(self.branching[self.depth], self.budget.width)
        left = self.budget.nodes - len(self.tokens)
        wants = self.budget.min_probability > 0.0
        nodes = []
        for number in range(len(self.open)):
            index = len(self.tokens) + number * width
            nodes.append(OpenNode(self.noise, self.depth, index, max(0, min(width, left - number * width)), wants))
        return nodes

    def add(self, children: Sequence[DrawnChildren], kind: DrawKind, laws: Tensor | None) -> None:
        """Hang drawn children below the open nodes; those that may grow become open."""
        first_law = self.law_rows
        if laws is not None:
            self.laws.append(laws)
            self.law_rows += len(laws)
        opened: list[int] = []
        for row, (parent, drawn) in enumerate(zip(self.open, children, strict=True)):
            draws = []
            for token, probability in zip(drawn.tokens, drawn.probabilities, strict=True):
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                draws.append(Draw(node, -1 if laws is None else first_law + row, kind))
                # A token too unlikely is kept, for it was drawn; nothing is drafted below it.
                if probability >= self.budget.min_probability:
                    opened.append(node)
            self.draws[parent + 1] = tuple(draws)
        self.depth += 1
        grows = self.depth < self.budget.depth and len(self.tokens) < self.budget.nodes
        self.open = opened if grows else []

    def segment(self, device: torch.device) -> Segment:
        """The nodes not yet fed, with logits at those that are open."""
        written, self.fed = self.fed, len(self.tokens)
        ids = torch.tensor(self.tokens[written:], device=device)
        rows = [node - written for node in self.open]
        return Segment(self.cache, ids, _shape(tuple(self.parents)), rows, written)

    def proposal(self) -> Proposal:
        """What was drawn."""
        if not self.tokens:
            return Proposal.empty()
        tree = TokenTree(torch.tensor(self.tokens), _shape(tuple(self.parents)))
        draws = tuple(self.draws.get(slot, ()) for slot in range(len(self.tokens) + 1))
        return Proposal(tree, draws, torch.cat(self.laws) if self.laws else None)


@lru_cache(maxsize=1024)
def _shape(parents: tuple[int, ...]) -> TreeShape:
    """Shapes recur at every step, so what is derived from them is kept."""
    return TreeShape(parents)


def _draws_alike(tree: _Growing) -> tuple[object, ...]:
    params = tree.request.params
    return (*params.law_key, params.coupled)


def _draw_level(level: Sequence[_Growing], logits: Tensor) -> list[_Growing]:
    """Draw the children of all open nodes; returns the trees that grow on.

    Neighbours that draw alike share one computation.
    """
    start = 0
    for _, trees in itertools.groupby(level, key=_draws_alike):
        group = list(trees)
        params = group[0].request.params
        nodes = [tree.open_nodes() for tree in group]
        count = sum(map(len, nodes))
        drawing = drawing_for(params, max(group[0].branching))
        flat = [node for each in nodes for node in each]
        children, laws = drawing.draw(logits[start : start + count], params, flat)
        start += count
        done = 0
        for tree, own in zip(group, nodes, strict=True):
            rows = slice(done, done + len(own))
            tree.add(children[rows], drawing.kind, None if laws is None else laws[rows])
            done += len(own)
    return [tree for tree in level if tree.open]
