"""For all tests: no network, one thread, quiet libraries."""

from __future__ import annotations

import gc
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

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

_MOST = 1
"""Cases of a test that the suite runs: others are marked `slow`. A file that is named runs whole."""
_PARTS = 4
_WHOLE = (
    "core", "verification", "drafters/heads/test_levels.py", "certify/test_mutants.py", "test_docs.py",
)  # fmt: skip
"""Where every case counts: laws that are summed exactly, what each kind of heads draws from, and what must be seen."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-slow PART=0` to 3."""
    parser.addoption("--part", type=int, choices=range(_PARTS), help="which quarter of the selected tests runs")


def _runs_all(config: pytest.Config) -> bool:
    """Whether no files were named; a worker is told."""
    found: bool = getattr(config, "workerinput", {}).get(
        "runs_all", config.args_source is pytest.Config.ArgsSource.TESTPATHS
    )
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of xdist is about to start."""
    node.workerinput["runs_all"] = _runs_all(node.config)


def _hash(item: pytest.Item) -> int:
    return int(hashlib.sha1(item.nodeid.encode()).hexdigest(), 16)


def _mark_slow(items: list[pytest.Item]) -> None:
    """Of a test with many cases a few stay, the same each time, chosen by the hashes of their names."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None and not item.nodeid.removeprefix("tests/").startswith(_WHOLE):
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        for item in sorted(each, key=_hash)[_MOST:]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs, and that which takes minutes first: a worker that began it last would be waited for."""
    if _runs_all(config):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
        _mark_slow(items)
    part: int | None = config.getoption("--part")
    if part is not None:
        config.hook.pytest_deselected(items=[item for item in items if _hash(item) % _PARTS != part])
        items[:] = [item for item in items if _hash(item) % _PARTS == part]


def pytest_collection_finish() -> None:
    """What is loaded by now stays: a full collection need not look through it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _the_machine_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that a test measures are kept, whatever runs beside it."""
    monkeypatch.setattr("truedraft.engine.policy.kept.run_delay_s", lambda: 0.0)


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
