"""Accepted `Host` headers: protects a local server from pages with a host name of their own (DNS rebinding).

Such a page, loaded from http://evil.example:8000, lets its name point to 127.0.0.1 afterwards. For the browser that is
still the page's own server, with responses that the page may read; only the `Host` header shows the difference.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

from truedraft.errors import OptionError
from truedraft.server.errors import ApiError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\\\s]+))(?::[0-9]*)?")
_ANY = "*"
_SHOWN = 80  # characters of a name that errors show


class Hosts:
    """The names that requests may have in their `Host` header, with any port.

    A server that listens only on loopback accepts loopback's names, the name in `host` and the allowed ones. Any other
    server accepts all names, unless some are allowed.

    Args:
        host: the address that is listened on.
        allowed: further names; "*" is any.

    Raises:
        OptionError: one is not a host name.
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._names: set[str] | None = None  # any
        if _ANY not in allowed and (allowed or _on_loopback(host)):
            self._names = {_plain(host) or host, *map(_allowed, allowed)}

    def check(self, given: Sequence[str]) -> None:
        """Refuse a request with another name, no name or several.

        Raises:
            ApiError: the request is refused.
        """
        if self._names is None:
            return
        if len(given) != 1 or not given[0]:
            raise ApiError(400, f"the request must have one Host header with a name, got {', '.join(given)[:_SHOWN]!r}")
        name = _plain(given[0])
        if name is None or not (name in self._names or _is_loopback(name)):
            shown = (name or given[0])[:_SHOWN]
            raise ApiError(
                421,
                f"this server is not asked by the name {shown!r}, which keeps out pages that let their name point here "
                f"(DNS rebinding); ask localhost, or start it with --allowed-host {shown}",
                code="host_not_allowed",
            )


def _allowed(name: str) -> str:
    found = _plain(name)
    if found is None:
        raise OptionError(f"is no name of a host: {name!r}; give one such as chat.example.com", field="allowed_host")
    return found


def _plain(name: str) -> str | None:
    """A name without its port, in canonical form; None if it is not a name."""
    try:
        return str(ip_address(name))  # IPv6 without brackets
    except ValueError:
        found = _HOST.fullmatch(name.strip())
    if found is None:
        return None
    name = (found[1] or found[2]).lower().removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return None if found[1] else name


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):  # which cannot be registered
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _on_loopback(host: str) -> bool:
    """Whether the address can be reached only from this machine."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # cannot be listened on; `serve` reports it
        return True
    return _is_loopback(address.partition("%")[0])
