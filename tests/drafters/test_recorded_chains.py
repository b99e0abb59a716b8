"""A draft model's chains that are drafted in one recording are those that it drafts level by level.

Forwards have other numbers of rows then, so distributions are equal up to the rounding of float32 products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters.heads.test_recorded_drafts import assert_equal
from engine.test_one_wait import standing_in
from support.backends import HostRecorder, graph_backend
from support.layer_heads import noted
from support.tiny_models import PROMPTS, noisy_stock, stock
from truedraft import Engine, SamplingParams
from truedraft.core import transfers
from truedraft.drafters import DraftModel
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.huggingface import HuggingFaceModel

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=33, temperature=0.7, seed=5, ignore_eos=True)
NUCLEUS = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, ignore_eos=True)
SHAPED = SamplingParams(max_tokens=20, temperature=0.9, repetition_penalty=1.2, ignore_eos=True)
BATCHES = {
    "greedy": [GREEDY] * 3,
    "sampled": [SAMPLED, PLAIN, SAMPLED],
    "seeded": [SEEDED] * 2,
    "mixed": [NUCLEUS, GREEDY, SEEDED, SAMPLED, PLAIN, SHAPED],
    "alone": [PLAIN],
}


def drafted(
    params: Sequence[SamplingParams], *, recorded: bool, max_batch: int = 8, length: int = 4, notes: bool = True
) -> tuple[Any, ...]:
    """What answers and proposals are; answers of a target whose draft often errs."""
    recorders: list[HostRecorder] = []

    def made(module: PreTrainedModel) -> GraphBackend:
        recorders.append(HostRecorder())
        return graph_backend(module, recorders[-1])

    draft = HuggingFaceModel(noisy_stock("llama", 0.1), None, "draft", made)
    if not recorded:
        draft._backend.records_chains = False
    drafter = (noted(DraftModel) if notes else DraftModel)(draft, length)
    target = HuggingFaceModel(stock("llama"), None, "target", graph_backend)
    engine = Engine(target, drafter, controller="fixed", entropy=3, max_batch=max_batch)
    answers = engine.generate([list(PROMPTS[number % len(PROMPTS)]) for number in range(len(params))], list(params))
    assert all(answer.warnings == () for answer in answers)
    assert draft.pool is not None and draft.pool.in_use == 0
    proposals = [
        (text, each.tree.host_ids, each.tree.shape, each.draws, each.probs)
        for text, each in getattr(drafter, "seen", [])
    ]
    return [answer.token_ids for answer in answers], sorted(proposals, key=lambda each: repr(each[:4])), recorders[0]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "waits", lambda device: True)


@pytest.mark.parametrize("max_batch", [2, 8])
@pytest.mark.parametrize("name", BATCHES)
def test_chains_are_those_drafted_level_by_level(name: str, max_batch: int) -> None:
    """Requests come and go, and have different options."""
    whole, levels = (drafted(BATCHES[name], recorded=recorded, max_batch=max_batch) for recorded in (True, False))
    assert_equal(whole, levels)
    assert len(whole[1]) > 10


def test_a_draft_is_one_replay() -> None:
    whole, levels = (drafted([GREEDY], recorded=recorded) for recorded in (True, False))
    assert whole[0] == levels[0]
    replays, before = (sum(each.replays for each in found[2].made) for found in (whole, levels))
    assert replays < len(whole[1]) and before > 2 * len(levels[1])


@pytest.mark.parametrize("name", ["greedy", "sampled", "seeded"])
def test_the_host_waits_once_in_a_step(name: str) -> None:
    plain = drafted(BATCHES[name], recorded=True)
    with standing_in() as device:
        answers = drafted(BATCHES[name], recorded=True, notes=False)[0]
    assert answers == plain[0]
    assert device.fetches and set(device.fetches) <= {0, 1}


def test_a_chain_of_one_token_and_ends_of_answers() -> None:
    """Budgets are cut at an answer's end, those of one request before another's."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 9, 14, 2)]
    for length in (1, 6):
        whole, levels = (drafted(params, recorded=recorded, length=length) for recorded in (True, False))
        assert_equal(whole, levels)


def test_broken_logits_give_tokens_that_exist() -> None:
    """Token 0 by a distribution that is one-hot there, as level by level."""
    from truedraft.drafters.draws import _coupled_token, _drawn_token, _likeliest_token

    logits = torch.full((3, 7), -torch.inf)
    logits[1] = torch.nan
    logits[2, 4] = 1.0
    temperature, uniform = torch.full((3,), 0.8, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)
    for tokens, probs in (
        _drawn_token(logits, temperature, uniform),
        _coupled_token(logits, temperature, torch.tensor([3, 4, 5])),
    ):
        assert tokens.tolist() == [0, 0, 4]
        assert probs is not None and probs.argmax(-1).tolist() == [0, 0, 4] and bool((probs.sum(-1) == 1.0).all())
    tokens, probs = _likeliest_token(logits)
    assert probs is None and tokens.tolist()[0] == 0 and tokens.tolist()[2] == 4 and int(tokens.max()) < 7
