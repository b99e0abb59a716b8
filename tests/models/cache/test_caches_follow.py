"""After every step, target's and draft's caches hold what a fresh forward over the committed tokens computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle

import pytest
import torch

from support.tiny_models import PROMPTS, noisy, packed
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.engine import Request
from truedraft.engine.policy import Controller, Decision, FixedBudget, RequestView
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache

TOLERANCE = 1e-5
FAMILY = "gemma3"  # windows and full attention
COUNT = 40

target = cache(packed)
draft = cache(noisy)


def assert_fresh(cache: RequestCache, model: LanguageModel, tokens: Sequence[int]) -> None:
    """The cache holds exactly `tokens`, as if they had been computed now, in one forward; or what its bounds leave."""
    assert cache.length == len(tokens)
    fresh = model.new_cache()
    fresh.bound(cache.bounds)
    with torch.inference_mode():
        while count := fresh.make_room(len(tokens) - fresh.length):
            ids = torch.tensor(list(tokens[fresh.length :][:count]))
            model.forward([Segment(fresh, ids, chain_shape(count), ())])
            fresh.commit(range(count))
        if cache.dropped > fresh.dropped:
            fresh.make_room(1)
        for held, expected in zip(cache.entries(), fresh.entries(), strict=True):
            for ours, theirs in zip(held, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    model.release_cache(fresh)


class Script(Controller):
    """Budgets in turn, one for each request and step; None is the drafter's own limits."""

    def __init__(self, *budgets: Budget | None) -> None:
        self._budgets: Iterator[Budget | None] = cycle(budgets)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        decisions = []
        for (name, limits), *_ in (view.limits.items() for view in views):
            budget = next(self._budgets)
            decisions.append(Decision(name, limits if budget is None else budget))
        return decisions


class Watched(DraftModel):
    """A draft model whose cache is compared after each `propose` and each `observe`."""

    proposals = kept_in_full = kept_in_part = kept_none = moved = pauses = 0

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = super().propose(batch, budgets, noise)
        for request, budget in zip(batch, budgets, strict=True):
            if not budget.is_zero:
                assert_fresh(self.caches[request.id], self.model, request.tokens)
                self.proposals += 1
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        super().observe(batch, outcomes)
        for request, outcome in zip(batch, outcomes, strict=True):
            cache = self.caches[request.id]
            assert cache.uncommitted == 0
            # Never more than what was emitted: the token that ends the step is not in it, and after full acceptance
            # neither is the last drafted one.
            assert cache.length < max(len(request.tokens), 1)
            if cache.length:
                assert_fresh(cache, self.model, request.tokens[: cache.length])
            shape, path = outcome.proposal.tree.shape, outcome.path
            self.kept_in_full += bool(path) and len(path) == shape.depth
            self.kept_in_part += bool(path) and len(path) < shape.depth
            self.kept_none += len(shape) > 0 and not path
            self.moved += list(path) != list(range(len(path)))
            self.pauses += len(shape) == 0 and cache.length > 0


def run(
    drafter: Drafter | None,
    controller: Controller | None = None,
    params: SamplingParams | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Request]:
    """Answer some prompts, comparing the target's caches after every step."""
    model = target(FAMILY)
    in_use = model.pool.in_use
    engine = Engine(model, drafter, controller=controller or FixedBudget(), entropy=3)
    params = params or SamplingParams(max_tokens=COUNT)
    requests = [engine.submit(list(prompt), params) for prompt in prompts]
    running = True
    while running:
        running = engine.step()
        for request in requests:
            if request.cache is not None:
                assert request.uncomputed == 1
                assert_fresh(request.cache, model, request.tokens[:-1])
    for request in requests:
        assert request.finish_reason == "length"
        assert not request.warnings
        assert request.cache is None
    assert model.pool.in_use == in_use
    return requests


def chain(context: int | None = None) -> Watched:
    return Watched(draft(FAMILY, 0.06), num_speculative_tokens=4, context=context)


def tree(context: int | None = None) -> Watched:
    return Watched(draft(FAMILY, 0.12), branching=(3, 2, 1), context=context)


def chains(context: int | None = None) -> Watched:
    return Watched(draft(FAMILY, 0.12), num_speculative_tokens=3, chains=3, context=context)


@pytest.mark.parametrize("drafter", [None, PromptLookup(max_ngram=2, min_ngram=1)], ids=["none", "prompt-lookup"])
def test_without_a_draft_model(drafter: Drafter | None) -> None:
    run(drafter)


SAMPLED = SamplingParams(max_tokens=COUNT, temperature=1.0)
SEEDED = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3)


@pytest.mark.parametrize("params", [None, SAMPLED, SEEDED], ids=["greedy", "sampled", "seeded"])
def test_drafts(params: SamplingParams | None) -> None:
    for make in (chain, tree, chains):
        drafter = make()
        run(drafter, params=params)
        assert drafter.proposals > 20
        assert min(drafter.kept_in_full, drafter.kept_in_part, drafter.kept_none) > 0
        assert drafter.moved > 0 or make is not tree


@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (2, 2)])
def test_full_acceptance(branching: tuple[int, ...]) -> None:
    """The target as its own draft: the last drafted token was never fed, and is the one that is easily forgotten."""
    drafter = Watched(target(FAMILY), branching=branching)
    requests = run(drafter)
    assert drafter.kept_in_full == sum(request.counters.target_calls for request in requests)


PAUSES = (None, *[NO_DRAFT] * 3, None, None, NO_DRAFT)
"""Then the draft catches up with all it missed in one forward."""
CUTS = (None, Budget(1), Budget(3, 1), Budget(2, 2, 3), Budget(4, 3, 5), Budget(4, 3, min_probability=0.5), NO_DRAFT)
"""Depth, width, nodes and early stops change from step to step."""


@pytest.mark.parametrize("make", [chain, tree])
def test_after_budgets_that_change(make: Callable[[], Watched]) -> None:
    for budgets in (PAUSES, CUTS):
        drafter = make()
        run(drafter, Script(*budgets))
        assert drafter.pauses > 10 or budgets is not PAUSES
        assert min(drafter.kept_in_full, drafter.kept_in_part) > 0


@pytest.mark.parametrize("make", [chain, tree, chains])
@pytest.mark.parametrize("budgets", [(None,), PAUSES])
def test_bounded_contexts(make: Callable[..., Watched], budgets: Sequence[Budget | None]) -> None:
    """Of a model with windows; accepted tokens are read again where they see less than when they were drafted."""
    drafter = make(context=128)
    texts = [[(5 * place * place + place) % 97 for place in range(length)] for length in (115, 180, 20)]
    engine = Engine(target(FAMILY), drafter, controller=Script(*budgets), entropy=3)
    answers = engine.generate(texts, SamplingParams(max_tokens=COUNT))
    assert not any(each.warnings or each.stats.recoveries for each in answers)
    assert drafter.proposals > 20 and drafter.kept_in_part > 0
    assert drafter.model.pool is not None and drafter.model.pool.in_use == 0


def test_a_long_prompt_is_read_in_parts() -> None:
    """The target prefills 256 tokens a step; the draft reads the whole prompt at its first proposal."""
    drafter = Watched(draft("llama", 0.03), num_speculative_tokens=3)
    model = target("llama")
    assert model.context_length == 256
    prompt = [(5 * i * i + i) % model.vocab_size for i in range(250)]
    engine = Engine(model, drafter, controller="fixed")
    request = engine.submit(prompt, SamplingParams(max_tokens=50))
    other = engine.submit([3, 4], SamplingParams(max_tokens=20))
    while engine.step():
        for each in (request, other):
            if each.cache is not None:
                assert_fresh(each.cache, model, each.tokens[:-1])
    assert len(request.tokens) == model.context_length, "the answer ends where the context ends"
    assert request.finish_reason == "length"
    assert len(other.tokens) == 22
    assert drafter.proposals > 0


def test_cancelled_requests_give_their_caches_back() -> None:
    model, drafter = packed(FAMILY), chain()
    in_use = drafter.model.pool.in_use  # type: ignore[attr-defined]
    engine = Engine(model, drafter, controller="fixed")
    requests = [engine.submit(list(prompt), SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.cancel(requests[1])
    assert requests[1].cache is None
    while engine.step():
        for request in requests:
            if request.cache is not None:
                assert_fresh(request.cache, model, request.tokens[:-1])
    assert model.pool.in_use == 0
    assert drafter.model.pool.in_use == in_use  # type: ignore[attr-defined]


def test_a_stale_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is sensitive: a commit that keeps the first nodes instead of the path's is caught."""
    commit = RequestCache.commit
    monkeypatch.setattr(RequestCache, "commit", lambda self, path: commit(self, range(len(path))))
    with pytest.raises(AssertionError):
        run(DraftModel(draft(FAMILY, 0.12), branching=(3, 2, 1)))
