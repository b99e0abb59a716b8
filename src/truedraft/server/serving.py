"""From an engine to a listening server with a graceful shutdown, and limits of time and number for connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from truedraft.core.params import SamplingParams
from truedraft.engine import Engine
from truedraft.engine.policy.sizes import made_up_prompt
from truedraft.errors import OptionError, errors_about
from truedraft.options import read_bytes
from truedraft.progress import Progress
from truedraft.server.access import ApiKeys, Hosts
from truedraft.server.app import build_app
from truedraft.server.front import Front
from truedraft.server.metrics import Metrics, Spans
from truedraft.server.options import ServerOptions, bound_socket
from truedraft.server.service import Service
from truedraft.verification.specs import rule_from_spec

_log = logging.getLogger("truedraft.server")

BACKLOG = 16  # connections accepted in one turn of the event loop
_RESERVED = 6 * BACKLOG  # file descriptors for connections accepted before others are closed, and for files
_DESCRIPTORS = Path("/proc/self/fd"), Path("/dev/fd")  # folders with an entry for each open file descriptor
_LEAST, _MOST = 8, 65_536
_LOG_EVERY_S = 1.0
_WARM_PROMPT, _WARM_TOKENS = 48, 16  # tokens of the warm-up's prompt and of each answer
_LOG_PROGRESS_S = 5.0  # between log lines of the warm-up's progress
_ENDING_S = 5  # for sending the rest of answers after open requests were aborted
_LOOK_S = 0.05  # between checks for open requests during shutdown


def application(engine: Engine, options: ServerOptions, name: str) -> tuple[FastAPI, Service]:
    """The web application of an engine, which only this application may step.

    Args:
        options: `host` must be the address that the running server listens on, if it is not started by `serve`.
        name: of the model, if the options give none.

    Raises:
        OptionError: an option cannot be used, or the engine's noise is fixed.
        TruedraftError: the target failed while it was measured.
    """
    names = options.served_model_name or (_without_folder(name),)
    if engine.entropy is not None:
        message = "fixes the noise of requests, which clients could then predict, and is for tests; serve an engine"
        raise OptionError(f"{message} without it", field="entropy")
    if twice := set(names) & set(engine.target.adapters):
        message = f"has the name {min(twice)!r}, which the model is served by; give it another"
        raise OptionError(message, field="adapters")
    hosts = Hosts(options.host, options.allowed_host)
    read_bytes("max_body_bytes", options.max_body_bytes)  # the gate reads it later, at the first request
    service = Service(
        engine,
        max_queue=options.max_queue,
        max_per_client=options.max_per_client,
        forward_s=engine.forwards(),
        shown_names=_shown_names(engine, names[0]),
        hung_after_s=options.hung_after_s,
    )
    template = None if options.chat_template is None else _read("chat_template", options.chat_template)
    rules = {words: rule_from_spec(words) for words in options.allow_rule}
    for words, rule in rules.items():
        with errors_about("allow_rule"):
            rule.check(engine.drafter.kinds_for(rule.judges), words)
    if options.otlp_endpoint is not None:
        service.listeners.append(Spans(names[0], options.otlp_endpoint))
    keys = ApiKeys({}) if options.api_key_file is None else ApiKeys.read(options.api_key_file)
    metrics = Metrics(service, names[0], options.price_per_hour)
    return build_app(Front(service, names, rules, options, template), metrics, keys, hosts), service


def _without_folder(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _shown_names(engine: Engine, served: str) -> dict[str, str]:
    """The served name by the internal names of model and tokenizer, so that errors show no paths to clients."""
    target = engine.target
    names = {target.name} if target.tokenizer is None else {target.name, target.tokenizer.name}
    shown = {repr(name): repr(served) for name in names}
    return shown | {name: served for name in names if _without_folder(name) != name}


def _read(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot be read ({error}): {str(path)!r}", field=field) from error


def check_options(options: ServerOptions) -> None:
    """Check the options as far as possible before a model is loaded; an `OptionError` if one cannot be used."""
    if options.api_key_file is not None:
        ApiKeys.read(options.api_key_file)
    if options.chat_template is not None:
        _read("chat_template", options.chat_template)
    for words in options.allow_rule:
        rule_from_spec(words)
    for field in ("max_body_bytes", "prefix_cache_bytes"):
        read_bytes(field, getattr(options, field))
    _check_certificate(options)
    most_connections(options.max_connections)
    bound_socket(options.host, options.port).close()


def _check_certificate(options: ServerOptions) -> None:
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise OptionError("needs --tls-key, and that needs it; give both or neither", field="tls_certificate")
    if options.tls_certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_certificate, options.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise OptionError(f"cannot be used ({error})", field="tls_certificate") from error


def serve(app: FastAPI, service: Service, options: ServerOptions, ready: Callable[[str], None]) -> None:
    """Warm up, then listen until Ctrl-C or SIGTERM; a second signal does not wait for open requests.

    `ready` is called with the address once the server listens.

    Raises:
        OptionError: the address or the certificate cannot be used.
        TruedraftError: the first answer failed.
    """
    _check_certificate(options)
    listening = bound_socket(options.host, options.port)  # no connection is accepted before the warm-up is done
    connections = Connections(most_connections(options.max_connections), options.head_timeout_s)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Connection, connections=connections)),
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )
    warm_up(service.engine)
    try:
        listening.listen()
    except OSError as error:  # another server has taken the address since
        raise OptionError(f"{options.port} cannot be listened on ({error.strerror})", field="port") from error
    host, port = listening.getsockname()[:2]
    scheme = "http" if options.tls_certificate is None else "https"
    shown = f"[{host}]" if ":" in host else host
    server = _Server(config, service, connections, options.drain_s, lambda: ready(f"{scheme}://{shown}:{port}"))
    server.run(sockets=[listening])


def warm_up(engine: Engine) -> None:
    """Generate a greedy and a sampled answer, so that no client waits for what is created at first use.

    That includes compiled kernels, copies of weights, CUDA graphs (`Engine.make_ready`) and the measured costs of
    steps. Only the caller may step the engine.

    Raises:
        TruedraftError: target or drafter failed, so that no request could be answered.
    """
    engine.make_ready(progress=_logged())
    prompt = made_up_prompt(engine.target, _WARM_PROMPT)
    for temperature in (0.0, 1.0):
        params = SamplingParams(_WARM_TOKENS, temperature=temperature, ignore_eos=True)
        for _ in engine.stream(prompt, params, scope=engine):  # no client's scope, so no client's drafts use it
            pass


def _logged() -> Progress:
    last_s = time.monotonic()

    def report(done: float, remark: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LOG_PROGRESS_S:
            last_s = time.monotonic()
            _log.info("making ready: %.0f %%, %s", 100.0 * done, remark)

    return report


class _Server(uvicorn.Server):
    """Drains before it stops: it waits for open requests, then aborts the rest with an error that allows a retry."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        connections: Connections,
        drain_s: float,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._service = service
        self._drain_s = drain_s
        self._ready = ready
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._connections.failed)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen()  # the system's queue may be longer than what is accepted at once
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C or SIGTERM; uvicorn's own handler would end the process by the signal after shutdown."""
        again = self._service.draining
        self._service.draining = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_ending, 0.0 if again else self._drain_s)

    def _begin_ending(self, seconds: float) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.ensure_future(self._end_after(seconds))

    async def _end_after(self, seconds: float) -> None:
        """Stop once all requests are answered, at the latest after `seconds`; new requests are refused."""
        end = time.monotonic() + seconds
        while not self._service.is_idle and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        if not self._service.is_idle:
            _log.warning("%d requests are broken off", self._service.running)
        self._service.abort()
        # Finished answers may still be in transit to a slow reader.
        self.config.timeout_graceful_shutdown = max(int(end - time.monotonic()), 0) + _ENDING_S
        self.should_exit = True


def most_connections(requested: int | None) -> int:
    """The limit of open connections: the requested one, or what the limit of open files leaves."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = 2 * _MOST if limit == resource.RLIM_INFINITY else limit
    except ImportError:  # Windows
        limit = _MOST
    left = limit - _used_descriptors() - _RESERVED
    if left < (requested or _LEAST):
        ways = "request fewer" if requested else "raise it"
        message = f"the limit of {limit} open files leaves {max(left, 0)} connections; {ways} (ulimit -n)"
        raise OptionError(message, field="max_connections")
    return min(left, requested or _MOST)


def _used_descriptors() -> int:
    for folder in _DESCRIPTORS:
        with contextlib.suppress(OSError):  # missing, or not readable
            return sum(1 for _ in folder.iterdir())
    return _RESERVED


class Connections:
    """The connections of one server.

    Above the limit, the oldest connection without a complete request is closed, else the oldest with a client that does
    not read. A request's head must arrive within `head_s` of the connection or of the end of the last answer.
    """

    def __init__(self, most: int, head_s: float) -> None:
        self.head_s = head_s
        self._most = most
        self._open: dict[Connection, None] = {}  # the oldest first
        self._logged_s = -_LOG_EVERY_S
        self._failures = 0  # of accepting, since the last log entry

    def add(self, connection: Connection) -> None:
        """Add a connection; above the limit another one is closed, or this one."""
        self._open[connection] = None
        if len(self._open) <= self._most:
            return
        if not (
            self._drop(lambda each: each.awaits_request and each is not connection)
            or self._drop(lambda each: each.is_stalled)
        ):
            connection.refuse()

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _drop(self, may: Callable[[Connection], bool]) -> bool:
        connection = next((each for each in self._open if may(each)), None)
        if connection is None:
            return False
        self.remove(connection)
        connection.transport.abort()
        return True

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's exception handler; errors of accepting are logged at most once every `_LOG_EVERY_S` seconds."""
        if "socket.accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        self._failures += 1
        if (now := time.monotonic()) >= self._logged_s + _LOG_EVERY_S:
            error = context.get("exception")
            _log.error("no connection could be accepted (%s), %d times since the last report", error, self._failures)
            self._logged_s, self._failures = now, 0


class Connection(H11Protocol):
    """A connection that is closed if its client does not send a request in time."""

    def __init__(self, *, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def awaits_request(self) -> bool:
        """Whether no complete request has arrived."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def is_stalled(self) -> bool:
        """Whether its client does not read what is sent."""
        return self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.remove(self)
        self._forget_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_deadline()  # the head is complete

    def on_response_complete(self) -> None:
        self._watch()
        super().on_response_complete()  # may start the next request

    def _watch(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(self._all.head_s, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def refuse(self) -> None:
        self._all.remove(self)
        message = b'{"error": {"message": "this server has too many open connections; ask again in 1 s"}}'
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        self.transport.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(message) + message)
        self.transport.close()
