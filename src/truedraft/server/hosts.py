"""By which names a server may be asked: a page must not reach one on this machine by a name of its own (DNS rebinding).

Such a page, loaded from http://evil.example:8000, lets its name point to 127.0.0.1 afterwards. For the browser that is
still the page's own server, which it may ask and read; only the `Host` header tells.
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
_SHOWN = 80  # characters of a name that are told back


class Hosts:
    """The names that requests may give in their `Host` header, with any port.

    A server that listens on loopback alone is asked by loopback's names, by the one it was told to listen on, and by
    those that are allowed. One that listens elsewhere is asked by any name, unless some are allowed.

    Args:
        host: that is listened on.
        allowed: further names; "*" is any.

    Raises:
        OptionError: one is no name.
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._names: set[str] | None = None  # any
        if _ANY not in allowed and (allowed or _on_loopback(host)):
            self._names = {_plain(host) or host, *map(_allowed, allowed)}

    def check(self, given: Sequence[str]) -> None:
        """Refuse a request.

        Args:
            given: its `Host` headers.

        Raises:
            ApiError: it has another name, none, or several.
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
    """A name without its port, as all that mean the same are written; None where it is none."""
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
    if name == "localhost" or name.endswith(".localhost"):  # which nobody can register
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _on_loopback(host: str) -> bool:
    """Whether who listens there is reached from this machine alone."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # nobody can listen there, as `serve` says
        return True
    return _is_loopback(address.partition("%")[0])
