"""A growing text in one tokenizer's ids, encoded in another's.

Tokenizers encode the beginning of a text differently from its middle (a space, a begin token), and the last token of a
text may change when more follows. So a little more than needed is encoded: the input begins in known text, and the
result counts from the first position where a new token begins as well. If there is none, the bytes are spelled, the
longest token first. Texts are compared as UTF-8 bytes, because a token may contain a part of a character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from truedraft.text.tokenizer import Tokenizer
from truedraft.text.translation import GreedyRetokenizer, Translation, first_ids, surfaces

_KNOWN = 64
"""Bytes of known text that are encoded before the new text."""
_OPEN = 24
"""Bytes at the end of a text that may be tokenized differently when more follows."""


class Encoding:
    """Encodes parts of texts in one tokenizer's ids.

    Args:
        size: number of ids of its model.
        fallback: an id for bytes without any token.

    Attributes:
        surfaces: by id the bytes that it writes inside a text.
        pads: whether the tokenizer adds a space at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, fallback: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self.surfaces = surfaces(tokenizer)[:size]
        self._retokenizer = GreedyRetokenizer(first_ids(self.surfaces, tokenizer), fallback)
        self.pads = self.text_of([number for number in tokenizer.plain_ids("a") if number < size])[:1] == b" "

    def ids_after(self, known: bytes, text: bytes) -> list[int]:
        """Encode a text that follows another; with nothing before it, the beginning of a text, with the tokenizer's own
        space.

        Worked example: with tokens "ab", " c" and "d", after "ab" the text " cd" is " c", "d"; after "a" the text "b c"
        is spelled, because no token of "ab c" begins after "a".

        Args:
            known: the end of the preceding text.
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
        return list(self._retokenizer.of(text))

    def text_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.surfaces[number] or b"" for number in ids)


class FollowedText:
    """One text in a target's ids, kept encoded in a draft's ids while it grows.

    Attributes:
        ids: of the draft; the last ones change when more follows.
    """

    def __init__(self, written: Encoding, read: Encoding, translation: Translation) -> None:
        self._written = written
        self._read = read
        self._translation = translation
        self.ids: list[int] = []
        self._taken = 0  # number of tokens of the target
        self._text = b""  # since the last id without text
        self._begun = False  # whether `_text` has a token
        self._ends: list[int] = []  # end positions of the last ids in `_text`

    def take(self, tokens: Sequence[int]) -> None:
        """Process new tokens."""
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
        """Bytes of an incomplete last character, not yet encoded for the draft."""
        return self._text[len(whole_characters(self._text)) :]

    @property
    def known(self) -> bytes:
        return self._text[-_KNOWN:]

    def _settle(self) -> None:
        """Encode new text, and the end of the old text again."""
        text = whole_characters(self._text)
        done = self._ends[-1] if self._ends else 0
        if len(text) == done:
            return
        keep = bisect_right(self._ends, done - _OPEN)
        start = self._ends[keep - 1] if keep else 0
        keep = keep if start else 0  # an added space ends before it
        new = self._read.ids_after(text[max(0, start - _KNOWN) : start], text[start:])
        del self.ids[len(self.ids) - len(self._ends) + keep :]
        self.ids += new
        lengths = [len(self._read.surfaces[number] or b"") for number in new]
        lengths[0] -= not start and self._read.pads and self._read.text_of(new) == b" " + text
        self._ends = [*self._ends[:keep], *(start + end for end in accumulate(lengths))]
        self._ends[-1] = len(text)  # bytes without any token are skipped


def whole_characters(text: bytes) -> bytes:
    """A text without the bytes of an incomplete last character.

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
