"""Texts of finished requests, kept for later ones: an index per scope, within one limit, and a file.

A separate thread stores finished texts in small pieces, so that no step waits for more than one piece. It ends when
nothing is left, and the process waits for it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np

from truedraft.drafters.suffix.file import SuffixFile
from truedraft.drafters.suffix.index import NO_MATCHES, Ids, Matches, SuffixIndex

_PIECE = 1024
_LEAST_TEXT = 8  # tokens; shorter texts have no additional information
_TOKENS_A_TEXT = 64  # tokens of the limit per remembered digest


class SuffixStore:
    """Texts of all requests, by scope.

    Args:
        most: maximum number of tokens, in all scopes together.
        file: keeps texts between runs; None for memory only.
    """

    def __init__(self, most: int, file: SuffixFile | None = None) -> None:
        self._most = most
        self._file = file
        self._lock = threading.Lock()
        self._indexes: OrderedDict[Hashable, SuffixIndex] = OrderedDict()  # least recently used first
        self._known: OrderedDict[tuple[Hashable, bytes], int] = OrderedDict()  # position of a stored text
        self._waiting: deque[tuple[Hashable, Ids]] = deque()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None  # while texts are being stored
        if file is not None:
            for scope, text in file.read():
                self._take_in(scope, text)

    @property
    def n_bytes(self) -> int:
        return sum(index.n_bytes for index in list(self._indexes.values()))

    def __len__(self) -> int:
        return sum(map(len, list(self._indexes.values())))

    def find(self, scope: Hashable, tokens: Sequence[int], depth: int) -> Matches:
        with self._lock:
            index = self._indexes.get(scope)
            return NO_MATCHES if index is None else index.find(tokens, depth)

    def add(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Store a text in the background."""
        if len(tokens) < _LEAST_TEXT:
            return
        with self._starting:
            self._waiting.append((scope, np.array(tokens, dtype=np.int32)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._take_in_all)
                self._thread.start()

    def settle(self) -> None:
        """Wait until all added texts are stored, also in the file."""
        if (thread := self._thread) is not None:
            thread.join()

    def _take_in_all(self) -> None:
        while True:
            with self._starting:
                if not self._waiting:
                    self._thread = None
                    return
                scope, text = self._waiting.popleft()
            self.take_in(scope, text)

    def take_in(self, scope: Hashable, text: Ids) -> None:
        """Store a text now, also in the file, and read what other processes appended."""
        if not self._take_in(scope, text) or self._file is None:
            return
        for other, theirs in self._file.append(scope, text):
            self._take_in(other, theirs)

    def _take_in(self, scope: Hashable, text: Ids) -> bool:
        """Store a text, unless it is stored and will not be overwritten soon."""
        key = scope, hashlib.blake2b(text.tobytes(), digest_size=16).digest()
        with self._lock:
            index = self._index(scope, len(text))
            place = self._known.get(key)
            if place is not None and place >= index.written - index.most // 2:
                self._known.move_to_end(key)
                return False
            self._known[key] = index.written
            self._known.move_to_end(key)
            while len(self._known) > self._most // _TOKENS_A_TEXT + 1:
                self._known.popitem(last=False)
        for start in range(0, len(text), _PIECE):
            with self._lock:
                index.add(text[start : start + _PIECE], ends=start + _PIECE >= len(text))
        return True

    def _index(self, scope: Hashable, coming: int) -> SuffixIndex:
        """The index of a scope; removes least recently used ones if it has no room to grow."""
        index = self._indexes.get(scope)
        if index is None:
            index = self._indexes[scope] = SuffixIndex(self._most)
        self._indexes.move_to_end(scope)
        required = index.size
        while required < min(index.written + coming + 1, index.most):
            required *= 2
        while sum(each.size for each in self._indexes.values()) - index.size + required > self._most:
            oldest = next(iter(self._indexes))
            if oldest == scope:
                break
            del self._indexes[oldest]
            self._known = OrderedDict((key, place) for key, place in self._known.items() if key[0] != oldest)
        return index
