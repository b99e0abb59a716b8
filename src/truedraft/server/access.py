"""API keys, accepted `Host` headers, and limits of bodies.

Checking `Host` protects a local server from DNS rebinding: a page from http://evil.example:8000 lets its name point to
127.0.0.1 later, and may then read the server's responses as its own; only the `Host` header shows the difference.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truedraft.errors import OptionError
from truedraft.options import read_bytes
from truedraft.server.errors import ApiError

if TYPE_CHECKING:
    from truedraft.server.front import Front

_HASHED, _HEX_DIGEST = "sha256:", re.compile("[0-9A-Fa-f]{64}")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\\\s]+))(?::[0-9]*)?")
_OPEN = ("/", "/health", "/ready", "/metrics", "/openapi.json", "/docs", "/favicon.ico")
"""Paths without a key: they reveal nothing of requests."""
_SHOWN = 80  # characters of a header that errors show
_DIGITS = 20  # of a Content-Length; longer numbers are above any limit


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request; `name` is for logs and metrics, and never the key."""

    name: str


ANYONE = Client("anyone")
"""The client of all requests if no keys are set."""


class ApiKeys:
    """The accepted keys: clients by the SHA-256 of their key, 32 bytes; empty accepts any request."""

    def __init__(self, clients: dict[bytes, Client]) -> None:
        self._clients = clients

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file of lines `NAME KEY` or `KEY`, where KEY may be `sha256:` and 64 hex digits; # begins comments."""
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
            name, key = words[0] if len(words) == 2 else f"key-{number}", words[-1]
            digest = hashlib.sha256(key.encode()).digest()
            if key.startswith(_HASHED):
                if not _HEX_DIGEST.fullmatch(key.removeprefix(_HASHED)):
                    raise OptionError(f"has a hash in line {number} that is not 64 hex digits", field="api_key_file")
                digest = bytes.fromhex(key.removeprefix(_HASHED))
            clients[digest] = Client(name)
        if not clients:
            raise OptionError(f"holds no key: {str(path)!r}; write one NAME KEY a line", field="api_key_file")
        return cls(clients)

    def client(self, authorization: str | None) -> Client:
        """The client of a request, or an `ApiError`; keys are compared in constant time, which reveals nothing."""
        if not self._clients:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "no API key was given; send the header Authorization: Bearer KEY")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = [client for known, client in self._clients.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise ApiError(401, "the API key is not known here; check it, or contact who runs this server")
        return found[0]


class Hosts:
    """The names that requests may have in their `Host` header, with any port.

    A server that listens only on loopback accepts loopback's names, `host` and the allowed ones. Any other server
    accepts all names, unless some are allowed; "*" is any.
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._names: set[str] | None = None  # any
        if "*" in allowed or not (allowed or _on_loopback(host)):
            return
        self._names = {_plain(host) or host}
        for name in allowed:
            if (plain := _plain(name)) is None:
                message = f"is no name of a host: {name!r}; give one such as chat.example.com"
                raise OptionError(message, field="allowed_host")
            self._names.add(plain)

    def check(self, given: Sequence[str]) -> None:
        """Refuse a request with another name, no name or several, by an `ApiError`."""
        if self._names is None:
            return
        if len(given) != 1 or not given[0]:
            raise ApiError(400, f"the request must have one Host header with a name, got {', '.join(given)[:_SHOWN]!r}")
        name = _plain(given[0])
        if name is None or not (name in self._names or _is_loopback(name)):
            shown = (name or given[0])[:_SHOWN]
            raise ApiError(
                421,
                f"this server does not accept the name {shown!r}, which keeps out pages that let their name point here "
                f"(DNS rebinding); use localhost, or start it with --allowed-host {shown}",
                code="host_not_allowed",
            )


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _plain(name: str) -> str | None:
    """A name without its port, in canonical form; None if it is not a name."""
    if (address := _address(name)) is not None:  # IPv6 without brackets
        return str(address)
    if (found := _HOST.fullmatch(name.strip())) is None:
        return None
    name = (found[1] or found[2]).lower().removesuffix(".")
    address = _address(name)
    return str(address) if address is not None else None if found[1] else name


def _is_loopback(name: str) -> bool:
    if (address := _address(name)) is None:
        return name == "localhost" or name.endswith(".localhost")  # which cannot be registered
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _on_loopback(host: str) -> bool:
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # cannot be listened on; `serve` reports it
        return True
    return _is_loopback(address.partition("%")[0])


class Gate:
    """Checks the API key, the `Host` header and the size of the body, and logs every request."""

    def __init__(self, app: ASGIApp, front: Front, keys: ApiKeys, hosts: Hosts) -> None:
        self._app, self._front, self._keys, self._hosts = app, front, keys, hosts
        self._most = read_bytes("max_body_bytes", front.options.max_body_bytes)
        self._body_s = front.options.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        http = HttpRequest(scope, receive)
        http.state.began, http.state.body_bytes, http.state.client = time.perf_counter(), 0, ANYONE
        http.state.reserved = http.state.answering = None
        status = 499  # if the client disconnects before anything is sent

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._hosts.check(http.headers.getlist("host"))
            if scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
                key = http.headers.get("x-api-key")  # Anthropic's header
                bearer = None if key is None else f"Bearer {key}"
                http.state.client = self._keys.client(http.headers.get("authorization") or bearer)
            length = http.headers.get("content-length", "0")
            if not (length.isascii() and length.isdecimal()):
                raise ApiError(400, f"Content-Length is no number of bytes: {length[:_SHOWN]!r}")
            self._check_length(int(length[:_DIGITS]))
            await self._app(scope, self._counting(http, receive), noting)
        except (ApiError, HTTPException) as error:
            await ApiError.of(error).response(scope["path"])(scope, receive, noting)
        finally:
            self._front.release(http)
            if scope["path"] not in _OPEN:
                self._front.log(http, status)

    def _check_length(self, length: int) -> None:
        if length > self._most:  # an exception type that FastAPI does not catch when it reads bodies
            raise HTTPException(413, f"the body has {length} bytes, of at most {self._most}")

    def _counting(self, http: HttpRequest, receive: Receive) -> Receive:
        """Limit the size and the time of a body; it may arrive slowly and without a Content-Length."""
        deadline: float | None = asyncio.get_running_loop().time() + self._body_s

        async def counted() -> Message:
            nonlocal deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                what = f"the body did not come within {self._body_s:g} s; send it faster, or a shorter one"
                raise HTTPException(408, what, {"Connection": "close"}) from None
            if not message.get("more_body", False):
                deadline = None
            if message["type"] == "http.request":
                http.state.body_bytes += len(message.get("body", b""))
                self._check_length(http.state.body_bytes)
            return message

        return counted
