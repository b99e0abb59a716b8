"""An OpenAI-compatible server with continuous batching and speculative decoding.

Needs the extra `serve`: `pip install 'truedraft[serve]'`. `truedraft serve` starts it; `application` returns an ASGI
application for another server. Importing this package loads no web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from truedraft.server.options import ServerOptions

if TYPE_CHECKING:
    from truedraft.server.serving import application, serve, warm_up

__all__ = ["ServerOptions", "application", "serve", "warm_up"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from truedraft.server import serving

    return getattr(serving, name)
