"""Server-sent events for streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truedraft.server.errors import ApiError

_log = logging.getLogger("truedraft.server")
_Value = TypeVar("_Value")
DONE = "data: [DONE]\n\n"
_SILENCE_S = 15.0
_ALIVE = ": still here\n\n"  # a comment, which clients skip; proxies close connections that are silent for long


def event(data: Any, name: str | None = None) -> str:
    """One event; data is any JSON value."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer; with `stream` events, as they come."}
}
"""For the OpenAPI document: responses of endpoints that can stream."""


class EventStream(Response):
    """A response that sends events until the client disconnects.

    `close` is called after the last event, also if none was sent, and `failed` makes the last event of a failed stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], close: Callable[[], None], failed: Callable[[ApiError], str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ApiError, OSError):  # the client has disconnected
                await cancel_on_disconnect(receive, self._send(send))
        finally:
            if hasattr(self._events, "aclose"):
                await self._events.aclose()
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for text in _kept_alive(self._events):
                await send({"type": "http.response.body", "body": text.encode(errors="replace"), "more_body": True})
        except (asyncio.CancelledError, OSError):
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("a stream failed")
            body = self._failed(ApiError.of(error)).encode(errors="replace")
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _kept_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and a comment after `_SILENCE_S` seconds without one."""
    while True:
        coming = asyncio.ensure_future(anext(events))
        try:
            while not coming.done():
                await asyncio.wait({coming}, timeout=_SILENCE_S)
                if not coming.done():
                    yield _ALIVE
            yield coming.result()
        except StopAsyncIteration:
            return
        finally:
            coming.cancel()


async def cancel_on_disconnect(receive: Receive, work: Awaitable[_Value]) -> _Value:
    """The result of `work`, which is cancelled with an `ApiError` when the client closes the connection."""
    doing = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({doing, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client closed the connection")
        return doing.result()
    finally:
        for each in (doing, disconnect):
            each.cancel()
        await asyncio.gather(doing, disconnect, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
