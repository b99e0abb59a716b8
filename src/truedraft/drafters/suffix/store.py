"""Texts of finished requests, kept for later ones: an index per scope, within one limit, and a file.

A thread stores finished texts in small pieces, so that no step waits long. It ends when nothing is left.

The file is a header line, then one record with a checksum per text. Several processes may use it: each appends under a
lock, and reads what others appended before. Of a truncated file the rest after the last whole record is moved aside.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from truedraft.drafters.suffix.index import NO_MATCHES, Ids, Matches, SuffixIndex
from truedraft.errors import OptionError
from truedraft.files import written_whole

_log = logging.getLogger(__name__)

_PIECE = 1024
_LEAST_TEXT = 8  # tokens; shorter texts have no additional information
_TOKENS_A_TEXT = 64  # tokens of the limit per remembered digest
_KIND, _VERSION = "truedraft suffix cache", 1
_RECORD = struct.Struct("<III")  # bytes of the namespace's name, tokens, checksum of both
_NO_NAME = 0xFFFFFFFF
_LOCK_S = 10.0
_MOST_NAME, _MOST_TOKENS = 1 << 16, 1 << 26
Text = tuple[Hashable, Ids]


class SuffixStore:
    """Texts of all requests, by scope: at most `most` tokens in all, kept between runs if there is a file."""

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
        """Store a text, also in the file, and read what other processes appended."""
        if not self._take_in(scope, text) or self._file is None:
            return
        for other, theirs in self._file.append(scope, text):
            self._take_in(other, theirs)

    def _take_in(self, scope: Hashable, text: Ids) -> bool:
        """Unless it is stored and will not be overwritten soon."""
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
        """The index of a scope; drops least recently used ones for room."""
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


class SuffixFile:
    """Texts on disk, in a file that is created if missing; with twice `most` tokens it loses its oldest texts.

    Raises `OptionError` if it is not such a file, has another version or tokenizer, or cannot be read or created.
    """

    def __init__(self, path: Path, tokenizer: str, most: int) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._most = most
        self._read_to = 0
        self._same: tuple[int, int] | None = None  # device and inode of the file that was read
        self._tokens = 0
        self._warned = False
        self._lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=_LOCK_S)

    def read(self) -> list[Text]:
        """All texts, the oldest first. Damaged records are moved aside, with a warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._opened() as file:
                return self._appended(file)
        except (OSError, Timeout) as error:
            raise OptionError(
                f"the suffix cache {str(self.path)!r} cannot be read or made ({_reason(error)}); name another file"
            ) from error

    def append(self, scope: Hashable, text: Ids) -> list[Text]:
        """Append a text; returns those that other processes appended. If writing fails, it is kept in memory only.

        Only scopes that are a string or None are kept.
        """
        if scope is not None and not isinstance(scope, str):
            return []
        try:
            with self._lock, self._opened() as file:
                added = self._appended(file)
                file.seek(self._read_to)
                file.write(_record(scope, text))
                file.flush()
                self._read_to = file.tell()
                self._tokens += len(text)
            if self._tokens > 2 * self._most:
                self._rewrite()
        except (OSError, OptionError, Timeout) as error:
            if not self._warned:
                _log.warning("the suffix cache %s is kept in memory alone: %s", self.path, _reason(error))
            self._warned = True
            return []
        return added

    def _opened(self) -> BinaryIO:
        if not self.path.exists():
            first = json.dumps({"kind": _KIND, "version": _VERSION, "tokenizer": self._tokenizer})
            self.path.write_bytes(first.encode() + b"\n")
        file = self.path.open("r+b")
        try:
            self._begin(file)
        except OptionError:
            file.close()
            raise
        return file

    def _begin(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        same = status.st_dev, status.st_ino
        if same == self._same and status.st_size >= self._read_to:
            return
        line = file.readline(1 << 16)
        try:
            about = json.loads(line)
        except ValueError:
            about = None
        if not isinstance(about, dict) or about.get("kind") != _KIND:
            raise OptionError(f"{str(self.path)!r} is no suffix cache of truedraft's; name another file")
        if about.get("version") != _VERSION:
            raise OptionError(
                f"the suffix cache {str(self.path)!r} is of version {about.get('version')!r}, and this truedraft reads "
                f"version {_VERSION}; name another file"
            )
        if about.get("tokenizer") != self._tokenizer:
            raise OptionError(
                f"the suffix cache {str(self.path)!r} was written for another tokenizer, so its ids mean other text; "
                "name another file"
            )
        self._same, self._read_to, self._tokens = same, file.tell(), 0

    def _appended(self, file: BinaryIO) -> list[Text]:
        """Records after those already read; the file position is then after the last whole one."""
        file.seek(self._read_to)
        added = []
        for text, end in _records(file):
            added.append(text)
            self._read_to = end
            self._tokens += len(text[1])
        file.seek(self._read_to)
        if rest := file.read():
            aside = self.path.with_name(f"{self.path.name}.damaged")
            aside.write_bytes(rest)
            file.truncate(self._read_to)
            _log.warning(
                "the suffix cache %s is damaged behind %d texts; they are read, and the last %d bytes lie in %s",
                self.path, len(added), len(rest), aside,
            )  # fmt: skip
        return added

    def _rewrite(self) -> None:
        with self._lock, self.path.open("rb") as file:
            first = file.readline()
            texts = [text for text, _ in _records(file)]
            kept, tokens = [], 0
            for scope, text in reversed(texts):
                tokens += len(text)
                if tokens > self._most:
                    break
                kept.append(_record(scope, text))
            with written_whole(self.path, private=True) as made:  # it holds users' prompts
                made.write(first + b"".join(reversed(kept)))
            status = self.path.stat()
            self._same, self._read_to = (status.st_dev, status.st_ino), status.st_size
            self._tokens = sum(len(text) for _, text in texts[len(texts) - len(kept) :])


def _record(scope: Hashable, text: Ids) -> bytes:
    name = b"" if scope is None else str(scope).encode()
    body = name + text.astype("<i4").tobytes()
    return _RECORD.pack(_NO_NAME if scope is None else len(name), len(text), zlib.crc32(body)) + body


def _records(file: BinaryIO) -> Iterator[tuple[Text, int]]:
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        name_bytes, tokens, checksum = _RECORD.unpack(head)
        unnamed = name_bytes == _NO_NAME
        name_bytes = 0 if unnamed else name_bytes
        if name_bytes > _MOST_NAME or tokens > _MOST_TOKENS:
            return
        body = file.read(name_bytes + 4 * tokens)
        if len(body) != name_bytes + 4 * tokens or zlib.crc32(body) != checksum:
            return
        name = None if unnamed else body[:name_bytes].decode(errors="replace")
        yield (name, np.frombuffer(body, dtype="<i4", offset=name_bytes).astype(np.int32)), file.tell()


def _reason(error: Exception) -> str:
    if isinstance(error, Timeout):
        return "another process holds its lock"
    return getattr(error, "strerror", None) or str(error)
