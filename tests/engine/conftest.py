from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.answers import every_answer_checked


@pytest.fixture(autouse=True)
def _answers_are_consistent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each answer of each test here; only tests marked `plants_failures` may see warnings."""
    with every_answer_checked(monkeypatch, warned=request.node.get_closest_marker("plants_failures") is not None):
        yield
