"""Drafting from n-gram tables: what usually followed the last few tokens, at next to no cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.budget import MOST_NODES, Budget, Hint, nodes_of
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.drafters.draws import TOP_TOKENS
from truedraft.drafters.ngram_table import NgramTable
from truedraft.drafters.tree_builder import TreeBuilder, draw_level
from truedraft.errors import OptionError, VocabularyMismatchError
from truedraft.models.base import LanguageModel

_HERE = torch.device("cpu")
_GRADES = 8
_FOUND = tuple(Hint(kind) for kind in range(1, _GRADES + 2))
"""Hints are of one kind where the likeliest token is about equally likely."""


class NgramDrafter(Drafter):
    """Drafts from a table of n-grams (a negligible-cost drafter, Leviathan et al. 2211.17192, section 3).

    Sampled requests are given draws from the table's distribution under their own options, greedy ones its likeliest
    tokens. Nothing is kept for a request, so it takes up any text at any place.

    Args:
        table: is read, also by others at the same time.
        num_speculative_tokens: length of a chain; ignored when `branching` is given.
        branching: draws at each node of depth 0, 1, ...; (3, 2, 1) makes 3 + 6 + 6 nodes at most.
        order: longest n-grams that are looked at, the drafted token included; None are all of the table's.
        sampled: whether sampled requests are given draws; otherwise the likeliest tokens as candidates.

    Raises:
        OptionError: an option is out of range.
    """

    name: ClassVar[str] = "ngram"
    told_late = True
    hints_change = True

    def __init__(
        self,
        table: NgramTable,
        num_speculative_tokens: int = 4,
        branching: Sequence[int] | None = None,
        order: int | None = None,
        *,
        sampled: bool = True,
    ) -> None:
        if not 1 <= num_speculative_tokens <= MOST_NODES:
            raise OptionError(
                f"num_speculative_tokens must be 1 or more and at most {MOST_NODES}, got {num_speculative_tokens}"
            )
        if order is not None and not 1 <= order <= table.order:
            raise OptionError(f"order must be 1 or more and at most {table.order}, that of the table, got {order}")
        self.table = table
        self.branching = tuple(branching) if branching is not None else (1,) * num_speculative_tokens
        self.limits = Budget(len(self.branching), max(self.branching, default=0), nodes_of(self.branching))
        self._read = (table.order if order is None else order) - 1  # tokens of a context
        self._sampled = sampled
        self._vocab = table.facts.vocab_size
        self._device = _HERE

    @classmethod
    def load(
        cls,
        path: str | Path,
        num_speculative_tokens: int = 4,
        branching: Sequence[int] | None = None,
        order: int | None = None,
        *,
        sampled: bool = True,
    ) -> NgramDrafter:
        """The drafter of a table in a file; further arguments are the constructor's.

        Raises:
            ModelError: the table cannot be read.
            OptionError: an option is out of range.
        """
        return cls(NgramTable.open(path), num_speculative_tokens, branching, order, sampled=sampled)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        if not self._sampled:
            return frozenset({DrawKind.DETERMINISTIC})
        return frozenset({DrawKind.INDEPENDENT if self.limits.width == 1 else DrawKind.WITHOUT_REPLACEMENT})

    def check(self, target: LanguageModel) -> None:
        """Refuse a target with another tokenizer than the table's.

        Raises:
            VocabularyMismatchError: says which.
        """
        facts, theirs = self.table.facts, target.tokenizer
        if theirs is not None and facts.tokenizer and facts.tokenizer != theirs.fingerprint:
            raise VocabularyMismatchError(
                f"the n-gram table {self.table.name!r} was counted with another tokenizer than that of target "
                f"{target.name!r}; build one for it with truedraft.training.count_ngrams"
            )
        if facts.vocab_size > target.vocab_size:
            raise VocabularyMismatchError(
                f"the n-gram table {self.table.name!r} has {facts.vocab_size} token ids and target {target.name!r} has "
                f"{target.vocab_size}; build one for it with truedraft.training.count_ngrams"
            )
        self._vocab, self._device = target.vocab_size, target.device

    def hint(self, request: DraftRequest) -> Hint:
        """How likely the likeliest next token is makes the kind."""
        _, likely = self.table.best(self._context(request.tokens))
        return _FOUND[int(_GRADES * likely)]

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """A chain or a tree for each request."""
        proposals = [Proposal.empty()] * len(batch)
        builders: dict[int, TreeBuilder] = {}
        for number, (request, budget) in enumerate(zip(batch, budgets, strict=True)):
            if budget.is_zero:
                continue
            within = budget.within(self.limits)
            if self._is_plain(request, within):
                proposals[number] = self._likeliest_chain(request.tokens, min(within.depth, within.nodes))
            else:
                builders[number] = self._builder(request, within, noise[number])
        level = list(builders.values())
        while level:
            level = draw_level(level, self._logits(level))
        for number, builder in builders.items():
            proposals[number] = self._moved(builder.proposal())
        return proposals

    def _is_plain(self, request: DraftRequest, within: Budget) -> bool:
        """Whether a look-up for each token does: nothing is drawn, changed by options, compared or cut."""
        drawn = self._sampled and not request.params.greedy
        return within.width == 1 and not drawn and request.shaping is None and not within.looks

    def _likeliest_chain(self, tokens: Sequence[int], length: int) -> Proposal:
        text = list(self._context(tokens))
        first = len(text)
        for _ in range(length):
            text.append(self.table.best(self._context(text))[0])
        return Proposal.deterministic(TokenTree.chain(text[first:]))

    def _builder(self, request: DraftRequest, within: Budget, noise: Noise) -> TreeBuilder:
        no_cache = RequestCache(0)  # a table reads the text itself
        builder = TreeBuilder(no_cache, request, within, noise, self.branching, _HERE)
        if not self._sampled:
            builder.drawing = TOP_TOKENS
        return builder

    def _logits(self, builders: Sequence[TreeBuilder]) -> Tensor:
        """Logarithms `[open nodes, vocab]` of the table's distributions behind all open nodes."""
        contexts = [
            self._context([*self._context(builder.request.tokens), *path])
            for builder in builders
            for path in builder.open_paths()
        ]
        probs = np.zeros((len(contexts), self._vocab), np.float32)
        for row, context in zip(probs, contexts, strict=True):
            row[: self.table.facts.vocab_size] = self.table.probs(context)
        return torch.from_numpy(probs).log_()

    def _context(self, tokens: Sequence[int]) -> Sequence[int]:
        """The end of a text, as much as is looked at."""
        return tokens[max(0, len(tokens) - self._read) :]

    def _moved(self, proposal: Proposal) -> Proposal:
        """The proposal with its distributions where the target's are."""
        if proposal.probs is None or self._device == _HERE:
            return proposal
        return replace(proposal, probs=proposal.probs.to(self._device))
