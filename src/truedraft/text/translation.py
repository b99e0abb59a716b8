"""Translation between two vocabularies: which ids of a draft write what an id of the target writes.

Ids are compared by the bytes that they write inside a text, because tokenizers spell tokens differently: byte-level
ones spell a space as another letter, SentencePiece as a bar, word pieces drop it and mark tokens without one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from truedraft.errors import VocabularyMismatchError
from truedraft.text.tokenizer import Tokenizer
from truedraft.text.vocabulary import holds_type

_BAR = "\u2581"
_LEAST_SHARED = 64


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
            return bytes(map(_byte_letters().__getitem__, token))
        if holds_type(decoder, "WordPiece"):
            return token[2:].encode() if token.startswith("##") else f" {token}".encode()
        if holds_type(decoder, "Metaspace") or holds_type(decoder, "Replace"):
            return token.replace(_BAR, " ").encode()
        return tokenizer.token_text(number).encode()

    return [written(number) for number in numbers]


@cache
def _byte_letters() -> Mapping[str, int]:
    """By letter of byte-level tokenizers its byte: printable bytes are themselves, others are letters beyond 255."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


@dataclass(frozen=True)
class Translation:
    """How a draft reads a target's ids, and which target ids its own ids mean.

    Attributes:
        reads: for each id of the target, the draft's ids that are read instead, at least one.
        begin: the draft's ids at the beginning of every text.
        opens: the target's ids there, which the draft replaces by its own.
        rounds: pairs of index tensors, ids of draft and target with the same text; no target id twice in one round.
    """

    reads: Sequence[tuple[int, ...]]
    begin: tuple[int, ...]
    opens: tuple[int, ...]
    rounds: Sequence[tuple[Tensor, Tensor]]
    vocab_size: int

    @classmethod
    def between(
        cls, target: Tokenizer, draft: Tokenizer, sizes: tuple[int, int], ends: tuple[Sequence[int], Sequence[int]]
    ) -> Translation:
        """Compare two vocabularies.

        Raises:
            VocabularyMismatchError: they share next to nothing.
        """
        theirs, ours = surfaces(target)[: sizes[0]], surfaces(draft)[: sizes[1]]
        meaning = first_ids(theirs, target)  # of several ids with the same text, the one that the tokenizer writes
        pairs = {own: meaning[text] for own, text in enumerate(ours) if text and text in meaning}
        pairs |= _special_pairs(target, draft, ends)
        if (shared := len(set(pairs.values()))) < _LEAST_SHARED:
            raise VocabularyMismatchError(
                f"the tokenizers {target.name!r} and {draft.name!r} share {shared} tokens, too few to draft with; use "
                "a draft whose tokenizer is nearer to the target's"
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
    """The ids at the beginning of every text; some tokenizers have others at its end."""
    pairs = zip(tokenizer.encode(""), tokenizer.encode("a"), strict=False)
    return tuple(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _special_pairs(target: Tokenizer, draft: Tokenizer, ends: tuple[Sequence[int], Sequence[int]]) -> dict[int, int]:
    """Pairs of ids without text: those with the same name, and those that end an answer."""
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
