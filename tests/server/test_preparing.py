"""A form that takes long to prepare holds nobody up, and its request is one like any other meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.conftest import serving
from server.test_load import get, open_stream, post, wait_for
from truedraft import Engine
from truedraft.text.forms import Forms
from truedraft.text.trial import CancelledError

pytest.importorskip("llguidance")


class SlowTrial:
    """Takes until the test lets it go, or until it is cancelled."""

    def __init__(self) -> None:
        self.continues = threading.Event()
        self.cancelled = False

    def run(self, *_: Any) -> int:
        running.append(self)
        most.append(len(running))
        self.continues.wait(60)
        running.remove(self)
        if self.cancelled:
            raise CancelledError
        return 1 << 20

    def cancel(self) -> None:
        self.cancelled = True
        self.continues.set()


running: list[SlowTrial] = []
most: list[int] = []


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("truedraft.server.preparing.Trial", SlowTrial)
    running.clear()
    most.clear()
    yield
    assert not running


def hostile(number: int = 0) -> dict[str, Any]:
    """A body whose form is not known to take little; each number is another form."""
    form = {"grammar": f"start: A\nA: /a{{1,{number + 2}}}/ & /[a-z]+/"}
    return {"prompt": "x", "max_tokens": 4, "temperature": 0, "structured_outputs": form}


def ordinary() -> list[dict[str, Any]]:
    """What others ask: a text, a form, a long text, the same as a form."""
    form = {"structured_outputs": {"choice": ["ab", "cd"]}}
    long = "class FunctionalityOfSomething(BaseException):\n    pass\n" * 75
    texts = {"prompt": "def f("}, {"prompt": "x"} | form, {"prompt": long}, {"prompt": long} | form
    return [(body | {"max_tokens": 3, "temperature": 0}) for body in texts]


def test_nobody_waits_for_forms_of_others(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(), max_queue=8) as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, server.url, hostile(number)) for number in range(8)]
        wait_for(lambda: server.service._reserved == 8 and len(running) == 1)
        for body in ordinary():
            status, _, told = post(server.url, body)
            assert status == 200 and told["choices"][0]["text"], told
        assert get(server.url, "/health")[0] == 200
        for _ in asked:
            wait_for(lambda: len(running) == 1)
            running[0].continues.set()
            wait_for(lambda: not running or not running[0].continues.is_set())
        assert [each.result()[0] for each in asked] == [200] * 8
        assert max(most) == 1, "one at a time"
        assert post(server.url, hostile(3))[0] == 200 and len(most) == 8, "it is kept"
        assert server.service.is_idle


def test_who_waits_for_a_form_has_a_place_in_the_queue(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine(max_batch=1), max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, server.url, hostile(number)) for number in range(2)]
        wait_for(lambda: server.service._reserved == 2)
        for body in (hostile(5), ordinary()[0]):
            status, _, told = post(server.url, body)
            assert status == 429 and "2 requests wait already" in told["error"]["message"]
        release(asked)


def release(asked: list[Future[Any]]) -> None:
    while not all(each.done() for each in asked):
        for each in running:
            each.continues.set()


@pytest.mark.parametrize("end", ["deadline", "client", "abort"])
def test_a_request_that_ends_takes_its_trial_along(make_engine: Callable[..., Engine], end: str) -> None:
    limit = {"request_timeout_s": 2.0} if end == "deadline" else {}
    with serving(make_engine(), **limit) as server, ThreadPoolExecutor(2) as pool:
        if end == "client":
            sockets = [open_stream(server.url, hostile(number)) for number in range(2)]
            wait_for(lambda: len(running) == 1 and server.service._reserved == 2)
            for each in sockets:
                each.close()
        else:
            asked = [pool.submit(post, server.url, hostile(number)) for number in range(2)]
            wait_for(lambda: len(running) == 1 and server.service._reserved == 2)
            if end == "abort":
                assert server.service._loop is not None
                server.service._loop.call_soon_threadsafe(server.service.abort)
            told = [each.result() for each in asked]
            assert [status for status, _, _ in told] == [504 if end == "deadline" else 503] * 2
            words = "the form took longer to prepare" if end == "deadline" else "the server is being stopped"
            assert all(words in body["error"]["message"] for _, _, body in told)
        wait_for(lambda: server.service.is_idle and not running)
        assert len(most) <= 2
        if end != "abort":
            assert post(server.url, ordinary()[1])[0] == 200


def test_a_server_that_drains_answers_who_waits_for_a_form(make_engine: Callable[..., Engine]) -> None:
    with serving(make_engine()) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server.url, hostile())
        wait_for(lambda: len(running) == 1)
        server.service.draining = True
        assert not server.service.is_idle and post(server.url, ordinary()[0])[0] == 503
        release([asked])
        assert asked.result()[0] == 200


@pytest.mark.parametrize("shared", [False, True])
def test_clients_share_no_prepared_forms(
    shared: bool, make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How soon an answer begins would tell which forms others asked for."""
    made: list[object] = []
    make = Forms.make
    monkeypatch.setattr(Forms, "make", lambda self, *given: (made.append(given[0]), make(self, *given))[1])
    file = tmp_path / "keys"
    file.write_text("a secret-a\nb secret-b\n")
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}
    with serving(make_engine(), api_key_file=file, share_prefixes=shared) as server:
        for key, count in (("a", 1), ("a", 1), ("b", 1 if shared else 2), ("a", 1 if shared else 2)):
            assert post(server.url, body, Authorization=f"Bearer secret-{key}")[0] == 200
            assert len(made) == count
