"""What requests wrote, kept for those that come: an index for each namespace, within one bound, and a file.

Finished texts are taken in by a thread of their own, a piece at a time, so that no step waits for more than a piece. It
ends when nothing is left, and the process waits for it.
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
_LEAST_TEXT = 8  # tokens; what is shorter says nothing that the text itself would not
_TOKENS_A_TEXT = 64  # of the bound, for each text that is known by its digest


class SuffixStore:
    """Texts of all requests, by namespace.

    Args:
        most: tokens that are kept, of all namespaces together.
        file: where texts are kept between runs; None forgets them.
    """

    def __init__(self, most: int, file: SuffixFile | None = None) -> None:
        self._most = most
        self._file = file
        self._lock = threading.Lock()
        self._indexes: OrderedDict[Hashable, SuffixIndex] = OrderedDict()  # the one used last stands last
        self._known: OrderedDict[tuple[Hashable, bytes], int] = OrderedDict()  # where a text was stored
        self._waiting: deque[tuple[Hashable, Ids]] = deque()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None  # while texts are taken in
        if file is not None:
            for scope, text in file.read():
                self._take_in(scope, text)

    @property
    def n_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(index.n_bytes for index in list(self._indexes.values()))

    def __len__(self) -> int:
        """Tokens that are kept."""
        return sum(map(len, list(self._indexes.values())))

    def find(self, scope: Hashable, tokens: Sequence[int], depth: int) -> Matches:
        """Where the ending of a text occurred in its namespace; see `SuffixIndex.find`."""
        with self._lock:
            index = self._indexes.get(scope)
            return NO_MATCHES if index is None else index.find(tokens, depth)

    def add(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Take in a text, soon."""
        if len(tokens) < _LEAST_TEXT:
            return
        with self._starting:
            self._waiting.append((scope, np.array(tokens, dtype=np.int32)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._take_in_all)
                self._thread.start()

    def settle(self) -> None:
        """Wait until all that was added is taken in, and in the file."""
        if (thread := self._thread) is not None:
            thread.join()

    def _take_in_all(self) -> None:
        """What the store's thread does."""
        while True:
            with self._starting:
                if not self._waiting:
                    self._thread = None
                    return
                scope, text = self._waiting.popleft()
            self.take_in(scope, text)

    def take_in(self, scope: Hashable, text: Ids) -> None:
        """Store a text now, and in the file; what other processes wrote there is read, too."""
        if not self._take_in(scope, text) or self._file is None:
            return
        for other, theirs in self._file.append(scope, text):
            self._take_in(other, theirs)

    def _take_in(self, scope: Hashable, text: Ids) -> bool:
        """Store a text, unless it is there already and will be for some time."""
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
        """That of a namespace; others that nobody used for long go where there is no room for it to grow."""
        index = self._indexes.get(scope)
        if index is None:
            index = self._indexes[scope] = SuffixIndex(self._most)
        self._indexes.move_to_end(scope)
        wanted = index.size
        while wanted < min(index.written + coming + 1, index.most):
            wanted *= 2
        while sum(each.size for each in self._indexes.values()) - index.size + wanted > self._most:
            oldest = next(iter(self._indexes))
            if oldest == scope:
                break
            del self._indexes[oldest]
            self._known = OrderedDict((key, place) for key, place in self._known.items() if key[0] != oldest)
        return index
