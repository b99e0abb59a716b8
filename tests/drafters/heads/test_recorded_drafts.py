"""Drafts of heads with layers of their own that are one recording are those that are drafted level by level."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drafters.heads.test_levels import head as level_head
from engine.test_one_wait import standing_in
from support.backends import HostRecorder
from support.layer_heads import Records, target
from support.recorded_heads import StrictRecorder
from support.tiny_models import PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.core import transfers
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle
from truedraft.kinds.block.drafter import BlockRunner
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.eagle.drafter import Eagle3Runner
from truedraft.models.backends.graphs.replay import Recorder
from truedraft.models.base import LanguageModel

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.7, seed=5, ignore_eos=True)
SHAPED = SamplingParams(max_tokens=12, presence_penalty=0.5, ignore_eos=True)
TEXTS = [PROMPTS[0], PROMPTS[1], [(7 * place + 1) % VOCAB for place in range(90)]]
NAMES = [
    "EAGLE-3", "EAGLE-3, fewer ids", "P-EAGLE, fewer ids", "DFlash", "DSpark, fewer ids", "recurrent", "DFlash 2",
]  # fmt: skip


def drafter(name: str, recorder: Recorder | None, **options: Any) -> Any:
    bases: dict[str, Any] = {"EAGLE-3": Eagle3, "P-EAGLE": PEagle, "DFlash": DFlash, "DFlash 2": DFlash2}
    base: Any = bases.get(name.partition(",")[0], DSpark)
    run: Any = getattr(base, "runs", Eagle3Runner)

    class Noted(Records, base):  # type: ignore[misc]
        def _new_runner(self, model: LanguageModel) -> Any:
            self.recorder = recorder
            self._mask = self.head.mask_hidden[0] if base is PEagle else None
            return run(self.head, model, self.recorder, self._replaced(model))

    return Noted(level_head(name), **options)


def drafted(name: str, params: Sequence[SamplingParams], recorded: bool, **options: Any) -> tuple[Any, list[Any], Any]:
    """Answers, what was proposed behind which text, and the drafter."""
    made = drafter(name, HostRecorder() if recorded else None, **options)
    engine = Engine(target(), made, max_batch=2, controller="fixed", entropy=3)
    answers = engine.generate([list(each) for each in TEXTS], [params[n % len(params)] for n in range(len(TEXTS))])
    assert all(answer.warnings == () for answer in answers)
    assert made._running[0].pool.in_use == 0
    seen = [(text, own.tree.host_ids, own.tree.shape.parents, own.draws, own.probs) for text, own in made.seen]
    return [answer.token_ids for answer in answers], sorted(seen, key=repr), made


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    assert [each[:4] for each in ours[1]] == [each[:4] for each in theirs[1]]
    for (*_, own), (*_, other) in zip(ours[1], theirs[1], strict=True):
        assert (own is None) is (other is None)
        assert own is None or torch.allclose(own, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_likeliest_trees_are_those_of_the_search_on_the_host(name: str) -> None:
    """Also beside requests that are drafted level by level, for their options change the logits."""
    ours, theirs = (drafted(name, [GREEDY, SHAPED, GREEDY], recorded, nodes=9, beams=3) for recorded in (True, False))
    assert_equal(ours, theirs)
    assert max(len(ids) for _, ids, *_ in ours[1]) == 9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [[SAMPLED], [SEEDED, GREEDY]], ids=["sampled", "seeded and greedy"])
@torch.inference_mode()
def test_chains_are_those_drafted_level_by_level(
    name: str, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    ours, theirs = (drafted(name, params, recorded) for recorded in (True, False))
    assert_equal(ours, theirs)
    assert max(len(ids) for _, ids, *_ in ours[1]) >= 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("EAGLE-3, fewer ids", {"branching": (3, 2, 1)}),
        ("DFlash", {"branching": (2, 2, 1)}),
        ("DFlash 2", {"branching": (2, 2, 1)}),
        ("recurrent", {"min_probability": 0.05}),
        ("DSpark", {"min_acceptance": 0.3}),
    ],
)
@torch.inference_mode()
def test_trees_whose_levels_the_host_looks_at(name: str, options: Any) -> None:
    """Each forward is recorded."""
    ours, theirs = (drafted(name, [SAMPLED, GREEDY], recorded, **options) for recorded in (True, False))
    assert_equal(ours, theirs)
    assert sum(each.replays for each in ours[2].recorder.made) > 5


@pytest.mark.parametrize("name", ["EAGLE-3", "P-EAGLE, fewer ids", "DFlash", "recurrent", "DFlash 2"])
@pytest.mark.parametrize("options", [{}, {"nodes": 9, "beams": 3}], ids=["chain", "tree"])
@torch.inference_mode()
def test_a_draft_is_one_replay_and_the_host_waits_once_for_its_shape(name: str, options: Any) -> None:
    waits = 2 if options else 1  # with the verdict; that of a chain is known
    model = target("graphs")
    model.unembed(torch.zeros(1, model.head_width))  # which is checked once
    with standing_in() as device:
        made = drafter(name, StrictRecorder(), **options)
        engine = Engine(model, made, controller="fixed")
        runs: list[tuple[int, int]] = []
        engine.listeners.append(
            lambda step: runs.append((step.nodes, made.warmups + sum(each.replays for each in made.recorder.made)))
        )
        engine.generate(list(PROMPTS[0]), GREEDY)
    again = [now[1] - was[1] for was, now in itertools.pairwise(runs) if now[0]]
    # What is recorded ran once before, and counts twice then.
    assert len(again) > 6 and set(again) <= {1, 2} and again.count(2) <= len(made.recorder.made)
    assert set(device.fetches) <= {0, 1, waits} and device.fetches.count(waits) > 6


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
@torch.inference_mode()
def test_what_leaves_a_block_is_what_leaves_it_unrecorded(name: str) -> None:
    """Behind texts of different lengths, of which one is longer than what is recorded; the same bits each time."""
    made, model, generator = level_head(name), target(), torch.Generator().manual_seed(4)
    runner, plain = BlockRunner(made, model, HostRecorder()), BlockRunner(made, model)
    vectors = [torch.randn(rows, 96, generator=generator) for rows in (1, 3, 90, 17)]
    found = []
    for each in (plain, runner, runner, runner):
        caches = [each.pool.acquire() for _ in vectors]
        found.append([each.run(caches, [own[first:] for own in vectors], [5, 8, 2, 1])[0] for first in (0, 0)])
        assert [cache.length for cache in caches] == [2 * len(own) for own in vectors]
        for cache in caches:
            each.pool.release(cache)
    expected, *again = found
    for first, second in again:
        torch.testing.assert_close([first, second], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(first, again[0][0]) and torch.equal(second, again[0][1])
    assert (runner.warmups, plain.warmups) == (2, 0), "one shape, which ran as it is and then was recorded"
