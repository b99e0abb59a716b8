"""The two streams, on terminals and off them; marks of origin, on whole characters and around stop texts."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from cli.tiny import tiny_tokenizer
from truedraft.cli import session
from truedraft.cli.terminal import Terminal, TokenPainter, legend, say
from truedraft.core.stats import Counters
from truedraft.core.verdict import Origin
from truedraft.engine import Answer, Piece
from truedraft.engine.answer import Timing
from truedraft.progress import STAGES, log_stage
from truedraft.text.tokenizer import Tokenizer


def on_a_terminal() -> tuple[Terminal, io.StringIO]:
    terminal, screen = Terminal(), io.StringIO()
    terminal.err = Console(file=screen, force_terminal=True, width=100)
    return terminal, screen


def test_answers_stay_on_standard_output_beside_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, screen = on_a_terminal()
    terminal.patience_s = 0.0
    with terminal.progress("answering", 2, during_output=True) as progress:
        progress(1, "half")
        terminal.write("an answer\n")
    assert capsys.readouterr().out == "an answer\n"
    assert "answering" in screen.getvalue() and "half" in screen.getvalue()


def test_no_bar_for_what_is_quick_nor_off_a_terminal() -> None:
    terminal, screen = on_a_terminal()
    with terminal.progress("answering", 2) as progress:
        progress(2, "")
    assert screen.getvalue() == ""
    terminal.err = Console(file=screen, force_terminal=False)
    terminal.patience_s = 0.0
    with terminal.progress("answering", 2) as progress:
        progress(2, "")
    assert screen.getvalue() == ""


def test_json_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.write("unfinished")
    terminal.json({"a": "é"})
    assert capsys.readouterr().out == 'unfinished\n{"a": "é"}\n'


def test_colours_only_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    assert not terminal.colour
    terminal.out = Console(force_terminal=True, color_system="standard")
    assert terminal.colour
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.out = Console(force_terminal=True, color_system="standard")
    assert not terminal.colour


def test_what_takes_long_is_said_in_a_line_where_no_terminal_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()
    monkeypatch.setattr(session, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(session, "say", lambda message: (say(message), said.set()))
    with session.waiting(Console(file=io.StringIO()), "loading x"):
        assert said.wait(60.0)
    assert capsys.readouterr() == ("", "truedraft: loading x\n")
    monkeypatch.setattr(session, "_PATIENCE_S", 3600.0)
    with session.waiting(Console(file=io.StringIO()), "loading x"):
        log_stage("compiling")
    assert capsys.readouterr() == ("", "")


def test_each_stage_is_said_that_takes_long_and_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    there = threading.Event()
    monkeypatch.setattr(session, "say", lambda message: (said.append(message), there.set()))
    monkeypatch.setattr(session, "_PATIENCE_S", 3600.0)
    with session.waiting(Console(file=io.StringIO()), "loading x") as show:
        monkeypatch.setattr(session, "_PATIENCE_S", 0.0)
        for say_stage in (log_stage, show):
            there.clear()
            say_stage(f"stage {len(said)}")
            assert there.wait(60.0)
    assert said == ["stage 0", "stage 1"], "what it began with took no time"
    log_stage("unheard")
    assert len(said) == 2 and not STAGES.handlers
    screen = io.StringIO()
    with session.waiting(Console(file=screen, force_terminal=True), "loading x") as show:
        log_stage("compiling y")
    assert "compiling y" in screen.getvalue()


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
