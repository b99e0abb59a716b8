"""Heads that run from recordings draft what they draft without, to the bit: Medusa's, and recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support import fixed_noise
from support.backends import fused_backend
from support.head_models import SHARPENED, random_heads, random_redrafter
from support.layer_heads import Records, noted
from support.recorded_heads import RecordedMedusa, RecordedRedrafter, StrictRecorder
from support.tiny_models import stock
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Medusa, Redrafter
from truedraft.drafters.heads.head import HeadRecord
from truedraft.models.backends.graphs.replay import CudaGraphs, Outputs, RecordedFunction
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.testing import ScriptedController

GREEDY = SamplingParams()
MILD, WARM = SamplingParams(temperature=0.5), SamplingParams(temperature=0.95, top_p=0.9)
SEEDED = SamplingParams(temperature=0.8, top_k=20, seed=5)
BATCHES = {
    "greedy": [GREEDY] * 5,
    "sampled": [MILD] * 5,
    "seeded": [SEEDED] * 5,
    "mixed": [MILD, GREEDY, SEEDED, WARM, replace(SEEDED, temperature=1.0, seed=9)],
    "alone": [GREEDY],
}
"""Requests of different lengths, so that they come and go."""


def target() -> HuggingFaceModel:
    """Rows of its LM head have the same bits in any company, so padding changes none."""
    return HuggingFaceModel(stock("llama"), None, "llama", fused_backend)


def medusa(kind: type[Medusa], model: LanguageModel, *, fixed: bool = False) -> Medusa:
    """Trees that are chosen at each step by calibrated survival, or fixed ones."""
    heads = random_heads(model, heads=3, layers=2, reads_token=True, spread=0.05)
    heads = heads.with_record(HeadRecord(facts={"survival": {"greedy": SHARPENED, "sampled": SHARPENED}}))
    if not fixed:
        return kind(heads, nodes=9)
    tree = RankTree.cartesian((3, 2, 1))
    return kind(heads, {"greedy": tree, "sampled": tree.first(7)}, nodes=len(tree))


def redrafter(kind: type[Redrafter], model: LanguageModel) -> Redrafter:
    """Beams that are chosen by calibrated survival, and for warm and seeded requests beams that are drawn."""
    head = random_redrafter(model, state=24, spread=0.5, length=4)
    facts = {"survival": {"greedy": SHARPENED, "coupled": SHARPENED}}
    return kind(head.with_record(HeadRecord(facts=facts)), beams=4, nodes=9)


MAKERS: dict[str, Callable[[bool, LanguageModel], Any]] = {
    "medusa": lambda recorded, model: medusa(noted(RecordedMedusa if recorded else Medusa), model),
    "fixed trees": lambda recorded, model: medusa(noted(RecordedMedusa if recorded else Medusa), model, fixed=True),
    "beams": lambda recorded, model: redrafter(noted(RecordedRedrafter if recorded else Redrafter), model),
}


def run(make: Callable[[bool, LanguageModel], Any], recorded: bool, params: Sequence[SamplingParams]) -> Any:
    """Answers to requests that come and go, by budgets that change, and the drafter that drafted for them."""
    model = target()
    drafter = make(recorded, model)
    budgets = [Budget(1 + step % 4, 1 + step * 5 % 7, 1 + step * 7 % 12) for step in range(40)]
    engine = Engine(model, drafter, controller=ScriptedController([*budgets, drafter.limits]), max_batch=4)
    lengths = (28, 40, 12, 31, 17)
    prompts = [[7 * request + each for each in range(2 + 3 * request)] for request in range(len(params))]
    asked = [replace(own, max_tokens=tokens) for own, tokens in zip(params, lengths, strict=False)]
    answers = fixed_noise.answers_of(engine, prompts, asked)
    assert all(answer.warnings == () for answer in answers)
    return [(each.token_ids, each.stats) for each in answers], drafter


def told(drafter: Records) -> list[tuple[Any, ...]]:
    """All that was proposed, to the bit."""
    return [
        (text, own.tree.host_ids, own.tree.shape.parents, own.draws, None if own.probs is None else own.probs.tolist())
        for text, own in drafter.drafted
    ]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_drafted_is_the_same_to_the_bit(kind: str, batch: str) -> None:
    expected, plain = run(MAKERS[kind], False, BATCHES[batch])
    found, recorded = run(MAKERS[kind], True, BATCHES[batch])
    assert told(recorded) == told(plain)
    assert found == expected
    assert len(told(plain)) > 10
    assert sum(each.replays for each in recorded.recorder.made) > 5
    assert plain.warmups == 0
    assert recorded.warmups > len(recorded.recorder.made)


@pytest.mark.parametrize("kind", MAKERS)
def test_calls_that_are_recorded_are_counted_and_then_no_more(kind: str) -> None:
    model = target()
    drafter = MAKERS[kind](True, model)
    assert drafter.warmups == 0
    engine = Engine(model, drafter, controller="fixed")
    counted = []
    for _ in range(3):
        engine.generate([3, 1, 4], SamplingParams(max_tokens=24))
        counted.append(drafter.warmups)
    assert counted == [2, 2, 2]


@pytest.mark.parametrize(
    "step", [lambda x: (x[x > 0],), lambda x: (x * float(x.sum()),), lambda x: (x + torch.tensor([1.0]),)]
)
def test_what_a_graph_cannot_hold_is_noticed(step: Callable[[Tensor], Outputs]) -> None:
    function = RecordedFunction(step, StrictRecorder())
    numbers = torch.tensor([[1.0], [2.0]])
    function([numbers])
    with pytest.raises(AssertionError, match=r"waits for the device|copies numbers"):
        function([numbers])


@pytest.mark.parametrize(
    ("device", "records", "expected"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_heads_are_recorded_beside_targets_that_are(device: str, records: bool, expected: bool) -> None:
    """Others' LM heads may do on the host what a graph cannot hold, as one that is shared out among processes does."""
    model = target()
    drafter = medusa(Medusa, model)
    beside = SimpleNamespace(device=torch.device(device), records_chains=records)
    assert isinstance(drafter._recorder(beside), CudaGraphs) == expected  # type: ignore[arg-type]
