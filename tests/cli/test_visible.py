"""Text as it is shown and as it is typed."""

from __future__ import annotations

import json

import pytest

from truedraft.cli.visible import from_escapes, json_line, visible
from truedraft.errors import OptionError


def test_control_characters_are_written_out() -> None:
    every = "".join(map(chr, range(0x100)))
    shown = visible(every)
    assert not [char for char in shown if (ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0) and char not in "\n\t"]
    assert visible("\x1b[2J\x9b1m\r\x7f") == "\\x1b[2J\\x9b1m\\x0d\\x7f"
    assert visible("a\tb\nüñ€") == "a\tb\nüñ€"


def test_json_is_one_line_that_steers_no_terminal_and_means_the_same() -> None:
    record = {"text": "".join(map(chr, range(0x100))) + "\u2028\u2029€\udcff"}
    line = json_line(record)
    assert len(line.splitlines()) == 1 and "€" in line
    assert not [char for char in line[:-1] if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0]
    assert json.loads(line) == record


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("END", "END"),
        (r"\n\n", "\n\n"),
        (r"\t\r", "\t\r"),
        (r"\\n", "\\n"),
        (r"\u20ac", "€"),
        (r"\ud83d\ude00!", "😀!"),
    ],
)
def test_escapes_that_are_typed(typed: str, meant: str) -> None:
    assert from_escapes(typed, "--stop") == meant


@pytest.mark.parametrize(
    ("typed", "phrase"),
    [
        (r"\d", r"the escape \d, which means nothing"),
        ("end\\", "the escape \\,"),
        (r"\u12", r"\u, which"),
        (r"\ud83d", "half a"),
    ],
)
def test_escapes_that_mean_nothing_are_refused(typed: str, phrase: str) -> None:
    with pytest.raises(OptionError) as refused:
        from_escapes(typed, "--stop")
    assert phrase in str(refused.value) and str(refused.value).startswith("--stop ")
