"""Replicas of the server on Ray Serve: each is an engine with its HTTP application."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, metrics
from ray.serve.config import AutoscalingConfig, BackpressureConfig

import truedraft.errors
from truedraft.errors import OptionError, TruedraftError
from truedraft.server.cluster import connected, nodes
from truedraft.server.options import ServerOptions, bound_socket
from truedraft.server.service import Service
from truedraft.server.serving import warm_up

Make: TypeAlias = Callable[[int], tuple[FastAPI, Service]]
"""From a replica's number to its application and service."""

NAME = "truedraft"
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 5.0, 30.0
_AHEAD = 2  # times `max_batch`: requests sent to a replica, which has its next batch, too; others wait in the router
_BUSY = 0.75  # of `max_batch`: the autoscaler's target of open requests per replica
_TRIES = 2  # attempts to start the first replica
_LOOK_S = 0.25
_CAUSE = re.compile(r"^(?:.*\s)?truedraft\.errors\.(\w+): (.+)$", re.MULTILINE)


class Replica:
    """One engine and its application, in a Ray actor; `make` loads them in its process, by the replica's rank."""

    _service: Service | None = None  # before it is loaded

    def __init__(self, make: Make) -> None:
        self._app, self._service = make(serve.get_replica_context().rank.rank)
        warm_up(self._service.engine)
        gc.collect()
        gc.freeze()
        self._gauges: dict[str, metrics.Gauge] = {}

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Called by Ray, which replaces this replica after a `RuntimeError`; also exports the metrics to Ray."""
        for family in self._app.state.metrics.registry.collect():
            for sample in family.samples:
                name = sample.name.replace(":", "_")  # Ray does not allow colons
                if name not in self._gauges:
                    self._gauges[name] = metrics.Gauge(name, family.documentation, tuple(sample.labels))
                self._gauges[name].set(sample.value, tags=sample.labels)
        assert self._service is not None
        if (trouble := self._service.trouble) is not None:
            raise RuntimeError(trouble)

    def __del__(self) -> None:
        """Close the learner; Ray calls this after the application has ended."""
        if self._service is not None and self._service.engine.learner is not None:
            self._service.engine.learner.close()


@dataclass(frozen=True)
class Size:
    """Resources per replica, and the least and most replicas; `cpus` is also the number of torch threads."""

    cpus: int
    gpus: int
    least: int
    most: int

    @classmethod
    def of(cls, replicas: tuple[int, int], threads: int | None, device: str) -> Size:
        """From the range of replicas; without `threads`, they share the processors of one node."""
        least, most = replicas
        there = nodes()
        if device not in ("auto", "cpu", "cuda"):
            raise OptionError(f"must be auto, cpu or cuda, for Ray decides which; got {device!r}", field="device")
        gpus = int(device == "cuda" or (device == "auto" and any(each.get("GPU", 0) >= 1 for each in there)))
        cores = max((int(each.get("CPU", 0)) for each in there), default=1)
        return cls(threads or max(1, cores // most), gpus, least, most)

    def check_room(self) -> None:
        """Refuse more replicas than there is room for, by an `OptionError` with the number that there is room for."""
        needs = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        room = sum(min(int(node.get(name, 0) // count) for name, count in needs.items()) for node in nodes())
        if room < self.least:
            each = " and ".join(f"{count} {name}" for name, count in needs.items())
            message = f"asks for {self.least} of {each} each, and this cluster has room for {room}; ask for fewer"
            raise OptionError(f"{message}, or for fewer --threads", field="replicas")


def application(make: Make, server: ServerOptions, size: Size) -> Application:
    """The application for Ray Serve; `make` loads a replica's engine and is pickled, so all nodes must import it."""
    many: dict[str, Any] = {"num_replicas": size.least}
    if size.most > size.least:
        bounds, aim = {"min_replicas": size.least, "max_replicas": size.most}, _BUSY * server.max_batch
        many = {"autoscaling_config": AutoscalingConfig(**bounds, target_ongoing_requests=aim)}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options={"num_cpus": size.cpus, "num_gpus": size.gpus},
        max_ongoing_requests=_AHEAD * server.max_batch,
        max_queued_requests=server.max_queue,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        graceful_shutdown_timeout_s=server.drain_s,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        health_check_period_s=_HEALTH_EVERY_S,
        health_check_timeout_s=_HEALTH_WITHIN_S,
        max_constructor_retry_count=_TRIES,
        logging_config={"enable_access_log": False},  # the server has its own
        **many,
    )
    return deployment.bind(make)


@contextlib.contextmanager
def running(make: Make, server: ServerOptions, size: Callable[[], Size]) -> Iterator[str]:
    """Run replicas inside the block; yields their address once all of them answer. After the block they drain and end.

    `size` is called once the cluster is connected. An `OptionError` if the address cannot be used, there is no room, or
    the cluster already runs Ray Serve; a `TruedraftError` if a replica failed to start.
    """
    with bound_socket(server.host, server.port) as free:  # released for Ray's proxy
        port = free.getsockname()[1]
    with connected():
        requested = size()
        requested.check_room()
        if serve.status().proxies:
            message = "needs Ray Serve for itself, which runs on this cluster already: deploy truedraft.deploy.ray:app"
            raise OptionError(f"{message} there or end it by `serve shutdown`", field="ray")
        tls = {"ssl_certfile": server.tls_certificate, "ssl_keyfile": server.tls_key}
        given = {name: str(path) for name, path in tls.items() if path is not None}
        serve.start(http_options={"host": server.host, "port": port} | given)
        try:
            try:
                serve.run(application(make, server, requested), name=NAME, route_prefix="/")
            except RuntimeError as error:
                raise _cause(str(error)) from error
            host = f"[{server.host}]" if ":" in server.host else server.host
            yield f"{'https' if given else 'http'}://{host}:{port}"
        finally:
            serve.delete(NAME)  # waits for open requests, which `shutdown` does not
            serve.shutdown()


def serve_replicas(make: Make, server: ServerOptions, size: Callable[[], Size], ready: Callable[[str], None]) -> None:
    """Serve with replicas until Ctrl-C or SIGTERM, as `running`; `ready` is called with the address."""
    stop = threading.Event()
    with running(make, server, size) as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        ready(address)
        while not stop.wait(_LOOK_S):  # a wait without a timeout would delay signals
            pass


def _cause(message: str) -> TruedraftError:
    """The library's error in Ray's report of a failed start; a general one with Ray's text if there is none."""
    deployments = serve.status().applications[NAME].deployments
    message = "\n".join(each.message for each in deployments.values()) or message
    found = _CAUSE.search(message)
    if found is None:
        return TruedraftError(f"Ray cannot run the replicas: {message.strip()}")
    kind: type[TruedraftError] = getattr(truedraft.errors, found[1], TruedraftError)
    return kind(found[2])
