"""Text as it may be shown, for a terminal obeys control characters; and text as it is typed, by escapes."""

from __future__ import annotations

import json
import os
import re
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
