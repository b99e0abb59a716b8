"""Middleware in Ray's proxies: the errors of requests to a replica that has failed."""

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
    """Converts Ray's errors to those of this server.

    When a replica ends, Ray's proxy answers a waiting client with status 500 and breaks off a stream. This sends 503
    with Retry-After, or a last event with an error; the connection of any other answer that has begun is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began: Headers | None = None
        over = refused = disconnected = False

        async def noting(message: Message) -> None:
            nonlocal began, over, refused
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                # Errors of this server are JSON, Ray's are plain text: all queues are full, or there is no replica.
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
            nonlocal disconnected
            message = await receive()
            disconnected = disconnected or message["type"] == "http.disconnect"
            return message

        await self._app(scope, listening, noting)
        if over or disconnected:
            return
        error = ApiError(503, "the replica ended before its answer did; ask again", headers={"Retry-After": "1"})
        if began is None:
            await error.response(scope["path"])(scope, receive, send)
        elif began.get("content-type", "").startswith("text/event-stream"):
            await send({"type": "http.response.body", "body": _last_event(error, scope["path"]).encode()})


def _last_event(error: ApiError, path: str) -> str:
    """The error in the format of an endpoint's clients. The blank line before it ends an event that was cut off."""
    if path.startswith("/v1/messages"):
        text = event(error.anthropic, "error")
    elif path.startswith("/v1/responses"):
        text = event(error.body["error"] | {"type": "error"}, "error")
    else:
        text = event(error.body)
    return f"\n\n{text}"
