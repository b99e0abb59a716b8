"""Drafts from the request itself: a predicted answer, and the forced text of a structured answer."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from truedraft.core.budget import NOTHING_FOUND, Budget, Hint, check_nodes
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import CandidateDrafter, Drafter, DraftRequest
from truedraft.drafters.held import Held
from truedraft.drafters.portfolio import Portfolio

_FOLLOWED = (1, 4, 16)
"""A hint's kind is how long the answer has followed the prediction: 0 tokens, 1 to 3, 4 to 15, or more."""
_LENGTHS = (2, 4, 8)
"""A hint's kind is the length of forced text, 1 token, 2 or 3, 4 to 7, or more, and whether its tokens are known."""
_FOUND = tuple(Hint(kind) for kind in range(2 * (len(_LENGTHS) + 1)))
_MOST_PLACES = 64


class _RequestDrafter(CandidateDrafter):
    def __init__(self, num_speculative_tokens: int = 32) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        self.limits = Budget(depth=num_speculative_tokens, width=1, nodes=num_speculative_tokens)

    @abstractmethod
    def _known(self, request: DraftRequest, most: int) -> Sequence[int]: ...
    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        return TokenTree.chain(list(self._known(request, min(budget.depth, budget.nodes))))


class PredictionDrafter(_RequestDrafter):
    """Copies from a request's predicted answer, and finds its position again after the answer deviated.

    OpenAI's field `prediction`; a negligible-cost drafter (Leviathan et al. 2211.17192, section 3).
    """

    name = "prediction"

    def __init__(self, num_speculative_tokens: int = 32) -> None:
        super().__init__(num_speculative_tokens)
        self._followers: dict[int, _Follower] = {}
        self.held = Held(noted=[self._followers])

    def serves(self, request: DraftRequest) -> bool:
        return bool(request.prediction)

    def begin(self, request: DraftRequest) -> None:
        self._followers[request.id] = _Follower(request.prediction, len(request.tokens))

    def _known(self, request: DraftRequest, most: int) -> Sequence[int]:
        place, _ = self._followers[request.id].find(request.tokens)
        return () if place is None else request.prediction[place : place + most]

    def hint(self, request: DraftRequest) -> Hint:
        place, followed = self._followers[request.id].find(request.tokens)
        if place is None:
            return NOTHING_FOUND
        return _FOUND[bisect_right(_FOLLOWED, followed)]

    def end(self, request: DraftRequest) -> None:
        self._followers.pop(request.id, None)


class FormDrafter(_RequestDrafter):
    """Drafts the text that a structured answer's form forces: brackets, names of fields.

    Of several tokenizations it drafts the one that the answer used before, or else the tokenizer's.
    """

    name = "forced"

    def serves(self, request: DraftRequest) -> bool:
        return request.shaping is not None and request.shaping.form is not None

    def _known(self, request: DraftRequest, most: int) -> Sequence[int]:
        form = None if request.shaping is None else request.shaping.form
        return () if form is None else form.forced()[:most]

    def hint(self, request: DraftRequest) -> Hint:
        form = None if request.shaping is None else request.shaping.form
        if form is None or not form.forced():
            return NOTHING_FOUND
        return _FOUND[bisect_right(_LENGTHS, len(form.forced())) + (len(_LENGTHS) + 1) * form.recalls()]


REQUESTS_OWN = (PredictionDrafter.name, FormDrafter.name)


def with_own_drafts(drafter: Drafter) -> Drafter:
    """Add the drafters of requests' own text; a drafter that never drafts is unchanged."""
    if drafter.limits.is_zero:
        return drafter
    own: list[Drafter] = [PredictionDrafter(), FormDrafter()]
    return Portfolio({**drafter.members, **{each.name: each for each in own if each.name not in drafter.members}})


class _Follower:
    """The position of an answer in a prediction.

    After a deviation it is after an occurrence of the answer's last tokens: the longest match, then the nearest one.

    Worked example: the prediction is 1 2 3 4 5 6 and the answer 1 9 4 5. It deviated at 9; its ending 4 5 occurs at 3,
    so the position is 5, and 6 is drafted next.
    """

    _SHORTEST = 2  # shortest ending to search for

    def __init__(self, text: Sequence[int], known: int) -> None:
        self._text = text
        self._known = known
        self._place: int | None = 0
        self._last = 0  # last known position
        self._followed = 0  # tokens since it was found
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def find(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The position of the next token, or None, and how many tokens the answer followed."""
        new = tokens[self._known :]
        self._known = len(tokens)
        for token in new:
            if self._place is not None and self._place < len(self._text) and self._text[self._place] == token:
                self._place += 1
                self._last = self._place
                self._followed += 1
            else:
                self._place, self._followed = None, 0
        if new and self._place is None:
            self._place = self._found(tokens)
        ended = self._place is None or self._place >= len(self._text)
        return (None, 0) if ended else (self._place, self._followed)

    def _found(self, tokens: Sequence[int]) -> int | None:
        places = self._index().get(tuple(tokens[-self._SHORTEST :]), [])
        after = bisect_left(places, self._last)
        near = places[after : after + _MOST_PLACES]
        near += places[max(after - _MOST_PLACES + len(near), 0) : after][::-1]
        return max(near, key=lambda place: self._alike(tokens, place), default=None)  # the first of the longest

    def _alike(self, tokens: Sequence[int], place: int) -> int:
        count = 0
        while count < 32 and count < min(place, len(tokens)) and self._text[place - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def _index(self) -> dict[tuple[int, ...], list[int]]:
        if self._places is None:
            self._places = {}
            for end in range(self._SHORTEST, len(self._text) + 1):
                self._places.setdefault(tuple(self._text[end - self._SHORTEST : end]), []).append(end)
        return self._places
