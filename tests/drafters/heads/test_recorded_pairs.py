"""Heads that read pairs, replayed from recordings, draft what they draft without: `GraphPairs` on a stand-in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kinds.eagle.test_eagle import VARIANTS, follow_the_page, head
from support.backends import HostRecorder
from support.layer_heads import Records, target
from support.tiny_models import PROMPTS
from truedraft import Engine, SamplingParams
from truedraft.drafters import Eagle3
from truedraft.kinds.eagle.drafter import Eagle3Runner
from truedraft.models.base import LanguageModel
from truedraft.training.online.tenants import Tenants


class Replayed(Records, Eagle3):
    """Drafts from recordings."""

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        self.recorder = HostRecorder()
        return Eagle3Runner(self.head, target, self.recorder)


class Direct(Records, Eagle3):
    pass


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_replayed_chains_are_what_the_page_says(name: str) -> None:
    made = head(**VARIANTS[name])
    drafter = Replayed(made)
    follow_the_page(made, drafter)
    assert sum(each.replays for each in drafter.recorder.made) > 40


@pytest.mark.parametrize("options", [{"nodes": 9}, {"branching": (3, 2, 1)}], ids=["likeliest", "branching"])
@pytest.mark.parametrize("name", ["as published", "fewer ids", "EAGLE-3.1"])
def test_replayed_trees_are_those_of_its_modules(name: str, options: dict[str, Any]) -> None:
    """Also of several requests at once, which come and go, so that pages change hands."""
    prompts, params = [list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=40)
    seen = {}
    for kind in (Direct, Replayed):
        drafter = kind(head(**VARIANTS[name]), **options)
        engine = Engine(target(), drafter, max_batch=2, controller="fixed")
        answers = engine.generate(prompts, params)
        assert all(answer.warnings == () for answer in answers)
        seen[kind] = [(list(text), list(proposal.tree.host_ids)) for text, proposal in drafter.seen]
        assert drafter._running[0].pool.in_use == 0
    assert seen[Direct] == seen[Replayed]


def test_forwards_that_are_recorded_are_counted() -> None:
    """And steps in which there was one are not settled, though the target records nothing."""
    drafter = Replayed(head())
    engine = Engine(target(), drafter, controller="fixed")
    counted, settled = [0], []
    engine.listeners.append(lambda step: counted.append(drafter.warmups))
    engine.listeners.append(lambda step: settled.append(step.settled))
    for _ in range(3):
        before = drafter.warmups
        engine.generate(list(PROMPTS[0]), SamplingParams(max_tokens=24))
    assert drafter.warmups == before > 0
    assert settled == [now == was for was, now in itertools.pairwise(counted)]


def test_forwards_of_each_tenants_heads_are_counted() -> None:
    """Those of one tenant's own, made of other weights, and of the heads that the others have."""
    tenants = Tenants(Replayed(head()))
    engine = Engine(target(), tenants, controller="fixed")
    tenants.take("a", head())
    counts = []
    for scope in ("a", None):
        engine.submit(list(PROMPTS[0]), SamplingParams(max_tokens=8), scope=scope)
        while engine.step():
            pass
        counts.append((tenants.warmups, tenants.base.warmups))
    assert counts[0][0] > 0 == counts[0][1]
    assert counts[1][0] > counts[0][0] and counts[1][1] == counts[1][0] - counts[0][0]
