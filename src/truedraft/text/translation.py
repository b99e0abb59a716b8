"""Translation between two vocabularies, id by id, and of a growing text from one tokenizer's ids into another's.

Ids are compared by the bytes that they write inside a text, because tokenizers spell tokens differently: byte-level
ones spell a space as another letter, SentencePiece as a bar, word pieces drop it and mark tokens without one.

The beginning of a text is encoded differently from its middle, and its last token may change when more follows. So the
encoded input begins in known text, and the result counts from the first position where a new token begins as well. If
there is none, the bytes are spelled, the longest token first.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.errors import VocabularyMismatchError
from truedraft.text.tokenizer import Tokenizer, byte_letters, holds_type

_BAR = "\u2581"
_LEAST_SHARED = 64
_KNOWN = 64  # bytes of known text that are encoded before the new text
_OPEN = 24  # bytes at the end of a text that may be tokenized differently when more follows


def surfaces(tokenizer: Tokenizer) -> list[bytes | None]:
    """By id the UTF-8 bytes that it writes inside a text, possibly a part of a character; None without text."""
    backend, skipped, raw = tokenizer.backend, tokenizer.skipped_ids, tokenizer.byte_values
    added = {number for number, token in backend.added_tokens_decoder.items() if not token.special}
    decoder: Any = json.loads(backend.backend_tokenizer.to_str()).get("decoder") if backend.is_fast else None
    numbers = range(tokenizer.vocab_size)
    tokens = backend.convert_ids_to_tokens([0 if number in skipped else number for number in numbers])

    def written(number: int) -> bytes | None:
        token = tokens[number]
        if number in skipped:
            return None
        if number in raw:
            return bytes([raw[number]])
        if number in added:
            return str(token).encode()
        if holds_type(decoder, "ByteLevel"):
            return bytes(map(byte_letters().__getitem__, token))
        if holds_type(decoder, "WordPiece"):
            return token[2:].encode() if token.startswith("##") else f" {token}".encode()
        if holds_type(decoder, "Metaspace") or holds_type(decoder, "Replace"):
            return token.replace(_BAR, " ").encode()
        return tokenizer.token_text(number).encode()

    return [written(number) for number in numbers]


@dataclass(frozen=True)
class Translation:
    """How a draft reads a target's ids, and which target ids its own ids mean.

    `rounds` has pairs of index tensors, ids of draft and target with the same text; no target id twice in one round.
    """

    reads: Sequence[tuple[int, ...]]  # for each id of the target, the draft's ids that are read instead, at least one
    begin: tuple[int, ...]  # the draft's ids at the beginning of every text
    opens: tuple[int, ...]  # the target's ids there, which the draft replaces by its own
    rounds: Sequence[tuple[Tensor, Tensor]]
    vocab_size: int

    @classmethod
    def between(
        cls, target: Tokenizer, draft: Tokenizer, sizes: tuple[int, int], ends: tuple[Sequence[int], Sequence[int]]
    ) -> Translation:
        """Compare two vocabularies; a `VocabularyMismatchError` if they share next to nothing."""
        theirs, ours = surfaces(target)[: sizes[0]], surfaces(draft)[: sizes[1]]
        meaning = first_ids(theirs, target)  # of several ids with the same text, the one that the tokenizer writes
        pairs = {own: meaning[text] for own, text in enumerate(ours) if text and text in meaning}
        pairs |= _special_pairs(target, draft, ends)
        if (shared := len(set(pairs.values()))) < _LEAST_SHARED:
            raise VocabularyMismatchError(
                f"the tokenizers {target.name!r} and {draft.name!r} share {shared} tokens, too few to draft with; use "
                "a draft with a tokenizer that is nearer to the target's"
            )
        spelled = first_ids(ours, draft)
        spelling = GreedyRetokenizer(spelled, fallback=ends[1][0] if ends[1] else 0)
        reads = [spelling.of(text) for text in theirs]
        for own, meant in sorted(pairs.items(), reverse=True):  # of several the lowest; only for ids without text
            if theirs[meant] is None:
                reads[meant] = (own,)
        begin, opens = _begin(draft), _begin(target)
        if begin and opens:
            reads[opens[0]] = begin
        return cls(reads, begin, opens, _rounds(pairs), sizes[0])

    @property
    def shared(self) -> float:
        """The fraction of the target's ids that the draft can propose."""
        return len(self.rounds[0][1]) / self.vocab_size

    def logits(self, own: Tensor) -> Tensor:
        """Convert the draft's logits `[rows, ids]` to the target's ids `[rows, vocab_size]`, in float32.

        Their softmax is the draft's distribution restricted to the shared ids and renormalised; the probabilities of
        several ids with the same text are summed. Ids that the draft cannot write have -inf.
        """
        whole = own.float()
        mapped = whole.new_full((len(own), self.vocab_size), -torch.inf)
        for number, (mine, theirs) in enumerate(self.rounds):
            given = whole.index_select(1, mine.to(own.device))
            places = theirs.to(own.device)
            mapped[:, places] = given if number == 0 else torch.logaddexp(mapped[:, places], given)
        return mapped


class GreedyRetokenizer:
    """Writes bytes in a draft's ids, the longest token first; a byte without any id is dropped."""

    def __init__(self, ids: Mapping[bytes, int], fallback: int) -> None:
        self._ids = ids
        self._longest = max(map(len, ids), default=1)
        self._fallback = (fallback,)

    def of(self, text: bytes | None) -> tuple[int, ...]:
        """The ids of a text, at least one; the fallback id for a text without any."""
        found: list[int] = []
        place = 0
        while text is not None and place < len(text):
            for end in range(min(len(text), place + self._longest), place, -1):
                known = self._ids.get(text[place:end])
                if known is not None:
                    found.append(known)
                    place = end
                    break
            else:
                place += 1
        return tuple(found) or self._fallback


def first_ids(written: Sequence[bytes | None], tokenizer: Tokenizer) -> dict[bytes, int]:
    """By text the lowest of its ids; raw bytes last, because tokenizers write them only if they must."""
    raw = tokenizer.byte_values
    order = sorted((number for number, text in enumerate(written) if text), key=lambda number: (number in raw, number))
    found: dict[bytes, int] = {}
    for number in order:
        found.setdefault(written[number] or b"", number)
    return found


def _begin(tokenizer: Tokenizer) -> tuple[int, ...]:
    pairs = zip(tokenizer.encode(""), tokenizer.encode("a"), strict=False)
    return tuple(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _special_pairs(target: Tokenizer, draft: Tokenizer, ends: tuple[Sequence[int], Sequence[int]]) -> dict[int, int]:
    names = {target.token_text(number): number for number in target.backend.added_tokens_decoder}
    own = {number: draft.token_text(number) for number in draft.skipped_ids & set(draft.backend.added_tokens_decoder)}
    pairs = {number: names[name] for number, name in own.items() if names.get(name) in target.skipped_ids}
    for kind in ("bos_token_id", "unk_token_id"):
        theirs, ours = getattr(target.backend, kind, None), getattr(draft.backend, kind, None)
        if theirs is not None and ours is not None:
            pairs.setdefault(ours, theirs)
    if ends[0]:
        pairs |= {number: ends[0][0] for number in ends[1] if pairs.get(number) not in ends[0]}
    return pairs


def _rounds(pairs: Mapping[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Worked example: of {3: 7, 4: 8, 9: 7} the first round pairs 3, 4 with 7, 8 and the second 9 with 7."""
    rounds: list[dict[int, int]] = []
    for own, meant in sorted(pairs.items()):
        free = next((each for each in rounds if meant not in each), None)
        if free is None:
            rounds.append(free := {})
        free[meant] = own
    return [(torch.tensor(list(each.values())), torch.tensor(list(each))) for each in rounds]


class Encoding:
    """Encodes parts of texts in one tokenizer's ids; `fallback` is an id for bytes without any token.

    `surfaces` has by id the bytes that it writes inside a text, `pads` is whether a text begins with an added space.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, fallback: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self.surfaces = surfaces(tokenizer)[:size]
        self._retokenizer = GreedyRetokenizer(first_ids(self.surfaces, tokenizer), fallback)
        self.pads = self.text_of([number for number in tokenizer.plain_ids("a") if number < size])[:1] == b" "

    def ids_after(self, known: bytes, text: bytes) -> list[int]:
        """Encode a text after the end of another, `known`; if that is empty, with the tokenizer's own space.

        If `known` ends in whole characters, so must the text. Worked example: with tokens "ab", " c" and "d", after
        "ab" the text " cd" is " c", "d"; after "a" the text "b c" is spelled: no token of "ab c" begins after "a".
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
    """One text in a target's ids, encoded in a draft's ids while it grows; the last `ids` change when more follows."""

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
        self._ends = [*self._ends[:keep], *(start + end for end in itertools.accumulate(lengths))]
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
