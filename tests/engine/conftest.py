from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.answers import every_answer_checked
from truedraft import Engine


@pytest.fixture(autouse=True)
def _answers_are_consistent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each answer of each test here; only tests marked `plants_failures` may see warnings."""
    with every_answer_checked(monkeypatch, warned=request.node.get_closest_marker("plants_failures") is not None):
        yield


@pytest.fixture(autouse=True)
def _idle_engines_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine's own check, after each test and whenever an engine of it became idle."""
    engines: list[Engine] = []
    lost: list[str] = []
    create, check = Engine.__init__, Engine.check_idle

    def created(engine: Engine, *parts: Any, **options: Any) -> None:
        create(engine, *parts, **options)
        engines.append(engine)

    def checked(engine: Engine) -> list[str]:
        found = check(engine)
        lost.extend(found)
        return found

    monkeypatch.setattr(Engine, "__init__", created)
    monkeypatch.setattr(Engine, "check_idle", checked)
    yield
    for engine in engines:
        if hasattr(engine, "_scheduler") and engine._scheduler.idle:
            engine.check_idle()
    assert lost == []
