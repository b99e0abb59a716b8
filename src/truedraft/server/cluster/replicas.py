"""Replicas of the server on Ray Serve: each an engine with its HTTP application.

Ray routes a request to the less loaded of two replicas, starts and ends replicas as requests need, asks each for its
health and puts a new one in the place of one that is lost.
"""

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
from truedraft.server.options import ServerOptions
from truedraft.server.service import Service
from truedraft.server.serving import bound_socket, warm_up

Make: TypeAlias = Callable[[int], tuple[FastAPI, Service]]
"""Loads the engine of replica number so-and-so, and gives its application and service."""

NAME = "truedraft"
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 5.0, 30.0
_AHEAD = 2  # times `max_batch` is given to a replica: its next batch, too; others wait where any replica can take them
_BUSY = 0.75  # of `max_batch`, open requests of a replica that the autoscaler aims at
_TRIES = 2  # to start a replica, before none ever started
_LOOK_S = 0.25
_CAUSE = re.compile(r"^(?:.*\s)?truedraft\.errors\.(\w+): (.+)$", re.MULTILINE)


class Replica:
    """One engine and its application, made, asked and ended by Ray.

    Args:
        make: loads them; in the replica's own process.
    """

    _service: Service | None = None  # until it is loaded

    def __init__(self, make: Make) -> None:
        self._app, self._service = make(serve.get_replica_context().rank.rank)
        warm_up(self._service.engine)
        gc.collect()
        gc.freeze()
        self._gauges: dict[str, metrics.Gauge] = {}

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Called by Ray every few seconds, which also brings it the numbers of /metrics.

        Raises:
            RuntimeError: the engine answers nobody any more; Ray replaces this replica.
        """
        for family in self._app.state.metrics.registry.collect():
            for sample in family.samples:
                name = sample.name.replace(":", "_")  # Ray allows none
                if name not in self._gauges:
                    self._gauges[name] = metrics.Gauge(name, family.documentation, tuple(sample.labels))
                self._gauges[name].set(sample.value, tags=sample.labels)
        assert self._service is not None
        if (trouble := self._service.trouble) is not None:
            raise RuntimeError(trouble)

    def __del__(self) -> None:
        """Ray ends it, after its application."""
        if self._service is not None and self._service.engine.learner is not None:
            self._service.engine.learner.close()


@dataclass(frozen=True)
class Size:
    """What a replica needs, and how many there are.

    Attributes:
        cpus: of one; torch computes on so many threads.
        gpus: of one.
        least: replicas.
        most: of them; more than `least` where Ray decides.
    """

    cpus: int
    gpus: int
    least: int
    most: int

    @classmethod
    def of(cls, replicas: tuple[int, int], threads: int | None, device: str) -> Size:
        """So many at least and at most; without a number of threads they share the processors of one node.

        Raises:
            OptionError: the device is one that Ray cannot choose.
        """
        least, most = replicas
        there = nodes()
        if device not in ("auto", "cpu", "cuda"):
            raise OptionError(f"must be auto, cpu or cuda, for Ray decides which; got {device!r}", field="device")
        gpus = int(device == "cuda" or (device == "auto" and any(each.get("GPU", 0) >= 1 for each in there)))
        cores = max((int(each.get("CPU", 0)) for each in there), default=1)
        return cls(threads or max(1, cores // most), gpus, least, most)

    def check_room(self) -> None:
        """Refuse more replicas than there is room for.

        Raises:
            OptionError: says how many there is room for.
        """
        needs = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        room = sum(min(int(node.get(name, 0) // count) for name, count in needs.items()) for node in nodes())
        if room < self.least:
            each = " and ".join(f"{count} {name}" for name, count in needs.items())
            raise OptionError(
                f"asks for {self.least} of {each} each, and this cluster has room for {room}; ask for fewer, or for "
                "fewer --threads",
                field="replicas",
            )


def application(make: Make, server: ServerOptions, size: Size) -> Application:
    """The application for Ray Serve.

    Args:
        make: loads the engine of a replica; is pickled, and must be importable where replicas run.
        server: what each takes on, and how long it drains.
        size: how many there are, of what.
    """
    many: dict[str, Any] = {"num_replicas": size.least}
    if size.most > size.least:
        aim = _BUSY * server.max_batch
        many = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=size.least, max_replicas=size.most, target_ongoing_requests=aim
            )
        }
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
        logging_config={"enable_access_log": False},  # the server's own says more
        **many,
    )
    return deployment.bind(make)


@contextlib.contextmanager
def running(make: Make, server: ServerOptions, size: Callable[[], Size]) -> Iterator[str]:
    """Replicas inside the block; gives their address once all answer. Behind it they drain, and end.

    Args:
        make: as of `application`.
        server: where Ray's proxies listen, and what replicas take on.
        size: of them; is asked once there is a cluster.

    Raises:
        OptionError: the address cannot be used, there is no room for so many, or others use Ray Serve.
        TruedraftError: a replica cannot be started; that is its own error.
    """
    with bound_socket(server.host, server.port) as free:  # Ray's proxy takes it
        port = free.getsockname()[1]
    with connected():
        asked = size()
        asked.check_room()
        if serve.status().proxies:
            raise OptionError(
                "needs Ray Serve for itself, which runs on this cluster already: deploy truedraft.deploy.ray:app there "
                "or end it by `serve shutdown`",
                field="ray",
            )
        tls = {"ssl_certfile": server.tls_certificate, "ssl_keyfile": server.tls_key}
        given = {name: str(path) for name, path in tls.items() if path is not None}
        serve.start(http_options={"host": server.host, "port": port} | given)
        try:
            try:
                serve.run(application(make, server, asked), name=NAME, route_prefix="/")
            except RuntimeError as error:
                raise _cause(str(error)) from error
            host = f"[{server.host}]" if ":" in server.host else server.host
            yield f"{'https' if given else 'http'}://{host}:{port}"
        finally:
            serve.delete(NAME)  # waits until all is answered, which `shutdown` does not
            serve.shutdown()


def serve_replicas(make: Make, server: ServerOptions, size: Callable[[], Size], ready: Callable[[str], None]) -> None:
    """Answer by replicas until told to stop, by Ctrl-C or SIGTERM; arguments and errors as of `running`.

    Args:
        make: as there.
        server: as there.
        size: as there.
        ready: is called with the address once all answer.
    """
    stop = threading.Event()
    with running(make, server, size) as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        ready(address)
        while not stop.wait(_LOOK_S):  # a wait without an end would hold signals up
            pass


def _cause(told: str) -> TruedraftError:
    """The error of ours for which replicas do not start, as Ray tells it; what Ray says where there is none."""
    deployments = serve.status().applications[NAME].deployments
    told = "\n".join(each.message for each in deployments.values()) or told
    found = _CAUSE.search(told)
    if found is None:
        return TruedraftError(f"Ray cannot run the replicas: {told.strip()}")
    kind: type[TruedraftError] = getattr(truedraft.errors, found[1], TruedraftError)
    return kind(found[2])
