"""Incremental detokenization: never a part of a character, and in sum exactly the text of decoding all ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

REPLACEMENT = "\ufffd"
"""The replacement for bytes that make no character."""

# Tokens kept as context for later ones. The text of a token depends on what is before it in two ways only:
# a decoder may drop a space at the very beginning (one token of context is enough to know), and bytes may join to
# characters. Of a cut stream of UTF-8 at most 3 bytes are misread and the last character has at most 4, so that
# 7 bytes, hence 8 tokens, are enough to read everything that follows as in the whole stream.
_CONTEXT = 8


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""

    @property
    def skipped_ids(self) -> AbstractSet[int]:
        """Ids without text."""

    @property
    def byte_values(self) -> Mapping[int, int]:
        """By id the byte of each byte token; a run of them is decoded together."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids."""


class ShownTokens:
    """A decoder that writes some special tokens by their names, and passes all others to another decoder.

    Args:
        names: by id of the tokens to show; tokens with a text of their own do not change.
    """

    def __init__(self, decoder: Decoder, names: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._names = {token: name for token, name in names.items() if token in decoder.skipped_ids}
        self.skipped_ids = decoder.skipped_ids - self._names.keys()

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def byte_values(self) -> Mapping[int, int]:
        return self._decoder.byte_values

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = list[str](), list[int]()
        for token in ids:
            if token in self._names:
                parts += [self._decoder.decode(run), self._names[token]]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._decoder.decode(run)])


class StreamDetokenizer:
    """Turns a growing sequence of ids into pieces of text that later tokens cannot change.

    The pieces, with that of `finish`, join to `tokenizer.decode(all ids)`, whatever the ids. Held back are:

    - a U+FFFD at the end: the bytes of an incomplete character (or a real U+FFFD);
    - with byte fallback (Llama 2, Gemma), a run of byte tokens, because one bad byte turns all of them into U+FFFD.

    A token costs the decoding of a window of about 16 tokens, not of the answer so far.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens with unreleased text, after up to _CONTEXT released ones
        self._released = 0  # characters of the window's text that have been returned
        self._held = False

    @property
    def holding(self) -> bool:
        """Whether text of the tokens so far is held back."""
        return self._held

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next tokens; return the text that has become final, often of earlier tokens."""
        return "".join([self._push(token) for token in token_ids])

    def pending(self) -> str:
        """The held text, as it would be if no token followed."""
        if not self._held:
            return ""
        return self._tokenizer.decode(self._window)[self._released :]

    def finish(self) -> str:
        """Return the held text at the end; the next `push` begins a new text."""
        rest = self.pending()
        self._window, self._released, self._held = [], 0, False
        return rest

    def _has_text(self, token: int) -> bool:
        return 0 <= token < self._tokenizer.vocab_size and token not in self._tokenizer.skipped_ids

    def _push(self, token: int) -> str:
        if not self._has_text(token):
            return ""
        self._window.append(token)
        if token in self._tokenizer.byte_values:
            # A run is decoded only when it ends, so that it costs no more than its length.
            self._held = True
            return ""
        return self._release()

    def _release(self) -> str:
        text = self._tokenizer.decode(self._window)
        final = _final_length(text)
        piece = text[self._released : final]
        self._released = max(self._released, final)
        self._held = self._released < len(text)
        if len(self._window) >= 2 * _CONTEXT:
            self._shorten(text[: self._released])
        return piece

    def _shorten(self, released: str) -> None:
        """Drop tokens of the window that later text does not depend on."""
        context = self._window[-_CONTEXT:]
        text = self._tokenizer.decode(context)
        length = _final_length(text)
        # If the cut falls inside a character, or leaves only spaces that a decoder drops at the ends of a text
        # (slow tokenizers do), try again at the next token.
        if length and released.endswith(text[:length]):
            self._window = context
            self._released = length


def _final_length(text: str) -> int:
    """Length of the text that no later bytes can change: an incomplete character decodes to one U+FFFD."""
    return len(text) - text.endswith(REPLACEMENT)
