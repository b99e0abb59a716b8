"""`truedraft serve`: answer the requests of OpenAI's clients."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions, StackOptions, load_engine, planned_drafter
from truedraft.cli.terminal import Terminal
from truedraft.errors import MissingExtraError, OptionError
from truedraft.options import NEEDED, MachineOptions, changed_fields, group, read_bytes
from truedraft.server.cluster import ray_module
from truedraft.server.options import LearningOptions, ReplicaOptions, ServerOptions, bound_socket

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

    from truedraft.server.cluster.replicas import Size
    from truedraft.server.service import Service
    from truedraft.training.online import Learner

_CACHE_SHARE = 0.75  # share of the free memory after loading for the KV cache, without --max-cache-bytes


@dataclass(frozen=True)
class ServeOptions:
    """Options of `truedraft serve`."""

    stack: StackOptions = group("Model and drafter", bare="model", model=NEEDED)
    server: ServerOptions = group("Server")
    learning: LearningOptions = group("Learning")
    replicas: ReplicaOptions = group("Replicas")
    report: ReportOptions = group("Report")
    machine: MachineOptions = group("Machine")


def serve(options: ServeOptions) -> int:
    """Serve a model to OpenAI's clients, with a page at / that shows speculation at work."""
    try:
        import fastapi  # noqa: F401 - whether it is there
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"serving needs the package {error.name}; install it by: pip install 'truedraft[serve]'"
        ) from error
    if options.replicas.range is None:
        bound_socket(options.server.host, options.server.port).close()  # before imports, which take seconds
    from truedraft.server import serve as listen
    from truedraft.server.serving import check_options

    terminal, model = Terminal(), options.stack.model

    def ready(by: str, address: str, most: int | None = None) -> None:
        terminal.note(f"serving {model} with {by} at {address}/v1")
        if most is not None:
            from truedraft.machine import in_bytes

            terminal.note(f"keys and values take at most {in_bytes(most)} (--max-cache-bytes)")
        if not options.server.no_playground:
            terminal.note(f"playground: {address}/")
        if options.report.json:
            terminal.json({"command": "serve", "status": DONE, "address": address, "model": model})

    if options.replicas.range is not None:
        ray_module("ray.serve")
        from truedraft.server.cluster.replicas import serve_replicas

        make, size = partial(loaded, options), partial(_size, options)
        serve_replicas(make, options.server, size, partial(ready, "replicas on Ray"))
        return DONE
    check_options(options.server)
    app, service = loaded(options)
    gc.collect()
    gc.freeze()  # so that full collections during answers need not scan all loaded objects
    try:
        from truedraft.drafters.prediction import REQUESTS_OWN

        engine = service.engine
        by = ", ".join(name for name in engine.drafter.members if name not in REQUESTS_OWN)
        listen(app, service, options.server, partial(ready, by, most=engine.max_cache_bytes))
    finally:
        if service.engine.learner is not None:
            service.engine.learner.close()
        gc.unfreeze()  # otherwise libraries warn at exit about uncollected objects
    return DONE


def replicas(options: ServeOptions) -> Application:
    """Replicas as an application for Ray Serve, whatever `ray` says; OptionError if their number is invalid."""
    from truedraft.server.cluster.replicas import application

    return application(partial(loaded, options), options.server, _size(options))


def _size(options: ServeOptions) -> Size:
    from truedraft.server.cluster.replicas import Size

    bounds = replace(options.replicas, ray=True).range
    assert bounds is not None
    return Size.of(bounds, options.machine.threads, options.machine.device)


def loaded(options: ServeOptions, number: int | None = None) -> tuple[FastAPI, Service]:
    """Load the engine in this process, of replica `number` if there are several, and make its application."""
    import torch

    from truedraft.core.params import SamplingParams
    from truedraft.machine import pick_device
    from truedraft.server import application

    _log_to_standard_error()
    if number is not None and (folder := options.learning.learn_folder) is not None:  # each replica learns separately
        options = replace(options, learning=replace(options.learning, learn_folder=folder / f"replica-{number}"))
    share = _CACHE_SHARE
    if number is not None and pick_device(options.machine.device).type == "cpu":  # of the node's memory its processors'
        share *= min(1.0, torch.get_num_threads() / (os.cpu_count() or 1))
    stack = options.stack
    if stack.plan is not None:
        stack = replace(stack, drafter=planned_drafter(stack.plan, [stack.drafter], SamplingParams()))
    engine = load_engine(
        stack,
        options.machine,
        Terminal().err,
        max_batch=options.server.max_batch,
        prefix_cache_bytes=read_bytes("prefix_cache_bytes", options.server.prefix_cache_bytes),
        own_drafts=True,  # predictions and grammars in requests
        cache_share=share,
        learner=_learner(options.learning, options.server),
    )
    return application(engine, options.server, options.stack.model)


def _learner(learning: LearningOptions, server: ServerOptions) -> Learner | None:
    if not learning.learn:
        if given := changed_fields(learning):
            raise OptionError("has no effect without --learn; give that, too", field=given[0])
        return None
    if learning.learn_per_tenant and (server.share_prefixes or server.api_key_file is None):
        ways = "leave --share-prefixes out" if server.share_prefixes else "give them keys by --api-key-file"
        raise OptionError(f"needs clients that can be distinguished; {ways}", field="learn_per_tenant")
    from truedraft.training.online import Learner

    return Learner(
        learning.learn_folder,
        share=learning.learn_share,
        keep_s=learning.learn_keep_s,
        per_tenant=learning.learn_per_tenant,
    )


def _log_to_standard_error() -> None:
    """Log one line per request and the engine's messages, with tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {
        "truedraft.server": logging.INFO,
        "truedraft.training.online": logging.INFO,
        "truedraft.engine": logging.WARNING,
    }
    for name, level in levels.items():
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
