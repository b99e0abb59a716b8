"""Greedy answers equal transformers' own generation token for token, whatever drafts, alone and in a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from support.answers import count_moves
from support.pairwise import by_turns
from support.tiny_models import COUNT, FAMILIES, PROMPTS, VOCAB, noisy, packed, reference, reference_with_lead, stock
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters import (
    Cascade,
    Drafter,
    DraftModel,
    Lookahead,
    NgramDrafter,
    NoDrafter,
    PromptLookup,
    SuffixDrafter,
)
from truedraft.drafters.ngram.table import NgramTable
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.training import count_ngrams

GAMMA = 4
NOISE = {"gemma3": 0.06}
PARAMS = SamplingParams(max_tokens=COUNT)

target = cache(packed)
draft = cache(noisy)


@cache
def table(family: str) -> NgramTable:
    """Counted in half of what the target answers, so that some guesses are right and others are not."""
    answers = [[*prompt[-1:], *answer] for prompt, answer in zip(PROMPTS, reference(family), strict=True)]
    return count_ngrams([text[: len(text) // 2] for text in answers], VOCAB, 3)


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "none": lambda family: NoDrafter(),
    "prompt lookup": lambda family: PromptLookup(num_speculative_tokens=5, max_ngram=3, min_ngram=1),
    "n-gram tree": lambda family: NgramDrafter(table(family)),
    "lookahead": lambda family: Lookahead(window=4, ngram=3, candidates=3),
    "draft chain": lambda family: DraftModel(draft(family, NOISE.get(family, 0.03)), num_speculative_tokens=GAMMA),
    "draft tree": lambda family: DraftModel(draft(family, 2 * NOISE.get(family, 0.03)), branching=(3, 2, 1)),
    "suffix": lambda family: SuffixDrafter(),
    "cascade": lambda family: Cascade(
        PromptLookup(min_ngram=1), DraftModel(draft(family, NOISE.get(family, 0.03))), num_speculative_tokens=6
    ),
    "itself": lambda family: DraftModel(target(family), num_speculative_tokens=GAMMA),
    "itself as a tree": lambda family: DraftModel(target(family), branching=(3, 2, 1)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answers_wander(family: str) -> None:
    """What everything here is compared with can tell a broken cache: many tokens, and no near tie."""
    assert min(len(set(answer)) for answer in reference(family)) >= 20
    assert reference_with_lead(family)[1] > 1e-3


@pytest.mark.parametrize(("family", "drafter"), by_turns(FAMILIES, DRAFTERS, always=["draft tree"]))
def test_greedy_equals_transformers(family: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = count_moves(monkeypatch)
    engine = Engine(target(family), DRAFTERS[drafter](family), controller="fixed")
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)

    assert tuple(tuple(answer.token_ids) for answer in batch) == reference(family)
    assert not any(answer.warnings for answer in batch)
    if family == "llama":  # of all families' rows `test_packed_forward` says that they do not hang on their neighbours
        alone = Engine(target(family), DRAFTERS[drafter](family), controller="fixed").generate([*PROMPTS[0]], PARAMS)
        assert tuple(alone.token_ids) == reference(family)[0] and not alone.warnings
        assert alone.stats == batch[0].stats, "what is drafted depends on the neighbours"

    total = sum((answer.stats for answer in batch), Counters())
    assert total.emitted_tokens + total.prefill_tokens == 4 * COUNT
    if drafter == "none":
        assert total.draft_tokens == 0
        assert total.target_calls == 4 * (COUNT - 1)
    elif drafter.startswith("itself"):
        # Full acceptance: every call emits one token more than the proposal is deep, the last one what is left.
        depth = GAMMA if drafter == "itself" else 3
        assert total.target_calls == 4 * -(-(COUNT - 1) // (depth + 1))
        assert total.tried_per_position == total.accepted_per_position
        assert total.draft_acceptance_rate == 1.0 or drafter == "itself as a tree"
    elif drafter in ("prompt lookup", "suffix"):
        assert total.draft_tokens > 0
    elif drafter.startswith("n-gram"):
        assert 0 < total.accepted_tokens < total.draft_tokens
    elif drafter == "lookahead":
        assert total.accepted_tokens > 0
    else:
        # Otherwise the draft tests nothing: some paths are kept in full, some in part, some not at all.
        rate = total.accepted_per_position[0] / total.tried_per_position[0]
        assert 0.15 < rate < 0.97
        assert total.accepted_per_position[-1] > 0
    if drafter in ("draft tree", "lookahead"):
        assert moved, "no path through a later sibling was accepted, so nothing was moved in the cache"


FAST = ("llama", "qwen3", "mistral", "gpt_neox", "gemma3")
FAST_DRAFTERS = ("none", "prompt lookup", "n-gram tree", "draft chain", "draft tree")


@pytest.mark.parametrize(("family", "drafter"), by_turns(FAST, FAST_DRAFTERS, always=["draft tree"]))
def test_greedy_by_fast_paths_equals_transformers(family: str, drafter: str) -> None:
    """Most of these families run in a loop of their own; the other keeps its own modules, with packed weights."""
    model = HuggingFaceModel(stock(family), None, family, fastest_backend)
    assert model.fast_paths and isinstance(model._backend, StockBackend) == (family == "gpt_neox")
    engine = Engine(model, DRAFTERS[drafter](family), controller="fixed")
    if drafter == "none":
        assert tuple(engine.generate(list(PROMPTS[0]), PARAMS).token_ids) == reference(family)[0]
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert tuple(tuple(answer.token_ids) for answer in batch) == reference(family)
    assert not any(answer.warnings for answer in batch)
    drafted = sum(answer.stats.draft_tokens for answer in batch)
    assert (drafted == 0) == (drafter == "none")
    if drafter.startswith(("draft", "n-gram")):
        assert 0 < sum(answer.stats.accepted_tokens for answer in batch) < drafted
