"""The standard streams in any state and encoding, and text that is shown or typed there.

A terminal interprets control characters, so they are written as escapes; typed text may have escapes.
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
    r"""The text with its control characters as escapes, except line breaks and tabs.

    >>> visible("a\x1b[31mb\r\n")
    'a\\x1b[31mb\\x0d\n'
    """
    return text.translate(_SHOWN)


def from_escapes(typed: str, option: str) -> str:
    r"""The text of a typed string with backslash escapes.

    >>> from_escapes(r"\n\u20ac\\", "--stop")
    '\n€\\'

    Args:
        typed: may hold \n, \r, \t, \\ and \uXXXX, where two of these may make one character.

    Raises:
        OptionError: another escape, or a lone surrogate.
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
    """A text of the command line, as UTF-8 even if an ASCII locale has decoded it."""
    try:
        return os.fsencode(word).decode("utf-8") if any("\udc80" <= char <= "\udcff" for char in word) else word
    except UnicodeError:
        return word


def json_line(record: Mapping[str, Any]) -> str:
    """A JSON object as one line, including the break, without raw control characters."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_IN_JSON) + "\n"


def say(message: str) -> None:
    """Print one line on standard error, with line breaks and control characters as escapes."""
    sys.stderr.write(f"truedraft: {visible(' '.join(message.split()))}\n")
    sys.stderr.flush()


def prepare_streams() -> None:
    """Use UTF-8 under any locale, and replace closed descriptors by the null device.

    Otherwise the next opened file would get the descriptor's number, and output to standard error would go there. Lone
    surrogates are written as \\udcff, which is also their form in JSON.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def output_is_open() -> bool:
    """Whether standard output is open; prints on standard error if not."""
    if sys.stdout is None:
        say("error: standard output is closed; send it to a file, or to /dev/null")
    return sys.stdout is not None


def output_was_taken() -> bool:
    """Whether standard output could be flushed; prints on standard error if not, unless its reader closed it.

    The rest is discarded, because otherwise the interpreter would try again at exit and print its own error.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say(f"error: standard output cannot be written ({error.strerror or error})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True
