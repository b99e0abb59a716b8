"""For all tests: no network, one thread, quiet libraries."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before anything imports them: huggingface_hub reads its switch once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from truedraft.machine import keep_rows_alike

# Tiny models: a second thread costs more than it brings, and its neighbours on a busy machine much more.
torch.set_num_threads(1)
# As loading a model does; here a test's own product may be the process's first.
keep_rows_alike(torch.device("cpu"), torch.bfloat16)

gc.disable()  # a fifth of the time of collecting tests


def pytest_collection_finish() -> None:
    """What is loaded by now stays: a full collection need not look through it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _the_machine_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that a test measures are kept, whatever runs beside it."""
    monkeypatch.setattr("truedraft.costs.kept.run_delay_s", lambda: 0.0)


@pytest.fixture(autouse=True)
def _nothing_had_to_be_asked_again(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No engine of a test may get over a failure of its parts, unless the test is marked `plants_failures`.

    A batch that fails is asked again one by one, and then answers rightly; so a broken catch-up would go unseen.
    """
    from truedraft.engine.request import Request

    finish = Request.finish
    recoveries: list[int] = []

    def counted(one: Request) -> object:
        recoveries.append(one.counters.recoveries)
        return finish(one)

    monkeypatch.setattr(Request, "finish", counted)
    yield
    if request.node.get_closest_marker("plants_failures") is None:
        assert not any(recoveries), f"steps or proposals were asked again for one request alone: {recoveries}"
