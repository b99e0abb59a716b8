"""In Ray's proxies: what a request is told whose replica is gone."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truedraft.server.errors import ApiError
from truedraft.server.events import event

_BUSY = 429


def middlewares() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(WithErrors)]


class WithErrors:
    """Tells errors of Ray's as those of our server.

    Where a replica ends, Ray's proxy says nothing more: a client that waits gets status 500 without a reason, and a
    stream breaks off. Here the first gets 503 with Retry-After, and the second a last event that is an error. An answer
    of another kind that has begun cannot be mended; its connection is closed.

    Args:
        app: Ray's proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began: Headers | None = None
        over = refused = gone = False

        async def noting(message: Message) -> None:
            nonlocal began, over, refused
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                # Errors of ours are JSON; these are Ray's: all queues are full, or there is nobody who answers.
                refused = message["status"] >= _BUSY and headers.get("content-type", "").startswith("text/plain")
                if refused:
                    again = {"Retry-After": headers.get("retry-after", "1")}
                    error = ApiError(message["status"], "no replica has room; ask again in a moment", headers=again)
                    await error.response(scope["path"])(scope, receive, send)
                began = headers
            over = over or (message["type"] == "http.response.body" and not message.get("more_body", False))
            if not refused:
                await send(message)

        async def listening() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        await self._app(scope, listening, noting)
        if over or gone:
            return
        error = ApiError(503, "the replica ended before its answer did; ask again", headers={"Retry-After": "1"})
        if began is None:
            await error.response(scope["path"])(scope, receive, send)
        elif began.get("content-type", "").startswith("text/event-stream"):
            await send({"type": "http.response.body", "body": _last_event(error, scope["path"]).encode()})


def _last_event(error: ApiError, path: str) -> str:
    """As clients of an endpoint read it. A blank line before it ends an event that was cut off."""
    if path.startswith("/v1/messages"):
        told = event(error.anthropic, "error")
    elif path.startswith("/v1/responses"):
        told = event(error.body["error"] | {"type": "error"}, "error")
    else:
        told = event(error.body)
    return f"\n\n{told}"
