"""Drafting from n-gram tables: what usually followed the last few tokens, at almost no cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from truedraft.core.budget import Budget, Hint, check_nodes
from truedraft.core.tree import TokenTree, likeliest_tree
from truedraft.drafters.base import CandidateDrafter, DraftRequest
from truedraft.drafters.ngram.table import NgramTable
from truedraft.errors import OptionError, VocabularyMismatchError
from truedraft.models.base import LanguageModel

_GRADES = 8
_FOUND = tuple(Hint(kind) for kind in range(1, _GRADES + 2))
"""A hint's kind is the probability of the likeliest token, in eighths."""

_Path: TypeAlias = tuple[tuple[int, ...], float, float]  # tokens, their joint probability, and chance so far


class NgramDrafter(CandidateDrafter):
    """Drafts from a table of n-grams (a negligible-cost drafter, Leviathan et al. 2211.17192, section 3).

    The likeliest continuations form a tree: a table is seldom sure, so several guesses of the next token are more
    useful than a long chain. Seven nodes and the last token are eight rows, which cost about as much as one. Raises
    `OptionError` for an option out of range.

    `order` is that of the longest n-grams to read, drafted token included; None is the table's.
    """

    name = "ngram"

    def __init__(
        self, table: NgramTable, num_speculative_tokens: int = 4, nodes: int = 7, order: int | None = None
    ) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        check_nodes("nodes", nodes)
        if order is not None and not 1 <= order <= table.order:
            raise OptionError(f"order must be 1 or more and at most {table.order}, that of the table, got {order}")
        self.table = table
        self.limits = Budget(num_speculative_tokens, nodes, nodes)
        self._read = (table.order if order is None else order) - 1  # tokens of a context
        self._vocab = table.facts.vocab_size

    def check(self, target: LanguageModel) -> None:
        """Raise `VocabularyMismatchError` for a target with another tokenizer than the table's."""
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
        self._vocab = target.vocab_size

    def hint(self, request: DraftRequest) -> Hint:
        """The kind is the probability of the likeliest next token."""
        _, likely = self.table.best(self._context(request.tokens))
        return _FOUND[int(_GRADES * likely)]

    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        context, most = self._context(request.tokens), min(budget.width, budget.nodes)

        def following(path: tuple[int, ...]) -> list[tuple[int, float]]:
            suffix = self._context([*context, *path])
            if request.shaping is None:
                return self.table.likeliest(suffix, most)
            logits = torch.from_numpy(self._probs(suffix)).log_()[None]
            shaped = request.shaping.of_paths(logits, [path])[0].softmax(dim=-1)  # [vocab]
            largest = shaped.topk(min(most, len(shaped)))
            return list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))

        return tree_of(following, budget)

    def _probs(self, context: Sequence[int]) -> NDArray[np.float32]:
        probs = np.zeros(self._vocab, np.float32)
        probs[: self.table.facts.vocab_size] = self.table.probs(context)
        return probs

    def _context(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[max(0, len(tokens) - self._read) :]


def tree_of(following: Callable[[tuple[int, ...]], Sequence[tuple[int, float]]], within: Budget) -> TokenTree:
    """The nodes with the largest products of probabilities along their paths.

    `following` gives the likeliest tokens after a path with their probabilities; those of probability 0 are dropped.
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
