"""Several machines with Ray: replicas of the server (Ray Serve), and batch inference (Ray Data).

Needs the extra `ray`: `pip install 'truedraft[ray]'`. Each replica or worker has its own engine.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from truedraft.errors import MissingExtraError

_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "truedraft.server.cluster.proxy.middlewares"}
"""Environment of Ray's processes, so that its proxies report errors in this server's formats."""


def ray_module(name: str = "ray") -> Any:
    """Import `ray`, `ray.serve` or `ray.data`; a `MissingExtraError` if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingExtraError(
            f"this needs the package {missing}; install Ray by: pip install 'truedraft[ray]'"
        ) from error


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Connect to Ray inside the block: to the cluster of RAY_ADDRESS, to this machine's, or to a new one.

    A new one runs on this machine, without dashboard, and ends with the block.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, runtime_env={"env_vars": _CALLBACK})
    try:
        yield ray
    finally:
        ray.shutdown()


def nodes() -> list[Mapping[str, float]]:
    """The resources, such as CPU and GPU, of each node of the connected cluster."""
    ray = ray_module()
    return [each["Resources"] for each in ray.nodes() if each["Alive"]] if ray.is_initialized() else []
