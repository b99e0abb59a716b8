"""Prompt lookup: what followed the last time the text ended like this?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from truedraft.core.budget import NOTHING_FOUND, Budget, Hint, check_nodes
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import CandidateDrafter, DraftRequest
from truedraft.errors import OptionError

_FOUND = tuple(Hint(kind) for kind in range(33))
_TAKEN_BACK = 4096
"""Maximum number of index changes that can be undone without reading the text again."""


class PromptLookup(CandidateDrafter):
    """Copies what followed the latest earlier occurrence of the longest n-gram that ends the text.

    A negligible-cost drafter (Leviathan et al. 2211.17192, section 3); deterministic, so verification is exact. Raises
    `OptionError` for an option out of range.
    """

    name = "prompt-lookup"

    def __init__(self, num_speculative_tokens: int = 6, max_ngram: int = 4, min_ngram: int = 2) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(f"1 <= min_ngram <= max_ngram must hold, got {min_ngram} and {max_ngram}")
        self.limits = Budget(depth=num_speculative_tokens, width=1, nodes=num_speculative_tokens)
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[int, NgramIndex] = {}

    def begin(self, request: DraftRequest) -> None:
        self._indexes[request.id] = NgramIndex(self._sizes)

    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        start, _ = self._find(request)
        if start is None:
            return TokenTree.empty()
        return TokenTree.chain(copied(request.tokens, start, min(budget.depth, budget.nodes)))

    def hint(self, request: DraftRequest) -> Hint:
        start, size = self._find(request)
        return NOTHING_FOUND if start is None else _FOUND[min(size, len(_FOUND) - 1)]

    def _find(self, request: DraftRequest) -> tuple[int | None, int]:
        return self._indexes[request.id].find(request.tokens)

    def rewind(self, request: DraftRequest) -> None:
        self._indexes[request.id].rewind(request.tokens)

    def end(self, request: DraftRequest) -> None:
        self._indexes.pop(request.id, None)


def copied(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """Copy from `start` on; past the end of the text the copy reads itself, so loops continue.

    Worked example: from position 1 of 5 6 7, five tokens are 6 7 6 7 6.
    """
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(length)]


class NgramIndex:
    """Where each n-gram of one text was last followed by something.

    Worked example, for n-grams of 2 over 5 6 7 5 6: the ending (5, 6) was last followed at position 2, by 7.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._before: deque[tuple[int, tuple[int, ...], int | None]] = deque(maxlen=_TAKEN_BACK)
        self._found: tuple[int | None, int] = None, 0

    def find(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The position after the latest occurrence of the longest known ending, and that ending's length.

        `tokens` may only be extended between calls.
        """
        if self._known != len(tokens):
            self._extend(tokens)
            self._found = self._follows(tokens)
        return self._found

    def _extend(self, tokens: Sequence[int]) -> None:
        known, self._known = self._known, len(tokens)
        before = max(known - self._sizes[0], 0)
        ids, places = tuple(tokens[before:]), self._places
        for place in range(max(known, 1), self._known):
            end = place - before
            for size in self._sizes:
                if size <= end:
                    ngram = ids[end - size : end]
                    self._before.append((place, ngram, places.get(ngram)))
                    places[ngram] = place

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget tokens that the text lost at its end.

        Worked example: 5 6 7 5 6 8 was read, and 5 6 7 5 is left: (5, 6) was last followed at position 2 again.
        """
        if self._known <= len(tokens):
            return
        before = self._before
        if len(before) == before.maxlen and before[0][0] >= len(tokens):  # older changes are not stored
            self._places.clear()
            before.clear()
            self._known = 0
            self._extend(tokens)
        while before and before[-1][0] >= len(tokens):
            _, ngram, place = before.pop()
            if place is None:
                del self._places[ngram]
            else:
                self._places[ngram] = place
        self._known = len(tokens)
        self._found = self._follows(tokens)

    def _follows(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        found: tuple[int | None, int] = None, 0
        for size in reversed(self._sizes):
            place = self._places.get(tuple(tokens[-size:]))
            if place is None:
                break  # if an ending has not occurred, no longer one has
            found = place, size
        return found
