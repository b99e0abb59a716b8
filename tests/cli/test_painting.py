"""Marks of origin, on whole characters and around stop texts."""

from __future__ import annotations

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


def test_brackets_without_colours() -> None:
    ids = TOKENIZER.encode("abcd")
    painter = TokenPainter(TOKENIZER, colour=False)
    assert painter.paint(Piece("abcd", ids, [A, A, R, B])) == "ab⟦c⟧⟨d⟩"


def test_a_character_is_marked_as_the_token_that_completes_it() -> None:
    ids = TOKENIZER.encode("aé")
    painter = TokenPainter(TOKENIZER, colour=False)
    assert painter.paint(Piece("a", ids[:2], [A, A])) == "a"
    assert painter.paint(Piece("é", ids[2:], [R])) == "⟦é⟧"


def test_text_that_was_held_back_keeps_its_marks() -> None:
    ids = TOKENIZER.encode("abc")
    painter = TokenPainter(TOKENIZER, colour=False)
    assert painter.paint(Piece("a", ids[:2], [B, R])) == "⟨a⟩"
    assert painter.paint(Piece("bc", ids[2:], [A])) == "⟦b⟧c"


def test_text_that_comes_before_its_tokens_waits_for_them() -> None:
    """Where a stop text may begin inside a character's tokens, its last ones come later than their text."""
    ids = TOKENIZER.encode("aéb")
    painter = TokenPainter(TOKENIZER, colour=False)
    assert painter.paint(Piece("aé", ids[:2], [A, R])) == "a"
    assert painter.paint(Piece("b", ids[2:], [B, A])) == "⟨é⟩b"
    whole = answer("aébc", ids, [A, R, B, A])
    assert painter.paint(Piece("c", [], [], whole)) == "c"  # nothing is lost, even what no token brought


def test_the_end_of_an_unfinished_character_is_shown() -> None:
    ids = TOKENIZER.encode("aé")[:2]
    painter = TokenPainter(TOKENIZER, colour=False)
    assert painter.paint(Piece("a\ufffd", ids, [A, B], answer("a\ufffd", ids, [A, B]))) == "a⟨\ufffd⟩"


def test_ids_where_there_is_no_tokenizer() -> None:
    assert TokenPainter(None, colour=False).paint(Piece("", [7, 8], [A, R])) == "7 ⟦8⟧ "


def test_colours() -> None:
    ids = TOKENIZER.encode("ab")
    painted = TokenPainter(TOKENIZER, colour=True).paint(Piece("ab", ids, [A, R]))
    assert painted == "\x1b[32ma\x1b[0m\x1b[1;31mb\x1b[0m"
    assert "\x1b[32mdrafted and accepted" in legend(colour=True) and "\x1b" not in legend(colour=False)
