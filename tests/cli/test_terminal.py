"""The two streams, on terminals and off them."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from truedraft.cli import session
from truedraft.cli.streams import say
from truedraft.cli.terminal import Terminal
from truedraft.progress import STAGES, log_stage


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
