"""Connections of a listening server: the time limit for sending a request, and the number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from truedraft.errors import OptionError

BACKLOG = 16
"""Connections accepted in one turn of the event loop."""

_RESERVED = 6 * BACKLOG
"""File descriptors reserved for connections accepted before others are closed, and for files."""
_LEAST, _MOST = 8, 65_536
_LOG_EVERY_S = 1.0

_log = logging.getLogger("truedraft.server")


def most_connections(asked: int | None) -> int:
    """The limit of open connections: the requested one, or what the limit of open files leaves.

    Raises:
        OptionError: the limit of open files is too low.
    """
    limit = _descriptors()
    left = limit - _used_descriptors() - _RESERVED
    if left < (asked or _LEAST):
        ways = "ask for fewer" if asked else "raise it"
        raise OptionError(
            f"the limit of {limit} open files leaves {max(left, 0)} connections; {ways} (ulimit -n)",
            field="max_connections",
        )
    return min(left, asked or _MOST)


def _descriptors() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return _MOST
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2 * _MOST if limit == resource.RLIM_INFINITY else limit


def _used_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return sum(1 for _ in Path(folder).iterdir())
    return _RESERVED


class Connections:
    """The connections of one server.

    Above the limit, the oldest connection without a complete request is closed, else the oldest with a client that does
    not read.

    Args:
        most: limit of open connections.
        head_s: time limit for a request's head, from the connection or the end of the last answer.
    """

    def __init__(self, most: int, head_s: float) -> None:
        self.head_s = head_s
        self._most = most
        self._open: dict[Connection, None] = {}  # the oldest first
        self._logged_s = -_LOG_EVERY_S
        self._failures = 0  # of accepting, since the last log entry

    def add(self, connection: Connection) -> None:
        """Add a connection; above the limit another one is closed, or this one."""
        self._open[connection] = None
        if len(self._open) <= self._most:
            return
        if not (self._drop(lambda each: each.asks and each is not connection) or self._drop(lambda each: each.stands)):
            connection.refuse()

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _drop(self, may: Callable[[Connection], bool]) -> bool:
        connection = next((each for each in self._open if may(each)), None)
        if connection is None:
            return False
        self.remove(connection)
        connection.transport.abort()
        return True

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's exception handler; errors of accepting are logged at most once every `_LOG_EVERY_S` seconds."""
        if "socket.accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        self._failures += 1
        if (now := time.monotonic()) >= self._logged_s + _LOG_EVERY_S:
            error = context.get("exception")
            _log.error("no connection could be accepted (%s), %d times since this was told", error, self._failures)
            self._logged_s, self._failures = now, 0


class Connection(H11Protocol):
    """A connection that is closed if its client does not send a request in time."""

    def __init__(self, *, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def asks(self) -> bool:
        """Whether no complete request has arrived."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def stands(self) -> bool:
        """Whether its client does not read what is sent."""
        return self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.remove(self)
        self._forget_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_deadline()  # the head is complete

    def on_response_complete(self) -> None:
        self._watch()
        super().on_response_complete()  # may start the next request

    def _watch(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(self._all.head_s, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def refuse(self) -> None:
        self._all.remove(self)
        message = b'{"error": {"message": "this server has too many open connections; ask again in 1 s"}}'
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        self.transport.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(message) + message)
        self.transport.close()
