"""Answers with reasoning between marks: the reasoning budget, and where a form of the answer begins.

Everything is a function of the text so far; at a node of a token tree, of the answer and the node's path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from truedraft.core.params import ReasoningSpan
from truedraft.core.shaping import Form, Path
from truedraft.text.calls import overlap
from truedraft.text.tokenizer import Tokenizer

_TEXTS = 4096  # cached texts of tokens


@dataclass(frozen=True, slots=True)
class _Place:
    """Position in an answer: before any mark, inside the reasoning, after it, or without any.

    `held` is text that may begin the next mark.
    """

    part: Literal["before", "inside", "after", "without"]
    held: str = ""
    count: int = 0


class ReasonedForm:
    """The form of an answer that may begin with reasoning; see `truedraft.core.shaping.Form`.

    Inside the reasoning all tokens are allowed until the budget is used up, then only those that write the closing
    mark. If the answer after it has a form, no end of text is allowed inside, and no token may extend past the closing
    mark, because the form begins at the next token. An answer without reasoning has the form from its first token.

    Worked example: with marks `<t>` and `</t>`, a budget of 2 and the choice `yes`, answers are `yes`, `<t></t>yes` and
    `<t>a b</t>yes`; after the path `<t>`, `a`, ` b` the mask allows only the first token of `</t>`.

    `start` makes the form of the text after the reasoning, over a growing list of tokens; None is for no form. The
    caller appends to `tokens`, which are prompt and answer so far.
    """

    def __init__(
        self,
        span: ReasoningSpan,
        start: Callable[[list[int]], Form] | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        ends: Sequence[int],
        tokens: Sequence[int],
        prompt_tokens: int,
    ) -> None:
        self._span, self._tokenizer, self._vocab = span, tokenizer, vocab_size
        self._ends = frozenset(ends)
        self._tokens, self._read = tokens, prompt_tokens
        self._text = lru_cache(_TEXTS)(tokenizer.token_text)
        self._closing = tokenizer.plain_ids(span.closing)
        self._place = _Place("inside" if span.inside else "before")
        self._after: list[int] = []  # tokens of the answer after its reasoning
        self._without: list[int] = []  # all tokens of the answer, while it has no reasoning
        self._forms: dict[str, Form] = {}
        if start is not None:
            self._forms["after"] = start(self._after)
            if not span.inside:
                self._forms["without"] = start(self._without)
        self._inside: dict[str, NDArray[np.bool_]] = {}  # masks inside the reasoning, by `held`

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        self._go_on()
        return np.stack([self._mask(path) for path in paths])

    def allows(self, path: Path, token: int) -> bool:
        self._go_on()
        place, first = self._walk(path)
        return self._allows(place, path[first:], token)

    def legal(self, path: Path) -> int:
        self._go_on()
        place, first = self._place, 0
        for number, token in enumerate(path):
            if place.part in ("after", "without"):
                form = self._forms.get(place.part)
                return first + (len(path) - first if form is None else form.legal(path[first:]))
            if not self._allows(place, path[first:number], token):
                return number
            place, first = self._step(place, token, first, number)
        return len(path)

    def forced(self) -> Sequence[int]:
        self._go_on()
        if self._place.part == "inside":
            return self._closing[self._late(self._place) :] if self._late(self._place) >= 0 else ()
        form = self._forms.get(self._place.part)
        return () if form is None else form.forced()

    def recalls(self) -> bool:
        self._go_on()
        form = self._forms.get(self._place.part)
        return form is not None and form.recalls()

    def problem(self) -> str:
        self._go_on()
        form = self._forms.get(self._place.part)
        return "" if form is None else form.problem()

    def _go_on(self) -> None:
        for token in self._tokens[self._read :]:
            self._read += 1
            if self._place.part == "after":
                self._after.append(token)
            elif self._place.part != "inside":
                self._without.append(token)
            self._place = self._next(self._place, token)

    def _walk(self, path: Path) -> tuple[_Place, int]:
        place, first = self._place, 0
        for number, token in enumerate(path):
            place, first = self._step(place, token, first, number)
        return place, first

    def _step(self, place: _Place, token: int, first: int, number: int) -> tuple[_Place, int]:
        after = self._next(place, token)
        return after, number + 1 if after.part == "after" != place.part else first

    def _next(self, place: _Place, token: int) -> _Place:
        if place.part in ("after", "without"):
            return place
        text = place.held + self._text(token)
        count = place.count
        if place.part == "before":
            text = text.lstrip()
            if not text.startswith(self._span.opening):
                return _Place("before" if self._span.opening.startswith(text) else "without", text)
            text, count = text.removeprefix(self._span.opening), -1
        if self._span.closing in text:
            return _Place("after")
        return _Place("inside", text[len(text) - overlap(text, self._span.closing) :], count + 1)

    def _late(self, place: _Place) -> int:
        """Tokens beyond the reasoning budget, which are those of the closing mark; negative before the limit."""
        return -1 if self._span.budget is None else place.count - self._span.budget

    def _allows(self, place: _Place, path: Path, token: int) -> bool:
        if place.part == "inside":
            late = self._late(place)
            if 0 <= late < len(self._closing):
                return token == self._closing[late]
            return not self._forms or not (token in self._ends or self._runs_over(place, self._text(token)))
        form = self._forms.get("after" if place.part == "after" else "without")
        if form is None or (place.part == "before" and self._opens(place, self._text(token))):
            return True
        return form.allows(path, token) and (place.part == "after" or form.legal(path) == len(path))

    def _mask(self, path: Path) -> NDArray[np.bool_]:
        place, first = self._walk(path)
        if place.part == "inside":
            return self._mask_inside(place)
        form = self._forms.get("after" if place.part == "after" else "without")
        if form is None:
            return np.ones(self._vocab, dtype=np.bool_)
        mask = form.masks([path[first:]])[0]
        if place.part == "before":
            mask = mask & (form.legal(path) == len(path))
            begin = self._tokenizer.texts_holding(self._span.opening[len(place.held)]).items()
            mask[[token for token, text in begin if token < self._vocab and self._opens(place, text)]] = True
        return mask

    def _mask_inside(self, place: _Place) -> NDArray[np.bool_]:
        late = self._late(place)
        if 0 <= late < len(self._closing):
            return np.arange(self._vocab) == self._closing[late]
        if place.held not in self._inside:
            mask = self._inside[place.held] = np.ones(self._vocab, dtype=np.bool_)
            if self._forms:
                over = self._tokenizer.texts_holding(self._span.closing[-1]).items()
                mask[[token for token, text in over if token < self._vocab and self._runs_over(place, text)]] = False
                mask[[token for token in self._ends if token < self._vocab]] = False
        return self._inside[place.held]

    def _runs_over(self, place: _Place, text: str) -> bool:
        whole = place.held + text
        return self._span.closing in whole and not whole.endswith(self._span.closing)

    def _opens(self, place: _Place, text: str) -> bool:
        left = self._span.opening[len(place.held) :]
        return bool(text) and (left.startswith(text) or text.startswith(left))
