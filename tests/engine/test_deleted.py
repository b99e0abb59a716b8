"""What is deleted gives its memory back: nothing keeps an engine, its models and their recordings, whatever it did."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kinds.eagle.test_eagle import Replayed, head
from support.backends import HostRecorder, graph_backend
from support.layer_heads import as_transformers_runs_it
from support.tiny_models import VOCAB, noisy_stock, stock
from truedraft import Engine, SamplingParams
from truedraft.drafters import DraftModel
from truedraft.models.huggingface import HuggingFaceModel

PROMPTS = [[place * step % VOCAB for place in range(70)] for step in (3, 5, 7)]
PARAMS = SamplingParams(max_tokens=6)
Use = Callable[[Engine], Any]
"""Lets an engine work; what it gives is kept while the engine is deleted."""


@pytest.fixture(autouse=True)
def _idle_engines_hold_nothing() -> None:
    """The fixture of this name keeps all engines until the test is over."""


class Recorded(HuggingFaceModel):
    """Recorded on the host; the support keeps the module itself, so a copy runs."""

    def __init__(self, module: Any) -> None:
        self.recorder = HostRecorder()
        super().__init__(copy.deepcopy(module), None, "graphs", lambda own: graph_backend(own, self.recorder))


def with_draft(controller: str = "fixed") -> Engine:
    drafter = DraftModel(Recorded(noisy_stock("llama", 0.1)), 3)
    return Engine(Recorded(stock("llama")), drafter, controller=controller, max_batch=2)


def with_head() -> Engine:
    return Engine(Recorded(as_transformers_runs_it()), Replayed(head()), controller="fixed", max_batch=2)


def watched(engine: Engine) -> dict[str, weakref.ref[Any]]:
    """References to all that holds memory, and keep nothing alive."""
    model, draft = engine.target, engine.drafter.model
    assert isinstance(model, Recorded)
    held: dict[str, Any] = {"engine": engine, "target": model, "drafter": engine.drafter, "backend": model._backend}
    held |= {"weights": next(model.module.parameters()), "pages": model._backend.pages._data}  # type: ignore[attr-defined]
    if model.recorder.made:
        held["recording"] = model.recorder.made[-1]
    if isinstance(draft, Recorded):
        held |= {"draft": draft, "weights of the draft": next(draft.module.parameters())}
        if draft.recorder.made:
            held["recording of the draft"] = draft.recorder.made[-1]
    if isinstance(engine.drafter, Replayed):
        held |= {"recording of the head": engine.drafter.recorder.made[-1], "head": engine.drafter._running[0]}
    return {name: weakref.ref(each) for name, each in held.items()}


def left_early(engine: Engine) -> None:
    for _ in engine.stream(PROMPTS[0], PARAMS):
        break
    engine.generate(PROMPTS[0], PARAMS)


def by_tasks(engine: Engine) -> Any:
    async def ask() -> Any:
        async for _ in engine.astream(PROMPTS[1], PARAMS):
            break
        return await engine.agenerate(PROMPTS, PARAMS)

    return asyncio.run(ask())


def by_threads(engine: Engine) -> None:
    threads = [threading.Thread(target=engine.generate, args=(prompt, PARAMS)) for prompt in PROMPTS]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def with_listener(engine: Engine) -> Any:
    records: list[Any] = []
    engine.listeners.append(records.append)
    return records, engine.generate(PROMPTS, PARAMS), engine.generate(PROMPTS, SamplingParams(6, temperature=1.0))


def ready(engine: Engine) -> None:
    engine.make_ready(256)


def with_requests(engine: Engine) -> Any:
    """Who submits them may keep them."""
    requests = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    while engine.step():
        pass
    assert all(request.closed for request in requests)
    return requests


def failing(engine: Engine) -> Any:
    """In the middle of a forward of several requests, and then of one; their answers are kept."""
    assert engine.generate(PROMPTS, PARAMS)
    paged = engine.target._backend._paged  # type: ignore[attr-defined]

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    paged._forward = fail
    answers = engine.generate([[prompt[1]] * 70 for prompt in PROMPTS], PARAMS)
    assert {answer.finish_reason for answer in answers} == {"error"}
    return answers


USES: list[Use] = [left_early, by_tasks, by_threads, with_listener, with_requests, ready, failing]


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore:the step failed")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize(
    "make", [with_draft, with_head, partial(with_draft, "goodput")], ids=["draft", "head", "a draft that is measured"]
)
def test_nothing_keeps_an_engine_that_is_deleted(
    make: Callable[[], Engine], use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "truedraft.engine")  # the fixture keeps errors that are logged, with their frames
    engine = make()
    kept = use(engine)
    held = watched(engine)
    assert all(each() is not None for each in held.values())
    del engine
    gc.collect()
    assert [name for name, each in held.items() if each() is not None] == []
    del kept
