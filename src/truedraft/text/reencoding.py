"""A text that one tokenizer writes, in the ids of another, while it grows.

Tokenizers begin a text otherwise than they go on in its middle (a space, a sign for the beginning), and a token that
ends a text may be another once more follows. So what is encoded is always a little more than what is wanted: it begins
in known text, and what it gives counts from the first place on where a token of it begins as well. Where none does the
bytes are spelled, the longest token first. Texts are compared as bytes in UTF-8, of which a token may hold half a
character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from truedraft.text.tokenizer import Tokenizer
from truedraft.text.translation import Speller, Translation, first_ids, surfaces

_KNOWN = 64
"""Bytes of known text that are encoded before what is wanted."""
_OPEN = 24
"""Bytes at the end of a text whose tokens may change with what follows."""


class Encoding:
    """Ids of one tokenizer for parts of texts.

    Args:
        tokenizer: of them.
        size: ids that its model knows.
        fallback: an id for bytes that it cannot write at all.

    Attributes:
        surfaces: what each id writes in the middle of a text.
        pads: whether it begins texts with a space that is not theirs.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, fallback: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self.surfaces = surfaces(tokenizer)[:size]
        self._speller = Speller(first_ids(self.surfaces, tokenizer), fallback)
        self.pads = self.text_of([number for number in tokenizer.plain_ids("a") if number < size])[:1] == b" "

    def ids_after(self, known: bytes, text: bytes) -> list[int]:
        """The ids of a text that follows another; behind nothing, of one that begins, with the tokenizer's own space.

        Worked example: with tokens "ab", " c" and "d", behind "ab" the text " cd" is " c", "d"; behind "a" the text
        "b c" is spelled, for no token of "ab c" begins behind "a".

        Args:
            known: the end of what comes before.
            text: whole characters, if `known` ends in whole ones.
        """
        if not text:
            return []
        ids = self._tokenizer.plain_ids((known + text).decode("utf-8", errors="ignore"))
        if all(number < self._size for number in ids):
            if not known and self.text_of(ids) == (b" " if self.pads else b"") + text:
                return list(ids)
            left = len(text)
            for place in range(len(ids) - 1, -1, -1):
                left -= len(self.surfaces[ids[place]] or b"")
                if left <= 0:
                    found = list(ids[place:])
                    if left == 0 and self.text_of(found) == text:
                        return found
                    break
        return list(self._speller.of(text))

    def text_of(self, ids: Sequence[int]) -> bytes:
        """What they write in the middle of a text."""
        return b"".join(self.surfaces[number] or b"" for number in ids)


class FollowedText:
    """One text that is written in a target's ids, in the ids of a draft.

    Args:
        written: how the target writes.
        read: how the draft reads.
        translation: of ids that write no text.

    Attributes:
        ids: of the draft; the last ones change when more follows.
    """

    def __init__(self, written: Encoding, read: Encoding, translation: Translation) -> None:
        self._written = written
        self._read = read
        self._translation = translation
        self.ids: list[int] = []
        self._taken = 0  # tokens of the target
        self._text = b""  # since the last id without text
        self._begun = False  # whether a token of that text has come
        self._ends: list[int] = []  # in it, of the last ids

    def take(self, tokens: Sequence[int]) -> None:
        """Read on.

        Args:
            tokens: the whole text, which was only added to since it was last taken.
        """
        begin, opens, reads = self._translation.begin, self._translation.opens, self._translation.reads
        if not self._taken:
            self._taken = len(opens) if tuple(tokens[: len(opens)]) == opens else 0
            if self._taken or reads[tokens[0]][: len(begin)] != begin:
                self.ids += begin
        for token in tokens[self._taken :]:
            written = self._written.surfaces[token]
            if written is not None:
                pads = self._written.pads and not self._begun
                self._text += written.removeprefix(b" ") if pads else written
                self._begun = True
                continue
            self._settle()
            self.ids += reads[token]
            self._text, self._ends, self._begun = b"", [], False
        self._taken = len(tokens)
        self._settle()

    @property
    def half(self) -> bytes:
        """Bytes of a character of which the end is not there yet, and which the draft has not read."""
        return self._text[len(whole_characters(self._text)) :]

    @property
    def known(self) -> bytes:
        """The end of the text."""
        return self._text[-_KNOWN:]

    def _settle(self) -> None:
        """Give new text ids, and the last of the old text again."""
        text = whole_characters(self._text)
        done = self._ends[-1] if self._ends else 0
        if len(text) == done:
            return
        keep = bisect_right(self._ends, done - _OPEN)
        start = self._ends[keep - 1] if keep else 0
        keep = keep if start else 0  # a space that is not the text's ends before it
        new = self._read.ids_after(text[max(0, start - _KNOWN) : start], text[start:])
        del self.ids[len(self.ids) - len(self._ends) + keep :]
        self.ids += new
        lengths = [len(self._read.surfaces[number] or b"") for number in new]
        lengths[0] -= not start and self._read.pads and self._read.text_of(new) == b" " + text
        self._ends = [*self._ends[:keep], *(start + end for end in accumulate(lengths))]
        self._ends[-1] = len(text)  # what it cannot write at all is passed by


def whole_characters(text: bytes) -> bytes:
    """Without the bytes of a last character that is not whole.

    >>> whole_characters("aß".encode()[:-1]), whole_characters("aß".encode()).decode()
    (b'a', 'aß')
    """
    for place in range(1, min(4, len(text)) + 1):
        first = text[-place]
        if first >= 0xC0:  # begins a character of two to four bytes
            length = 2 + (first >= 0xE0) + (first >= 0xF0)
            return text if length <= place else text[:-place]
        if first < 0x80:
            break
    return text
