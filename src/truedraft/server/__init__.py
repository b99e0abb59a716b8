"""An OpenAI-compatible server: continuous batching and speculation behind the endpoints that clients know.

Needs the extra `serve`: `pip install 'truedraft[serve]'`. `truedraft serve` starts it; `application` gives the same as
an ASGI application, to be run by a server of one's own. Loads no web framework before one of the two is asked for.
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
