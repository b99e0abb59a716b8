"""N-gram tables: how often which token followed which, on disk and memory-mapped, read by any number of processes.

An n-gram is a node of a trie: level 1 holds the tokens of the vocabulary, and the children of a node at level k are the
n-grams of k + 1 tokens that begin with it, sorted by their last token. A node stores the probability of its last token
after the ones before it, and, as a context, the share that it leaves to the shorter context (Katz's form of an
interpolated model, as in ARPA files):

    P(w | h) = probs[h w]                       where h w is in the table,
    P(w | h) = backoff[h] * P(w | h without its first token)   elsewhere.

The file is a header (magic, version, JSON), then arrays, each at a multiple of 64 bytes and with a checksum.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from truedraft.drafters.registry import TABLE
from truedraft.errors import ModelError
from truedraft.files import user_path, written_whole

VERSION = 1
MOST_ORDER = 8
"""Longest n-grams of a table."""

_MAGIC = b"tdngram\0"
_PREFIX = struct.Struct("<8sIII")  # magic, version, bytes of the header, its checksum
_ALIGNED = 64
_AGAIN = "count it again with truedraft train ngram"


@dataclass(frozen=True, slots=True)
class Level:
    """The n-grams of one length k, sorted by their tokens; level 1 has one for each id.

    Attributes:
        probs: `[n-grams]`, float32: of the last token after the ones before it, shorter contexts included.
        tokens: `[n-grams]`, int32: the last tokens; empty at level 1, where they are 0, 1, 2, ...
        first: `[n-grams one shorter + 1]`, int64: start of the n-grams that begin with each of those; empty at level 1.
        backoff: `[n-grams]`, float32: as contexts, the share left to the shorter one; empty at the last level.
        best: `[n-grams]`, int32: the likeliest next token, with its `best_probs`; empty at the last level.
    """

    probs: NDArray[np.float32]
    tokens: NDArray[np.int32]
    first: NDArray[np.int64]
    backoff: NDArray[np.float32]
    best: NDArray[np.int32]
    best_probs: NDArray[np.float32]


_FIELDS: Mapping[str, str] = {
    "probs": "<f4",
    "tokens": "<i4",
    "first": "<i8",
    "backoff": "<f4",
    "best": "<i4",
    "best_probs": "<f4",
}


def table_bytes(ngrams: Sequence[int]) -> int:
    """Bytes of the arrays of a table with `ngrams` n-grams of 1, 2, ... tokens; the first is the number of ids."""
    child, context = 4 + 4, 4 + 4 + 4 + 8  # probs and tokens; backoff, best, its probability, and where children start
    longest = len(ngrams) - 1
    return sum(number * (child + context * (length < longest)) for length, number in enumerate(ngrams))


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Metadata of a table: its tokenizer's fingerprint, or "", and the minimum count of n-grams of three or more."""

    vocab_size: int
    tokenizer: str = ""
    counted_tokens: int = 0
    min_count: int = 1


class NgramTable:
    """A table from n-grams of 1, 2, ... tokens; `name` is for messages."""

    def __init__(self, facts: TableFacts, levels: Sequence[Level], name: str = "table") -> None:
        self.facts = facts
        self.levels = tuple(levels)
        self.name = name
        self._unigrams = self.levels[0].probs
        top = int(np.argmax(self._unigrams))
        self._top = top, float(self._unigrams[top])
        self._ranked = np.argsort(-self._unigrams, kind="stable").astype(np.int32)
        # Reading a number of a memoryview takes a third of the time of an array's, and a chain reads dozens.
        self._tokens = [level.tokens.data for level in self.levels]
        self._first = [level.first.data for level in self.levels]
        self._best = [level.best.data for level in self.levels]
        self._best_probs = [level.best_probs.data for level in self.levels]

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def ngrams(self) -> tuple[int, ...]:
        return (int(np.count_nonzero(self._unigrams)), *(len(level.tokens) for level in self.levels[1:]))

    def probs(self, context: Sequence[int]) -> NDArray[np.float32]:
        """The distribution `[vocab]` of the token after a context's last `order - 1` tokens."""
        found = self._unigrams.copy()
        for length, node in enumerate(self._nodes(context), start=1):
            level, first = self.levels[length], self._first[length]
            start, end = first[node], first[node + 1]
            found *= self.levels[length - 1].backoff[node]
            found[level.tokens[start:end]] = level.probs[start:end]
        return found

    def best(self, context: Sequence[int]) -> tuple[int, float]:
        nodes = self._nodes(context)
        if not nodes:
            return self._top
        length = len(nodes) - 1
        return self._best[length][nodes[-1]], self._best_probs[length][nodes[-1]]

    def likeliest(self, context: Sequence[int], count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens after a context, with their probabilities, descending.

        A token's probability comes from the longest context that has it, and is smaller from shorter ones with backoff.
        So the likeliest tokens are among the likeliest of each context, and no full distribution is computed.
        """
        ranked = self._ranked[:count]
        pieces = [(ranked, self._unigrams[ranked])]
        for length, node in enumerate(self._nodes(context), start=1):
            level, first = self.levels[length], self._first[length]
            start, end = first[node], first[node + 1]
            tokens, probs = level.tokens[start:end], level.probs[start:end]
            if end - start > count:
                largest = np.argpartition(probs, -count)[-count:]
                tokens, probs = tokens[largest], probs[largest]
            backoff = self.levels[length - 1].backoff[node]
            pieces = [(own, backoff * shares) for own, shares in pieces]
            pieces.append((tokens, probs))
        best: dict[int, float] = {}
        for tokens, probs in pieces:  # longer contexts come last and stay
            best.update(zip(tokens.tolist(), probs.tolist(), strict=True))
        return nsmallest(count, best.items(), key=lambda each: (-each[1], each[0]))

    def _nodes(self, context: Sequence[int]) -> list[int]:
        """The last token, the last two, ... as nodes of level 1, 2, ..., as far as known."""
        found: list[int] = []
        for length in range(1, min(self.order - 1, len(context)) + 1):
            node = self._find(context[len(context) - length :])
            if node is None:
                break  # a longer context of an unknown one is unknown too
            found.append(node)
        return found

    def _find(self, ngram: Sequence[int]) -> int | None:
        node = ngram[0]
        if not 0 <= node < self.facts.vocab_size:
            return None
        for length in range(1, len(ngram)):
            tokens, first, token = self._tokens[length], self._first[length], ngram[length]
            end = first[node + 1]
            node = bisect_left(tokens, token, first[node], end)
            if node == end or tokens[node] != token:
                return None
        return node

    @classmethod
    def open(cls, path: str | Path) -> NgramTable:
        """Map a table, a file or the folder of a training, into memory, after verifying all checksums.

        Raises `ModelError` if it is missing, damaged, or of another version.
        """
        file = user_path(path, ModelError)
        file = file / TABLE if file.is_dir() else file
        try:
            with file.open("rb") as opened:
                content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            _refuse(file, "is empty", _AGAIN)
        except OSError as error:
            raise ModelError(
                f"cannot read the n-gram table {str(path)!r} ({error.strerror or error}); name a file "
                "or folder that truedraft train ngram wrote"
            ) from error
        header, start = _header(file, content)
        facts = TableFacts(**header["facts"])
        return cls(facts, _levels(file, content, header["levels"], start), str(file))

    def write(self, path: Path) -> None:
        """Write the table atomically; mappings of an old file stay valid. Raises `OSError` if it cannot be written."""
        place, parts = 0, []
        listed: list[dict[str, Any]] = []
        for level in self.levels:
            listed.append({})
            for name, dtype in _FIELDS.items():
                content = np.ascontiguousarray(getattr(level, name), dtype=dtype)
                listed[-1][name] = {"start": place, "length": len(content), "crc32": zlib.crc32(content.data)}
                parts.append(content.tobytes() + bytes(-content.nbytes % _ALIGNED))
                place += len(parts[-1])
        facts = {name: getattr(self.facts, name) for name in TableFacts.__slots__}
        header = json.dumps({"facts": facts, "levels": listed, "bytes": place}).encode()
        prefix = _PREFIX.pack(_MAGIC, VERSION, len(header), zlib.crc32(header))
        filling = bytes(-(len(prefix) + len(header)) % _ALIGNED)
        with written_whole(path) as made:
            for part in (prefix, header, filling, *parts):
                made.write(part)


def _header(file: Path, content: mmap.mmap) -> tuple[dict[str, Any], int]:
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        _refuse(file, "begins as no n-gram table does", "name a file or folder that truedraft train ngram wrote")
    if len(content) < _PREFIX.size:
        _refuse(file, f"is cut off after {len(content)} bytes", f"copy it again, or {_AGAIN}")
    _, version, length, checksum = _PREFIX.unpack_from(content)
    if version != VERSION:
        _refuse(file, f"is of version {version}, and this truedraft reads version {VERSION}", _AGAIN)
    text = content[_PREFIX.size : _PREFIX.size + length]
    if len(text) == length and zlib.crc32(text) != checksum:
        _refuse(file, "is damaged: the checksum of its header differs", f"copy it again, or {_AGAIN}")
    header: dict[str, Any] = json.loads(text) if len(text) == length else {}
    start = -(-(_PREFIX.size + length) // _ALIGNED) * _ALIGNED
    if not header or len(content) < start + header["bytes"]:
        whole = f" of {start + header['bytes']:,}" if header else ""
        _refuse(file, f"is cut off after {len(content):,}{whole} bytes", f"copy it again, or {_AGAIN}")
    return header, start


def _levels(file: Path, content: mmap.mmap, listed: Sequence[Mapping[str, Any]], start: int) -> list[Level]:
    levels = []
    for number, about in enumerate(listed, start=1):
        arrays = {}
        for name, dtype in _FIELDS.items():
            own = about[name]
            arrays[name] = np.frombuffer(content, dtype, own["length"], start + own["start"])
            if zlib.crc32(arrays[name].data) != own["crc32"]:
                _refuse(
                    file,
                    f"is damaged: the checksum of {name} of its n-grams of {number} differs",
                    f"copy it again, or {_AGAIN}",
                )
        levels.append(Level(**arrays))
    return levels


def _refuse(file: Path, what: str, remedy: str) -> NoReturn:
    raise ModelError(f"the n-gram table {str(file)!r} {what}; {remedy}")
