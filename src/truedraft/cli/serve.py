"""`truedraft serve`: answer the requests of OpenAI's clients."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions, StackOptions
from truedraft.errors import MissingExtraError, OptionError
from truedraft.options import NEEDED, MachineOptions, group, read_bytes
from truedraft.server.options import LearningOptions, ServerOptions

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.engine import Engine
    from truedraft.learning import Learner


@dataclass(frozen=True)
class ServeOptions:
    """Options of `truedraft serve`."""

    stack: StackOptions = group("Model and drafter", model=NEEDED)
    server: ServerOptions = group("Server")
    learning: LearningOptions = group("Learning")
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

    try:
        listen(app, service, options.server, ready)
    finally:
        if engine.learner is not None:
            engine.learner.close()
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
        learner=_learner(options.learning, options.server),
    )


def _learner(learning: LearningOptions, server: ServerOptions) -> Learner | None:
    """What learns beside the engine, if anything is to.

    Raises:
        OptionError: learning is not asked for, and how it is to be done is; or tenants are not told apart.
    """
    if not learning.learn:
        given = next((each.name for each in fields(learning) if getattr(learning, each.name) != each.default), None)
        if given is not None:
            raise OptionError("has no effect without --learn; give that, too", field=given)
        return None
    if learning.learn_per_tenant and server.share_prefixes:
        raise OptionError("needs clients that are told apart; leave --share-prefixes out", field="learn_per_tenant")
    from truedraft.learning import Learner

    return Learner(
        learning.learn_folder,
        share=learning.learn_share,
        keep_s=learning.learn_keep_s,
        per_tenant=learning.learn_per_tenant,
    )


def _log_to_standard_error() -> None:
    """One line a request, and what the engine has to say, with tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {"truedraft.server": logging.INFO, "truedraft.learning": logging.INFO, "truedraft.engine": logging.WARNING}
    for name, level in levels.items():
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
