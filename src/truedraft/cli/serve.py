"""`truedraft serve`: answer the requests of OpenAI's clients."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions, StackOptions
from truedraft.errors import MissingExtraError
from truedraft.options import NEEDED, MachineOptions, group, read_bytes
from truedraft.server.options import ServerOptions

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.engine import Engine


@dataclass(frozen=True)
class ServeOptions:
    """Options of `truedraft serve`."""

    stack: StackOptions = group("Model and drafter", model=NEEDED)
    server: ServerOptions = group("Server")
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
    from truedraft.cli.terminal import Terminal
    from truedraft.server import application
    from truedraft.server import serve as listen

    terminal = Terminal()
    _log_to_standard_error()
    engine = _engine(options, terminal.err)
    app, service = application(engine, options.server, options.stack.model)
    gc.collect()
    gc.freeze()  # full collections need not look through all that was loaded, in the middle of somebody's answer

    def ready(address: str) -> None:
        terminal.note(f"serving {options.stack.model} with {engine.drafter.name} at {address}/v1")
        if not options.server.no_playground:
            terminal.note(f"playground: {address}/")
        if options.report.json:
            terminal.json({"command": "serve", "status": DONE, "address": address, "model": options.stack.model})

    listen(app, service, options.server, ready)
    return DONE


def _engine(options: ServeOptions, console: Console) -> Engine:
    """The engine, with what requests may bring along to draft from."""
    from truedraft.cli.session import load_engine, planned_drafter
    from truedraft.core.params import SamplingParams

    stack = options.stack
    if stack.plan is not None:
        stack = replace(stack, drafter=planned_drafter(stack.plan, [stack.drafter], SamplingParams()))
    return load_engine(
        stack,
        options.machine,
        console,
        max_batch=options.server.max_batch,
        prefix_cache_bytes=read_bytes("prefix_cache_bytes", options.server.prefix_cache_bytes),
        own_drafts=True,
    )


def _log_to_standard_error() -> None:
    """One line a request, and what the engine has to say, with tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("truedraft.server", logging.INFO), ("truedraft.engine", logging.WARNING)):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
