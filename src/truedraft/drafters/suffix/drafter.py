"""Trees of what followed where a text's ending occurred before, in this text or an earlier one."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from truedraft.core.budget import NOTHING_FOUND, Budget, Hint, check_nodes
from truedraft.core.tree import TokenTree, likeliest_tree
from truedraft.drafters.base import CandidateDrafter, DraftRequest
from truedraft.drafters.held import Held
from truedraft.drafters.prompt_lookup import NgramIndex, copied
from truedraft.drafters.suffix.index import END, NO_MATCHES, WINDOW, Matches
from truedraft.drafters.suffix.store import SuffixStore

_LENGTHS = (4, 8, 16, 32)
"""A hint's kind is the longest match's length, 2 or 3 tokens, 4 to 7, 8 to 15, 16 to 31, or more, and unanimity."""
_FOUND = tuple(Hint(kind) for kind in range(2 * (len(_LENGTHS) + 1)))
_SIZES = range(4, 1, -1)
_SHORTER = 0.5
"""Factor of a position's weight per token by which its match is shorter."""
_LEAST_SHARE = 0.05
"""Minimum share of the total weight for a node."""


class SuffixDrafter(CandidateDrafter):
    """Drafts what followed the longest earlier occurrence of a text's ending, as a tree weighted by counts.

    SuffixDecoding (2411.04975): positions in the text and in earlier answers of the scope count alike. A position's
    weight depends on its match's length; the tree has the branches with the largest sums. `store` has finished texts;
    None makes one of a million tokens. Raises `OptionError` for an option out of range.
    """

    name = "suffix"

    def __init__(self, store: SuffixStore | None = None, num_speculative_tokens: int = 12, nodes: int = 24) -> None:
        for option, value in (("num_speculative_tokens", num_speculative_tokens), ("nodes", nodes)):
            check_nodes(option, value)
        self.store = SuffixStore(1 << 20) if store is None else store  # an empty one is False
        depth = min(num_speculative_tokens, nodes)
        self.limits = Budget(depth=depth, width=nodes, nodes=nodes)
        self._own: dict[int, NgramIndex] = {}
        self.held = Held(noted=[self._own])
        self._found: dict[int, tuple[int, Matches]] = {}  # by request: length of its text, and matches

    def begin(self, request: DraftRequest) -> None:
        self._own[request.id] = NgramIndex(_SIZES)
        self._found.pop(request.id, None)

    def end(self, request: DraftRequest) -> None:
        self._found.pop(request.id, None)
        if self._own.pop(request.id, None) is not None and request.kept:
            self.store.add(request.scope, request.tokens)

    def rewind(self, request: DraftRequest) -> None:
        self._own[request.id].rewind(request.tokens)
        self._found.pop(request.id, None)

    def hint(self, request: DraftRequest) -> Hint:
        """The kind is the length of the longest match, and whether all its positions agree."""
        found = self._matches(request)
        if not found.lengths:
            return NOTHING_FOUND
        longest = found.lengths[0]
        best = [row[0] for row, length in zip(found.following, found.lengths, strict=True) if length == longest]
        return _FOUND[2 * bisect_right(_LENGTHS, longest) + (len(set(best)) == 1)]

    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        return tree_of(self._matches(request), budget.depth, budget.nodes, budget.width)

    def _matches(self, request: DraftRequest) -> Matches:
        length, found = self._found.get(request.id, (-1, NO_MATCHES))
        if length != len(request.tokens):
            found = self._own_match(request)
            others = self.store.find(request.scope, request.tokens[-WINDOW:], self.limits.depth)
            first, second = (found, others) if found.lengths > others.lengths else (others, found)
            found = Matches([*first.lengths, *second.lengths], [*first.following, *second.following])
            self._found[request.id] = len(request.tokens), found
        return found

    def _own_match(self, request: DraftRequest) -> Matches:
        tokens = request.tokens
        start, length = self._own[request.id].find(tokens)
        if start is None:
            return NO_MATCHES
        while length < min(WINDOW, start) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return Matches([length], [copied(tokens, start, self.limits.depth)])


def tree_of(matches: Matches, depth: int, nodes: int, width: int) -> TokenTree:
    """The likeliest nodes of the tree of what followed.

    Worked example: matches of one length were followed by 5 6, 5 7 and 8. With three nodes these are 5 (2/3), and of 6,
    7 and 8 (1/3 each) the first two found: 5 6 7, where 6 and 7 are children of 5.
    """
    if not matches.lengths:
        return TokenTree.empty()
    longest = matches.lengths[0]
    weights = [_SHORTER ** (longest - length) for length in matches.lengths]
    total, rows = sum(weights), matches.following

    def below(end: tuple[int, Sequence[int]]) -> list[tuple[int, float, tuple[int, Sequence[int]]]]:
        level, places = end
        if level >= depth:
            return []
        followers: defaultdict[int, list[int]] = defaultdict(list)
        for place in places:
            if level < len(rows[place]) and rows[place][level] != END:
                followers[rows[place][level]].append(place)
        found = [(token, sum(weights[place] for place in own), (level + 1, own)) for token, own in followers.items()]
        found.sort(key=lambda each: -each[1])
        return [each for each in found[:width] if each[1] >= _LEAST_SHARE * total]

    root: tuple[int, Sequence[int]] = 0, range(len(rows))
    return likeliest_tree(root, below, nodes)
