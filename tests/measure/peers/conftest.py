"""What tests of peers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from measure.peers.scripted_server import ScriptedServer, scripted
from truedraft.models.embedded import embedded_folder
from truedraft.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(str(embedded_folder("target")))
    assert found is not None
    return found


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as found:
        yield found
