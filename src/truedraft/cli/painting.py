"""Shows the origin of each token of an answer: by colour on a terminal, by brackets elsewhere.

Without colours a recovered token is in ⟦ ⟧ and a bonus token in ⟨ ⟩; accepted drafts have no mark. Control characters
except line breaks and tabs are written as escapes, because a terminal would interpret them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.color import ColorSystem
from rich.style import Style

from truedraft.cli.streams import visible
from truedraft.cli.terminal import Terminal
from truedraft.core.verdict import Origin
from truedraft.text.detokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from truedraft.engine import Answer, Piece
    from truedraft.text.tokenizer import Tokenizer

_COLOURS = {
    Origin.ACCEPTED: Style(color="green"),
    Origin.RECOVERED: Style(color="red", bold=True),
    Origin.BONUS: Style(color="blue", bold=True),
}
_BRACKETS = {Origin.ACCEPTED: ("", ""), Origin.RECOVERED: ("⟦", "⟧"), Origin.BONUS: ("⟨", "⟩")}
_MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.RECOVERED: "recovered (drawn after a rejection)",
    Origin.BONUS: "bonus (nothing was rejected)",
}


class TokenPainter:
    """Converts the pieces of one answer to marked text.

    A character of several tokens gets the mark of the token that completes it.

    Args:
        tokenizer: None shows ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, colour: bool) -> None:
        self._detokenizer = None if tokenizer is None else StreamDetokenizer(tokenizer)
        self._colour = colour
        self._parts: deque[tuple[str, Origin]] = deque()  # tokens with text that no piece has so far
        self._text = ""  # of pieces, without its tokens so far
        self._last = Origin.BONUS

    def paint(self, piece: Piece) -> str:
        if self._detokenizer is None:
            return "".join(
                _marked(str(token), origin, self._colour) + " "
                for token, origin in zip(piece.token_ids, piece.origins, strict=True)
            )
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._parts.append((self._detokenizer.push([token]), origin))
            self._last = origin
        if piece.answer is not None:
            self._parts.append((self._detokenizer.finish(), self._last))
        self._text += piece.text
        rest = self._take()
        if piece.answer is not None:
            rest, self._text = rest + visible(self._text), ""
        return rest

    def paint_answer(self, answer: Answer) -> str:
        from truedraft.engine import Piece

        return self.paint(Piece(answer.text or "", answer.token_ids, answer.origins, answer))

    def _take(self) -> str:
        """Mark text with known tokens; around a possible stop text, tokens and text arrive at different times."""
        marked: list[str] = []
        while self._text and self._parts:
            part, origin = self._parts.popleft()
            taken = part[: len(self._text)]
            if len(part) > len(taken):
                self._parts.appendleft((part[len(taken) :], origin))
            if taken:
                marked.append(_marked(taken, origin, self._colour))
            self._text = self._text[len(taken) :]
        return "".join(marked)


def _marked(text: str, origin: Origin, colour: bool) -> str:
    text = visible(text)
    if colour:
        return _COLOURS[origin].render(text, color_system=ColorSystem.STANDARD)
    opening, closing = _BRACKETS[origin]
    return f"{opening}{text}{closing}"


def legend(colour: bool) -> str:
    """The meaning of the marks in one line, itself marked."""
    return " · ".join(_marked(text, origin, colour) for origin, text in _MEANINGS.items())


def writer(tokenizer: Tokenizer | None, terminal: Terminal, show_drafts: bool) -> Callable[[Piece], None]:
    """A function that writes the pieces of one answer to standard output; without a tokenizer it writes ids."""
    if show_drafts:
        painter = TokenPainter(tokenizer, terminal.colour)
        return lambda piece: terminal.write(painter.paint(piece))
    if tokenizer is None:
        return lambda piece: terminal.write("".join(f"{token} " for token in piece.token_ids))
    return lambda piece: terminal.write(visible(piece.text))


def written(answer: Answer, tokenizer: Tokenizer | None, terminal: Terminal, show_drafts: bool) -> str:
    """A whole answer as `writer` would have written it."""
    if show_drafts:
        return TokenPainter(tokenizer, terminal.colour).paint_answer(answer)
    return " ".join(map(str, answer.token_ids)) if answer.text is None else visible(answer.text)
