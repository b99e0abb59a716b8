"""Greedy answers equal transformers' own generation token for token, whatever drafts, alone and in a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from support.tiny_models import FAMILIES, PROMPTS, answer_margin, noisy, packed, reference
from truedraft import Engine, SamplingParams
from truedraft.cache import RequestCache
from truedraft.drafters import Drafter, DraftModel, NoDrafter, PromptLookup
from truedraft.models.huggingface import HuggingFaceModel

COUNT = 128
GAMMA = 4
NOISE = {"gemma3": 0.06}
PARAMS = SamplingParams(max_tokens=COUNT)

target = cache(packed)
draft = cache(noisy)

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "none": lambda family: NoDrafter(),
    "prompt lookup": lambda family: PromptLookup(num_speculative_tokens=5, max_ngram=3, min_ngram=1),
    "draft chain": lambda family: DraftModel(draft(family, NOISE.get(family, 0.03)), num_speculative_tokens=GAMMA),
    "draft tree": lambda family: DraftModel(draft(family, 2 * NOISE.get(family, 0.03)), branching=(3, 2, 1)),
    "itself": lambda family: DraftModel(target(family), num_speculative_tokens=GAMMA),
    "itself as a tree": lambda family: DraftModel(target(family), branching=(3, 2, 1)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answers_wander(family: str) -> None:
    """What everything here is compared with can tell a broken cache: many tokens, and no near tie."""
    assert min(len(set(answer)) for answer in reference(family)) >= 20
    assert answer_margin(family) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = count_moves(monkeypatch)
    engine = Engine(target(family), DRAFTERS[drafter](family))
    alone = engine.generate(list(PROMPTS[0]), PARAMS)
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)

    assert tuple(alone.token_ids) == reference(family)[0]
    assert tuple(tuple(answer.token_ids) for answer in batch) == reference(family)
    assert not any(answer.warnings for answer in (alone, *batch))
    assert alone.stats == batch[0].stats, "what is drafted depends on the neighbours"

    total = sum((answer.stats for answer in batch), alone.stats)
    assert total.emitted_tokens + total.prefill_tokens == 5 * COUNT
    if drafter == "none":
        assert total.draft_tokens == 0
        assert total.target_calls == 5 * (COUNT - 1)
    elif drafter.startswith("itself"):
        # Full acceptance: every call emits one token more than the proposal is deep, the last one what is left.
        depth = GAMMA if drafter == "itself" else 3
        assert total.target_calls == 5 * -(-(COUNT - 1) // (depth + 1))
        assert total.tried_per_position == total.accepted_per_position
        assert total.draft_acceptance_rate == 1.0 or drafter == "itself as a tree"
    elif drafter == "prompt lookup":
        assert total.draft_tokens > 0
    else:
        # Otherwise the draft tests nothing: some paths are kept in full, some in part, some not at all.
        rate = total.accepted_per_position[0] / total.tried_per_position[0]
        assert 0.15 < rate < 0.97
        assert total.accepted_per_position[-1] > 0
    if drafter == "draft tree":
        assert moved, "no path through a later sibling was accepted, so nothing was moved in the cache"


def count_moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collects the paths whose commit moves entries."""
    moved: list[tuple[int, ...]] = []
    commit = RequestCache.commit

    def watched(self: RequestCache, path: Sequence[int]) -> None:
        if list(path) != list(range(len(path))):
            moved.append(tuple(path))
        commit(self, path)

    monkeypatch.setattr(RequestCache, "commit", watched)
    return moved


def test_helper_builds_the_same_weights_each_time() -> None:
    first, second = packed("llama"), packed("llama")
    assert isinstance(first, HuggingFaceModel)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert one.equal(other)
