"""The text of a growing sequence of ids: incremental detokenization, and stop texts.

Pieces never end in a part of a character, and join to exactly the text of decoding all ids. An answer ends before the
first stop text that becomes complete, at the token that completes it: with "END" and tokens "a E", "N", "D b", "a " is
released and "E" held first; the third completes it, so the answer is "a " and keeps one token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from truedraft.errors import OptionError
from truedraft.text.calls import overlap

if TYPE_CHECKING:
    from truedraft.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""The replacement for bytes that make no character."""

# Tokens kept as context for later ones, because a decoder may drop a space at the very beginning, and bytes may join to
# characters. Of a cut stream of UTF-8 at most 3 bytes are misread and the last character has at most 4: 7 bytes.
_CONTEXT = 8


class ShownTokens:
    """A tokenizer that also writes some special tokens, by their ids, by name."""

    def __init__(self, tokenizer: Tokenizer, names: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._names = {token: name for token, name in names.items() if token in tokenizer.skipped_ids}
        self.skipped_ids = tokenizer.skipped_ids - self._names.keys()
        self.vocab_size, self.byte_values = tokenizer.vocab_size, tokenizer.byte_values

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = list[str](), list[int]()
        for token in ids:
            if token in self._names:
                parts += [self._tokenizer.decode(run), self._names[token]]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._tokenizer.decode(run)])


class StreamDetokenizer:
    """Turns a growing sequence of ids into pieces of text that later tokens cannot change.

    The pieces, with that of `finish`, join to `tokenizer.decode(all ids)`, whatever the ids. Held back are:

    - a U+FFFD at the end: the bytes of an incomplete character (or a real U+FFFD);
    - with byte fallback (Llama 2, Gemma), a run of byte tokens, because one bad byte turns all of them into U+FFFD.

    A token costs the decoding of a window of about 16 tokens, not of the answer so far.
    """

    def __init__(self, tokenizer: Tokenizer | ShownTokens) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens with unreleased text, after up to _CONTEXT released ones
        self._released = 0  # characters of the window's text that have been returned
        self.holding = False  # whether any text is held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next tokens; return the text that has become final, often of earlier tokens."""
        return "".join([self._push(token) for token in token_ids])

    def pending(self) -> str:
        """The held text, as it would be if no token followed."""
        if not self.holding:
            return ""
        return self._tokenizer.decode(self._window)[self._released :]

    def finish(self) -> str:
        """Return the held text at the end; the next `push` begins a new text."""
        rest = self.pending()
        self._window, self._released, self.holding = [], 0, False
        return rest

    def _push(self, token: int) -> str:
        if not 0 <= token < self._tokenizer.vocab_size or token in self._tokenizer.skipped_ids:
            return ""
        self._window.append(token)
        if token in self._tokenizer.byte_values:
            # A run is decoded only when it ends, so that it costs no more than its length.
            self.holding = True
            return ""
        text = self._tokenizer.decode(self._window)
        final = _final_length(text)
        piece = text[self._released : final]
        self._released = max(self._released, final)
        self.holding = self._released < len(text)
        if len(self._window) >= 2 * _CONTEXT:
            self._shorten(text[: self._released])
        return piece

    def _shorten(self, released: str) -> None:
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


class StopScanner:
    """Pass text through up to the first stop text, holding back a possible beginning of one.

    The stop text that is complete first wins; of those complete at the same character, the one that begins first. So
    the answer does not depend on how the text is chunked.

    Raises OptionError: a stop text is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise OptionError(f"stop must hold texts of at least one character, got {stops!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Process the next text; return the text safe to emit, and whether a stop text was found right after it."""
        if self.found is not None:
            return "", True
        text = self._held + text
        first = self._first(text)
        if first is not None:
            start, self.found = first
            self._held = ""
            return text[:start], True
        start = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[start:]
        return text[:start], False

    def would_stop(self, text: str) -> bool:
        """Whether this text, if it came next, would complete a stop text; changes nothing."""
        return self.found is not None or self._first(self._held + text) is not None

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _first(self, text: str) -> tuple[int, str] | None:
        ends = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(ends)[1:] if ends else None


class TextStream:
    """The text of one answer, token by token, ended by stop texts; those that begin before `least_tokens` do not count.

    Without a `tokenizer` the text is empty; `shown` has names by id of special tokens that the text shows.

    Raises OptionError: stop texts without a tokenizer, or an empty one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        least_tokens: int = 0,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._scanner = StopScanner(stops)
        if tokenizer is None and stops:
            raise OptionError(
                f"stop {stops!r} needs a tokenizer, and this model has none; use stop_token_ids, "
                "or load a folder with tokenizer files"
            )
        self._tokenizer = ShownTokens(tokenizer, shown) if tokenizer is not None and shown else tokenizer
        self._detokenizer = None if self._tokenizer is None else StreamDetokenizer(self._tokenizer)
        self._scans = bool(stops)
        self._least = least_tokens
        self._last_bytes = {stop.encode(errors="replace")[-1] for stop in stops}
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._length = 0  # characters emitted
        self._read = 0  # characters read from the detokenizer, emitted or held by the scanner
        # Points with nothing held back: numbers of tokens, and the length of their text.
        self._clean_tokens: list[int] = [0]
        self._clean_lengths: list[int] = [0]
        self._kept: int | None = None

    @property
    def writes(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stopped(self) -> bool:
        return self._kept is not None

    @property
    def stop_text(self) -> str | None:
        return self._scanner.found

    @property
    def kept_tokens(self) -> int:
        """Number of tokens that the answer keeps: all, or after a stop the fewest with a text that begins with `text`.

        So a token with the last characters before the stop text counts, even if the stop text begins inside it; tokens
        of only the stop text, and special tokens right before it, do not.
        """
        return len(self._ids) if self._kept is None else self._kept

    @property
    def settled_tokens(self) -> int:
        """Number of tokens that the answer keeps whatever follows: never more than `kept_tokens` will be.

        Without stop texts all. Otherwise those needed by the text emitted so far; of the tokens of a character, or of a
        run of bytes, only the first counts until text after them is emitted.
        """
        if self.stopped or not self._scans:
            return self.kept_tokens
        return self._too_few() + 1 if self._length else 0

    def push(self, token_id: int) -> tuple[str, bool]:
        """Process the next token; return the text that may be emitted now, and whether the answer ends after it."""
        if self.stopped:
            return "", True
        self._ids.append(token_id)
        if self._detokenizer is None:
            return "", False
        text = self._detokenizer.push([token_id])
        if self._completes_in_held_bytes(token_id, text):
            text += self._detokenizer.pending()
        self._read += len(text)
        if self._scans and not self._detokenizer.holding:
            self._clean_tokens.append(len(self._ids))
            self._clean_lengths.append(self._read)
        return self._scan(text)

    def finish(self) -> str:
        if self.stopped or self._detokenizer is None:
            return ""
        piece, stopped = self._scan(self._detokenizer.finish())
        return piece if stopped else piece + self._emit(self._scanner.finish())

    def _completes_in_held_bytes(self, token_id: int, text: str) -> bool:
        """Whether this token's held byte completes a stop text, as a line break does in Llama 2."""
        if self._tokenizer is None or self._detokenizer is None or self._is_early:
            return False
        if self._tokenizer.byte_values.get(token_id) not in self._last_bytes:  # so that long runs of bytes are cheap
            return False
        pending = self._detokenizer.pending()
        # An incomplete or broken run of bytes decodes to U+FFFD for each: no text yet.
        return not pending.endswith(REPLACEMENT) and self._scanner.would_stop(text + pending)

    @property
    def _is_early(self) -> bool:
        return len(self._ids) <= self._least

    def _scan(self, text: str) -> tuple[str, bool]:
        if self._is_early:
            return self._emit(text), False
        piece, stopped = self._scanner.push(text)
        self._emit(piece)
        if stopped:
            self._kept = self._count_kept()
        return piece, stopped

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
        return piece

    def _count_kept(self) -> int:
        """The fewest tokens with a text that begins with the emitted text; computed once, at the end of an answer."""
        if self._length == 0 or self._tokenizer is None:
            return 0
        for count in range(self._too_few() + 1, len(self._ids)):
            if self._tokenizer.decode(self._ids[:count]).startswith(self.text):
                return count
        return len(self._ids)

    def _too_few(self) -> int:
        """The most tokens known to be too few for the emitted text: nothing was held, and their text was shorter."""
        return self._clean_tokens[bisect_left(self._clean_lengths, self._length) - 1]
