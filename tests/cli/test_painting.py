"""Marks of origin, on whole characters and around stop texts."""

from __future__ import annotations

import pytest

from cli.tiny import tiny_tokenizer
from truedraft.cli.terminal import TokenPainter, legend
from truedraft.core.stats import Counters
from truedraft.core.verdict import Origin
from truedraft.engine import Answer, Piece
from truedraft.engine.answer import Timing
from truedraft.text.tokenizer import Tokenizer

A, R, B = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS
TOKENIZER = Tokenizer(tiny_tokenizer(), "tiny")


def answer(text: str, ids: list[int], origins: list[Origin]) -> Answer:
    return Answer(text, ids, "length", Counters(), origins, 0, 1, Timing(0.1, 0.2))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abcd", [("abcd", 4, [A, A, R, B], "ab⟦c⟧⟨d⟩")]),
        # A character is marked as the token that completes it.
        ("aé", [("a", 2, [A, A], "a"), ("é", 1, [R], "⟦é⟧")]),
        # Text that was held back keeps its marks.
        ("abc", [("a", 2, [B, R], "⟨a⟩"), ("bc", 1, [A], "⟦b⟧c")]),
        # Where a stop text may begin inside a character's tokens, its last ones come later than their text.
        ("aéb", [("aé", 2, [A, R], "a"), ("b", 2, [B, A], "⟨é⟩b")]),
    ],
)
def test_brackets_without_colours(text: str, pieces: list[tuple[str, int, list[Origin], str]]) -> None:
    ids, painter = TOKENIZER.encode(text), TokenPainter(TOKENIZER, colour=False)
    for shown, count, origins, painted in pieces:
        assert painter.paint(Piece(shown, ids[:count], origins)) == painted
        ids = ids[count:]


def test_the_end_of_an_answer_is_shown() -> None:
    """Even what no token brought, and an unfinished character."""
    ids = TOKENIZER.encode("aéb")
    painter = TokenPainter(TOKENIZER, colour=False)
    painter.paint(Piece("aéb", ids, [A, R, B, A]))
    assert painter.paint(Piece("c", [], [], answer("aébc", ids, [A, R, B, A]))) == "c"
    painter, half = TokenPainter(TOKENIZER, colour=False), ids[:2]
    assert painter.paint(Piece("a\ufffd", half, [A, B], answer("a\ufffd", half, [A, B]))) == "a⟨\ufffd⟩"


def test_ids_where_there_is_no_tokenizer() -> None:
    assert TokenPainter(None, colour=False).paint(Piece("", [7, 8], [A, R])) == "7 ⟦8⟧ "


def test_colours() -> None:
    ids = TOKENIZER.encode("ab")
    painted = TokenPainter(TOKENIZER, colour=True).paint(Piece("ab", ids, [A, R]))
    assert painted == "\x1b[32ma\x1b[0m\x1b[1;31mb\x1b[0m"
    assert "\x1b[32mdrafted and accepted" in legend(colour=True) and "\x1b" not in legend(colour=False)
