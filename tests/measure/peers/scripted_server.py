"""A server that answers whatever a test says, well or badly, and a clock that stands still unless somebody sleeps."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from truedraft.text import Tokenizer


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Made:
    """An answer: JSON, or bytes as they are; after `cut` bytes of it the connection closes."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    before_end: Callable[[], None] | None = None  # is called when all but the last byte is on its way


Handler = Callable[[Asked], Made]


class ScriptedServer:
    """Handlers by path; what was asked is kept."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.asked: list[Asked] = []
        self.url = ""

    def posted(self, path: str = "/v1/completions") -> list[Any]:
        return [each.body for each in self.asked if each.path == path and each.method == "POST"]

    def made(self, asked: Asked) -> Made:
        self.asked.append(asked)
        handler = self.handlers.get(asked.path)
        return Made({"detail": "Not Found"}, 404) if handler is None else handler(asked)


class StillClock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.slept: list[float] = []
        self._guard = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        with self._guard:
            self.slept.append(seconds)
            self.now += seconds


@contextlib.contextmanager
def scripted() -> Iterator[ScriptedServer]:
    script = ScriptedServer()

    class Speaker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client has gone, as it does where it waits no longer
                super().handle()

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            made = script.made(Asked(self.command, self.path, dict(self.headers), body))
            content = made.content if isinstance(made.content, bytes) else json.dumps(made.content).encode()
            self.send_response(made.status)
            for name, value in ({"Content-Type": "application/json"} | dict(made.headers)).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if made.cut is not None:
                self.wfile.write(content[: made.cut])
                self.close_connection = True
            elif made.before_end is not None:
                self.wfile.write(content[:-1])
                self.wfile.flush()
                made.before_end()
                self.wfile.write(content[-1:])
            else:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaker)
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def models(owner: str, *names: str, **more: Any) -> Handler:
    """A list of models."""
    data = [{"id": name, "object": "model", "owned_by": owner} | more for name in names]
    return lambda _: Made({"object": "list", "data": data})


def completion(
    body: Mapping[str, Any],
    text: str,
    *,
    reason: str = "length",
    prompt_tokens: int | None = None,
    tokens: int | None = None,
    model: str | None = None,
    **choice: Any,
) -> dict[str, Any]:
    """A completion in OpenAI's form; further words are fields of its choice."""
    made: dict[str, Any] = {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": body.get("model") if model is None else model,
        "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None} | choice],
    }
    if prompt_tokens is not None:
        made["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    return made


def named_logprobs(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    """Logprobs as OpenAI's completions have them: -0.5 each, and one rival of -1.5."""
    names = [tokenizer.token_text(token) for token in ids]
    rival = tokenizer.token_text(3)
    return {
        "tokens": names,
        "token_logprobs": [-0.5] * len(names),
        "top_logprobs": [{name: -0.5, rival: -1.5} for name in names],
        "text_offset": [0] * len(names),
    }
