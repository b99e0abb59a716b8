"""Drafting from n-gram tables: what usually followed the last few tokens, at next to no cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.budget import Budget, Hint, check_nodes, nodes_of
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree, likeliest_tree
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.drafters.ngram.table import NgramTable
from truedraft.drafters.tree_builder import TreeBuilder, draw_level
from truedraft.errors import OptionError, VocabularyMismatchError
from truedraft.models.base import LanguageModel

_HERE = torch.device("cpu")
_DEPTH, _NODES = 4, 7  # with the token before them eight rows, which cost a forward about as much as one
_BRANCHING = (3, 1)
_GRADES = 8
_FOUND = tuple(Hint(kind) for kind in range(1, _GRADES + 2))
"""Hints are of one kind where the likeliest token is about equally likely."""

_Path: TypeAlias = tuple[tuple[int, ...], float, float]  # tokens, how likely they are together, and chance so far


class NgramDrafter(Drafter):
    """Drafts from a table of n-grams (a negligible-cost drafter, Leviathan et al. 2211.17192, section 3).

    Requests are given a tree of the table's likeliest continuations, chosen anew at each step: a table is seldom sure,
    so several guesses of the next token bring more than a long chain. With `sampled`, requests at a temperature are
    given draws from its distribution under their own options, and greedy ones a tree of the same size. Nothing is kept
    for a request, so it takes up any text at any place.

    Args:
        table: is read, also by others at the same time.
        num_speculative_tokens: longest path; None is 4, or as `branching` says.
        nodes: most nodes of a tree; None is 7, or as `branching` says.
        branching: draws at each node of depth 0, 1, ...; (3, 1), which makes 3 + 3 nodes, where nobody says, and one
            below each end of that as far down as the longest path is to go.
        order: longest n-grams that are looked at, the drafted token included; None are all of the table's.
        sampled: whether requests at a temperature are given draws.

    Raises:
        OptionError: an option is out of range, or branching is given where nothing is drawn, or is less deep than the
            longest path is to be.
    """

    name: ClassVar[str] = "ngram"
    told_late = True
    hints_change = True

    def __init__(
        self,
        table: NgramTable,
        num_speculative_tokens: int | None = None,
        nodes: int | None = None,
        branching: Sequence[int] | None = None,
        order: int | None = None,
        *,
        sampled: bool = False,
    ) -> None:
        for option, value in (("num_speculative_tokens", num_speculative_tokens), ("nodes", nodes)):
            if value is not None:
                check_nodes(option, value)
        if order is not None and not 1 <= order <= table.order:
            raise OptionError(f"order must be 1 or more and at most {table.order}, that of the table, got {order}")
        if branching is not None and not sampled:
            raise OptionError("branching says how many tokens are drawn; add sampled=true, or give nodes")
        self.table = table
        asked = num_speculative_tokens or 0
        self.branching = _drawn(asked if sampled else 0) if branching is None else tuple(branching)
        if branching is not None and asked > len(branching):
            raise OptionError(
                f"branching {'-'.join(map(str, branching))} draws {len(branching)} tokens below one another, and "
                f"num_speculative_tokens is {num_speculative_tokens}; leave out one of them"
            )
        drawn = nodes_of(self.branching) if sampled else _NODES
        most, depth = nodes or drawn, asked or (len(self.branching) if sampled else _DEPTH)
        self.limits = Budget(depth, most, most)
        if sampled:
            self.limits = self.limits.within(Budget(len(self.branching), max(self.branching), drawn))
        self._read = (table.order if order is None else order) - 1  # tokens of a context
        self._sampled = sampled
        self._vocab = table.facts.vocab_size
        self._device = _HERE

    @classmethod
    def load(
        cls,
        path: str | Path,
        num_speculative_tokens: int | None = None,
        nodes: int | None = None,
        branching: Sequence[int] | None = None,
        order: int | None = None,
        *,
        sampled: bool = False,
    ) -> NgramDrafter:
        """The drafter of a table in a file, or in a folder that `truedraft train ngram` wrote.

        Further arguments are the constructor's.

        Raises:
            ModelError: the table cannot be read.
            OptionError: an option is out of range.
        """
        return cls(NgramTable.open(path), num_speculative_tokens, nodes, branching, order, sampled=sampled)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        if not self._sampled:
            return frozenset({DrawKind.DETERMINISTIC})
        return frozenset(
            {DrawKind.INDEPENDENT if max(self.branching, default=1) == 1 else DrawKind.WITHOUT_REPLACEMENT}
        )

    def check(self, target: LanguageModel) -> None:
        """Refuse a target with another tokenizer than the table's.

        Raises:
            VocabularyMismatchError: says which.
        """
        facts, theirs = self.table.facts, target.tokenizer
        if theirs is not None and facts.tokenizer and facts.tokenizer != theirs.fingerprint:
            raise VocabularyMismatchError(
                f"the n-gram table {self.table.name!r} was counted with another tokenizer than that of target "
                f"{target.name!r}; count one for it with truedraft train ngram"
            )
        if facts.vocab_size > target.vocab_size:
            raise VocabularyMismatchError(
                f"the n-gram table {self.table.name!r} has {facts.vocab_size} token ids and target {target.name!r} has "
                f"{target.vocab_size}; count one for it with truedraft train ngram"
            )
        self._vocab, self._device = target.vocab_size, target.device

    def hint(self, request: DraftRequest) -> Hint:
        """How likely the likeliest next token is makes the kind."""
        _, likely = self.table.best(self._context(request.tokens))
        return _FOUND[int(_GRADES * likely)]

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """A tree of likeliest tokens, or draws, for each request."""
        proposals = [Proposal.empty()] * len(batch)
        builders: dict[int, TreeBuilder] = {}
        for number, (request, budget) in enumerate(zip(batch, budgets, strict=True)):
            if budget.is_zero:
                continue
            within = budget.within(self.limits)
            if self._sampled and not request.params.greedy:
                no_cache = RequestCache(0)  # a table reads the text itself
                builders[number] = TreeBuilder(no_cache, request, within, noise[number], self.branching, _HERE)
            else:
                proposals[number] = self._likeliest(request, within)
        level = list(builders.values())
        while level:
            level = draw_level(level, self._logits(level))
        for number, builder in builders.items():
            proposals[number] = self._moved(builder.proposal())
        return proposals

    def _likeliest(self, request: DraftRequest, within: Budget) -> Proposal:
        context, most = self._context(request.tokens), min(within.width, within.nodes)

        def following(path: tuple[int, ...]) -> list[tuple[int, float]]:
            behind = self._context([*context, *path])
            if request.shaping is None:
                return self.table.likeliest(behind, most)
            logits = torch.from_numpy(self._probs([behind])).log_()
            shaped = request.shaping.of_paths(logits, [path])[0].softmax(dim=-1)  # [vocab]
            largest = shaped.topk(min(most, len(shaped)))
            return list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))

        tree = tree_of(following, within)
        return Proposal.deterministic(tree) if len(tree) else Proposal.empty()

    def _logits(self, builders: Sequence[TreeBuilder]) -> Tensor:
        """Logarithms `[open nodes, vocab]` of the table's distributions behind all open nodes."""
        contexts = [
            self._context([*self._context(builder.request.tokens), *path])
            for builder in builders
            for path in builder.open_paths()
        ]
        return torch.from_numpy(self._probs(contexts)).log_()

    def _probs(self, contexts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The table's distributions `[contexts, vocab]`, over all ids of the target."""
        probs = np.zeros((len(contexts), self._vocab), np.float32)
        for row, context in zip(probs, contexts, strict=True):
            row[: self.table.facts.vocab_size] = self.table.probs(context)
        return probs

    def _context(self, tokens: Sequence[int]) -> Sequence[int]:
        """The end of a text, as much as is looked at."""
        return tokens[max(0, len(tokens) - self._read) :]

    def _moved(self, proposal: Proposal) -> Proposal:
        """The proposal with its distributions where the target's are."""
        if proposal.probs is None or self._device == _HERE:
            return proposal
        return replace(proposal, probs=proposal.probs.to(self._device))


def _drawn(depth: int) -> tuple[int, ...]:
    """Draws at each depth where nobody said how many, as deep as was asked for."""
    return _BRANCHING + (1,) * (depth - len(_BRANCHING))


def tree_of(following: Callable[[tuple[int, ...]], Sequence[tuple[int, float]]], within: Budget) -> TokenTree:
    """The likeliest nodes, each as likely as all the tokens of its path together.

    Args:
        following: tokens behind a path and their probabilities, the likeliest ones; those without any are left out.
        within: limits. Nothing is drafted below a token that is less likely than they say.
    """

    def below(
        end: tuple[tuple[int, ...], float, float],
    ) -> list[tuple[int, float, tuple[tuple[int, ...], float, float]]]:
        path, likely, chance = end
        if len(path) >= within.depth or chance < within.floor:
            return []
        found = []
        for token, probability in following(path):
            if probability > 0.0:
                last = chance * within.chance(probability) if probability >= within.min_probability else -1.0
                found.append((token, likely * probability, ((*path, token), likely * probability, last)))
        return found

    root: _Path = (), 1.0, 1.0
    return likeliest_tree(root, below, within.nodes)
