"""Several machines, by Ray: replicas of the server (Ray Serve), and prompts by the million (Ray Data).

Needs the extra `ray`: `pip install 'truedraft[ray]'`. Where a replica or a worker runs, which one answers a request and
when there are more of them is Ray's affair; each is an engine of its own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from truedraft.errors import MissingExtraError

_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "truedraft.server.cluster.proxy.middlewares"}
"""What processes of Ray's find in their environment: its proxies tell errors as our server does."""


def ray_module(name: str = "ray") -> Any:
    """A module of Ray's: `ray`, `ray.serve` or `ray.data`.

    Raises:
        MissingExtraError: it is not installed, or not with all that it needs.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingExtraError(
            f"this needs the package {missing}; install Ray by: pip install 'truedraft[ray]'"
        ) from error


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Ray inside the block: on the cluster that RAY_ADDRESS names, on that of this machine, or on a new one.

    A new one is this machine alone, and ends with the block. It has no dashboard.

    Raises:
        MissingExtraError: Ray is not installed.
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
    """The resources, as CPU and GPU, of each node of the cluster that this process is connected to."""
    ray = ray_module()
    return [each["Resources"] for each in ray.nodes() if each["Alive"]] if ray.is_initialized() else []
