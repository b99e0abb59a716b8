"""API keys, stored as hashes, and the clients they belong to."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from truedraft.errors import OptionError
from truedraft.server.errors import ApiError

_HASHED = "sha256:"


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request.

    Attributes:
        name: for logs and metrics; never the key.
    """

    name: str


ANYONE = Client("anyone")
"""The client of all requests if no keys are set."""


class ApiKeys:
    """The accepted keys.

    Args:
        clients: by the SHA-256 of their key, 32 bytes; empty accepts any request.
    """

    def __init__(self, clients: dict[bytes, Client]) -> None:
        self._clients = clients

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file with one client per line: `NAME KEY` or only `KEY`, where KEY may be `sha256:` and 64 hex digits.

        Empty lines and those that begin with # are skipped.

        Raises:
            OptionError: the file cannot be read, or a line is malformed.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot be read ({error}): {str(path)!r}", field="api_key_file") from error
        clients: dict[bytes, Client] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise OptionError(f"has {len(words)} words in line {number}; write NAME KEY", field="api_key_file")
            name = words[0] if len(words) == 2 else f"key-{number}"
            clients[_digest_in_file(words[-1], number)] = Client(name)
        if not clients:
            raise OptionError(f"holds no key: {str(path)!r}; write one NAME KEY a line", field="api_key_file")
        return cls(clients)

    def client(self, authorization: str | None) -> Client:
        """The client of a request, by its `Authorization` header.

        All hashes are compared in constant time, so that the duration reveals nothing about a key.

        Raises:
            ApiError: the key is missing or unknown.
        """
        if not self._clients:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "no API key was given; send the header Authorization: Bearer KEY")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = [client for known, client in self._clients.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise ApiError(401, "the API key is not known here; check it, or ask who runs this server")
        return found[0]


def _digest_in_file(word: str, number: int) -> bytes:
    if not word.startswith(_HASHED):
        return hashlib.sha256(word.encode()).digest()
    try:
        digest = bytes.fromhex(word.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise OptionError(f"has a hash in line {number} that is not 64 hex digits", field="api_key_file")
    return digest
