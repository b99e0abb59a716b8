"""A server of the test's own, in this process, on an address of this machine alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

from support.embedded_models import embedded
from truedraft import Engine
from truedraft.drafters import Drafter
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.models.base import LanguageModel
from truedraft.server import ServerOptions, application
from truedraft.server.options import bound_socket
from truedraft.server.service import Service

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}# tools: {{ tools | tojson }} <tool_call>\n{% endif %}# assistant:"
)


@dataclass
class Running:
    """A server that listens."""

    url: str  # without /v1
    service: Service
    engine: Engine


@contextlib.contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Running]:
    """A server over an engine, until the block ends."""
    asked = replace(ServerOptions(port=0, served_model_name=("tiny", "alias")), **options)
    app, service = application(engine, asked, "tiny")
    listening = bound_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", service, engine)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def target() -> LanguageModel:
    return embedded()


@pytest.fixture(scope="session")
def drafter(target: LanguageModel) -> Drafter:
    return from_spec("portfolio(draft;prompt-lookup)", target)


@pytest.fixture(scope="session")
def make_engine(target: LanguageModel, drafter: Drafter) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        return Engine(target, with_own_drafts(drafter), controller="fixed", prefix_cache_bytes=1 << 26, **options)

    return make


@pytest.fixture(scope="session")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("templates") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


def openai_client(running: Running) -> Any:
    """The official client of a server."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    return openai_client(running)


@pytest.fixture(scope="session")
def running(make_engine: Callable[..., Engine], template_file: Any) -> Iterator[Running]:
    engine = make_engine()
    with serving(engine, chat_template=template_file, allow_rule=("block", "speculative,lenience=0.5")) as found:
        yield found
        deadline = time.monotonic() + 10
        while not found.service.is_idle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found.service.is_idle, "requests are left over"
    assert engine.check_idle() == []
