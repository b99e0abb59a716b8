"""The standard streams, whatever state and encoding a command finds them in, and text as it is shown and typed there.

A terminal obeys control characters, so they are written out; who types may write escapes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from truedraft.errors import OptionError

_BREAKS = "\t\n"
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]  # C0, delete and C1
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _BREAKS}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def visible(text: str) -> str:
    r"""The text with its control characters written out, but for line breaks and tabs.

    >>> visible("a\x1b[31mb\r\n")
    'a\\x1b[31mb\\x0d\n'
    """
    return text.translate(_SHOWN)


def from_escapes(typed: str, option: str) -> str:
    r"""The text that somebody typed with backslash escapes.

    >>> from_escapes(r"\n\u20ac\\", "--stop")
    '\n€\\'

    Args:
        typed: may hold \n, \r, \t, \\ and \uXXXX, where two of these may make one character.
        option: for messages.

    Raises:
        OptionError: another escape, or half a character.
    """

    def meant(found: re.Match[str]) -> str:
        code = found[1]
        if code[:1] == "u" and len(code) == 5:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise OptionError(
                f"{option} {typed!r} holds the escape \\{code}, which means nothing here; "
                r"valid: \n, \r, \t, \\ (a backslash) and \uXXXX"
            )
        return _ESCAPES[code]

    text = _ESCAPE.sub(meant, typed)
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeError as error:
        raise OptionError(f"{option} {typed!r} holds half a character; give both its halves") from error


def typed_text(word: str) -> str:
    """A text of the command line, as UTF-8 also where a locale that knows ASCII alone has read it."""
    try:
        return os.fsencode(word).decode("utf-8") if any("\udc80" <= char <= "\udcff" for char in word) else word
    except UnicodeError:
        return word


def json_line(record: Mapping[str, Any]) -> str:
    """A JSON object as one line, break included, without raw characters that end a line or steer a terminal."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_IN_JSON) + "\n"


def say(message: str) -> None:
    """One line on standard error, whatever line breaks and control characters the message holds."""
    sys.stderr.write(f"truedraft: {visible(' '.join(message.split()))}\n")
    sys.stderr.flush()


def prepare_streams() -> None:
    """UTF-8 in and out under any locale; a closed descriptor becomes one that swallows everything.

    Otherwise the next file that is opened would take its number, and whoever writes to standard error would write
    there. Half characters are written out, as \\udcff, which in JSON is what they are.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def output_is_open() -> bool:
    """Whether there is a standard output; says so on standard error if not."""
    if sys.stdout is None:
        say("error: standard output is closed; send it to a file, or to /dev/null")
    return sys.stdout is not None


def output_was_taken() -> bool:
    """Whether standard output took all that was written; says so on standard error if not, unless its reader left.

    What it did not take is given up, else the interpreter would try again at its end, and fail in its own words.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say(f"error: standard output cannot be written ({error.strerror or error})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True
