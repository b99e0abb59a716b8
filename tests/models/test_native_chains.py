"""Chains that the native forward drafts in one call are those that it drafts level by level, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.test_native_forward import CONFIGS, native, needs_library
from truedraft import SamplingParams
from truedraft.core import fused
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.shaping import Shaping
from truedraft.drafters import DraftModel, DraftRequest
from truedraft.drafters.base import StepOutcome
from truedraft.models.backends.native import backend
from truedraft.models.backends.native.memory import Scratch
from truedraft.models.base import DrawnChain
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = needs_library

GREEDY, SAMPLED = SamplingParams(max_tokens=200), SamplingParams(temperature=0.8, max_tokens=200)
BUDGETS = {
    "all": Budget(24),
    "a few nodes": Budget(24, 1, 3),
    "likely tokens": Budget(24, min_probability=0.03),
    "expected to survive": Budget(24, floor=0.02, odds=(0.3, 0.4)),
    "one": Budget(1),
}
Proposed = tuple[list[int], Any, Any, Tensor | None, Sequence[float], int]


class Counted(DraftModel):
    """A draft of which each call for a chain is counted; one that is not `whole` drafts level by level."""

    def __init__(self, model: HuggingFaceModel, whole: bool, ids: Tensor | None) -> None:
        super().__init__(model, 24, ids=ids)
        guessing: Any = self._guessing
        drafts, self.answered = guessing.draft_chain, 0
        if not whole:
            guessing._backend._draws = None

        def counted(*given: Any) -> DrawnChain:
            self.answered += 1
            found: DrawnChain = drafts(*given)
            return found

        guessing.draft_chain = counted


def drafted(drafter: DraftModel, params: SamplingParams, length: int, shaped: bool = False) -> list[Proposed]:
    """What is proposed, and kept in its cache, in some steps after a text that accept other numbers of tokens."""
    vocab, draw = drafter.model.vocab_size, random.Random(length)
    text = [draw.randrange(vocab) for _ in range(length)]
    shaping = Shaping(params, text, length, (), (), vocab) if shaped else None
    request = DraftRequest(0, params, text, shaping=shaping)
    drafter.begin(request)
    found: list[Proposed] = []
    for step, budget in enumerate(2 * list(BUDGETS.values())):
        (proposal,) = drafter.propose([request], [budget], [KeyedNoise(3, len(text), step)])
        proposal.check()
        ids = proposal.tree.host_ids
        assert proposal.tree.tokens.tolist() == ids
        accepted = draw.randrange(len(ids) + 1)
        new = (*ids[:accepted], *(draw.randrange(vocab) for _ in range(draw.choice((1, 1, 5)))))
        text.extend(new)
        drafter.observe([request], [StepOutcome(proposal, tuple(range(accepted)), new)])
        kept = drafter.caches[0].length
        found.append((ids, proposal.tree.shape, proposal.draws, proposal.probs, proposal.confidence, kept))
    drafter.end(request)
    return found


def assert_equal(whole: Sequence[Proposed], levels: Sequence[Proposed]) -> None:
    for ours, theirs in zip(whole, levels, strict=True):
        assert (ours[:3], ours[4:]) == (theirs[:3], theirs[4:])
        assert (ours[3] is None) is (theirs[3] is None)
        assert ours[3] is None or theirs[3] is None or ours[3].equal(theirs[3])


@pytest.mark.parametrize("ids", [None, torch.arange(96, 2, -3)], ids=["all ids", "some ids"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nothing fills a unit", torch.float32),
        ("nothing fills a unit", torch.bfloat16),
        ("a window of 3", torch.float32),
        ("two rotations, weights from 1", torch.bfloat16),
        ("experts", torch.float32),
    ],
)
def test_they_are_those_drafted_level_by_level(
    name: str, dtype: torch.dtype, params: SamplingParams, ids: Tensor | None
) -> None:
    for length in (20, 300):  # keys of one chunk, and of two
        whole, levels = (Counted(native(CONFIGS[name](), dtype), whole, ids) for whole in (True, False))
        ours = drafted(whole, params, length)
        assert_equal(ours, drafted(levels, params, length))
        assert (whole.answered, levels.answered) == (2 * len(BUDGETS), 0)
        assert len({len(each[0]) for each in ours}) > 2, "chains end where their budgets say"


@pytest.mark.parametrize(
    ("params", "shaped"),
    [
        (SamplingParams(temperature=0.8, top_p=0.9, max_tokens=200), False),
        (SamplingParams(temperature=0.8, top_k=5, max_tokens=200), False),
        (SamplingParams(temperature=0.8, seed=4, max_tokens=200), False),
        (SamplingParams(temperature=0.8, frequency_penalty=0.5, max_tokens=200), True),
    ],
    ids=["top-p", "top-k", "seeded", "penalties"],
)
def test_other_options_are_drafted_level_by_level(params: SamplingParams, shaped: bool) -> None:
    whole, levels = (Counted(native(CONFIGS["nothing fills a unit"]()), whole, None) for whole in (True, False))
    assert_equal(drafted(whole, params, 20, shaped), drafted(levels, params, 20, shaped))
    assert whole.answered == 0


def test_several_requests_are_drafted_level_by_level_together() -> None:
    drafter = Counted(native(CONFIGS["nothing fills a unit"]()), True, None)
    requests = [DraftRequest(number, SAMPLED, [5 + number, 7, 9]) for number in range(2)]
    for request in requests:
        drafter.begin(request)
    noise = [KeyedNoise(number, 3, 0) for number in range(2)]
    together = drafter.propose(requests, [Budget(3)] * 2, noise)
    assert drafter.answered == 0
    for request, own, proposal in zip(requests, noise, together, strict=True):
        (alone,) = drafter.propose([request], [Budget(3)], [own])
        assert alone.tree.host_ids == proposal.tree.host_ids
    assert drafter.answered == 2


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_of_logits_without_a_distribution_nothing_else_is_drafted(params: SamplingParams) -> None:
    def broken() -> HuggingFaceModel:
        model: Any = native(CONFIGS["nothing fills a unit"]())
        of = model._backend._model
        ctypes.memset(of.norm, 0xFF, of.width * ctypes.sizeof(ctypes.c_float))  # NaN, and so are all logits
        return model  # type: ignore[no-any-return]

    whole, levels = (drafted(Counted(broken(), whole, None), params, 20) for whole in (True, False))
    assert [each[0] for each in whole] == [each[0] for each in levels]
    assert params.greedy or not any(each[0] for each in whole)


def test_without_fused_functions_it_drafts_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted(Counted(native(CONFIGS["nothing fills a unit"]()), False, None), SAMPLED, 20)
    monkeypatch.setattr(fused, "addresses", lambda *names: None)
    fresh = Counted(native(CONFIGS["nothing fills a unit"]()), True, None)
    assert_equal(drafted(fresh, SAMPLED, 20), expected)
    assert fresh.answered == 0


@pytest.mark.parametrize("whole", [True, False], ids=["chain", "level by level"])
def test_torchs_threads_may_change_while_a_forward_begins(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine's step does that: memory is for as many threads as run, or these write beyond it."""
    rooms: list[int] = []
    runs: list[int] = []
    of = Scratch.of

    def noted(scratch: Scratch, rows: int, keys: int, threads: int, found: int = 0) -> Any:
        rooms.append(threads)
        return of(scratch, rows, keys, threads, found)

    numbers = itertools.cycle([1, 2, 3])
    monkeypatch.setattr(Scratch, "of", noted)
    monkeypatch.setattr(backend, "forward_threads", lambda: next(numbers))
    drafter = Counted(native(CONFIGS["nothing fills a unit"]()), whole, None)
    found: Any = drafter.model
    place, name = (found._backend, "_forward") if not whole else (found._backend._library, "truedraft_chain")
    run = getattr(place, name)

    class Noted:
        def __call__(self, *given: Any) -> Any:
            runs.append(given[5])
            return run(*given)

    rooms.clear()
    monkeypatch.setattr(place, name, Noted())
    run.restype = ctypes.c_int64 if whole else ctypes.c_int
    request = DraftRequest(0, SAMPLED, [5, 7, 9])
    drafter.begin(request)
    drafter.propose([request], [Budget(3)], [KeyedNoise(0, 3, 0)])
    assert runs and rooms[-len(runs) :] == runs and len(set(rooms)) >= min(len(runs), 2)


@pytest.mark.parametrize("ids", [None, torch.arange(96, 2, -3)], ids=["all ids", "some ids"])
def test_distributions_are_of_float32_while_another_thread_loads_a_model(ids: Tensor | None) -> None:
    """transformers changes torch's default dtype meanwhile; memory for halves would be overrun."""
    expected = drafted(Counted(native(CONFIGS["nothing fills a unit"]()), True, ids), SAMPLED, 20)
    drafter = Counted(native(CONFIGS["nothing fills a unit"]()), True, ids)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_equal(drafted(drafter, SAMPLED, 20), expected)
    finally:
        torch.set_default_dtype(torch.float32)
