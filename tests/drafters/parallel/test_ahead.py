"""What is drafted ahead is what would be drafted when it is asked for: proposals, caches, answers, hit or miss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.layer_heads import target as native_target
from support.parallel_drafting import TEXTS, SameProcess, beside, markov, near, off_by_one, seen
from support.parallel_drafting import WAYS as EVERY_WAY
from support.tiny_models import PROMPTS, noisy, packed
from truedraft import Engine
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, DraftModel, DraftRequest, ParallelDraft, PromptLookup
from truedraft.drafters.parallel.ahead import Call
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import Controller, FixedBudget, Goodput
from truedraft.errors import OptionError
from truedraft.models.backends.native.build import built
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import key_span
from truedraft.testing import MarkovModel, ScriptedController, altered

WAYS = {**EVERY_WAY, "nucleus": replace(EVERY_WAY["sampled"], top_p=0.9, top_k=4)}
GREEDY, SAMPLED = WAYS["greedy"], WAYS["sampled"]


def told(drafter: Drafter) -> tuple[Drafter, list[tuple[Any, ...]]]:
    """A twin of a drafter, and what it proposes: lengths of texts, tokens, draws and distributions."""
    proposals: list[tuple[Any, ...]] = []

    def propose(batch: Sequence[DraftRequest], *asked: Any) -> list[Proposal]:
        made = drafter.propose(batch, *asked)
        for request, each in zip(batch, made, strict=True):
            probs = None if each.probs is None else each.probs.tolist()
            proposals.append((len(request.tokens), each.tree.host_ids, each.draws, probs))
        return made

    return altered(drafter, propose=propose), proposals


def assert_alike(
    target: LanguageModel,
    alone: DraftModel,
    ahead: ParallelDraft,
    prompts: Sequence[list[int]],
    params: Any,
    controller: Callable[[], Any] = lambda: "fixed",
) -> list[tuple[Any, ...]]:
    """Answers, counts and proposals are those of the draft alone, distributions bit for bit; returns the proposals."""
    found = []
    for drafter in (alone, ahead):
        twin, proposals = told(drafter)
        answers = Engine(target, twin, controller=controller(), entropy=3).generate(prompts, params)
        found.append((list(map(seen, answers)), proposals))
    assert found[0] == found[1] and found[0][1]
    return found[0][1]


def hit_rate(drafter: ParallelDraft) -> float:
    return drafter.report["ahead_hit_rate"]


DRAFTS: dict[str, Callable[[MarkovModel], MarkovModel]] = {
    "mixed": lambda target: markov(2),
    "itself": lambda target: target,
    "always wrong": off_by_one,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_proposals_answers_and_counts_are_those_of_the_draft_alone(way: str, draft: str) -> None:
    """Ragged batches, every kind of draws; distributions bit for bit."""
    target = markov(1)
    ahead, _ = beside(DRAFTS[draft](target), 3)
    params = [replace(WAYS[way], max_tokens=20 + 7 * i) for i in range(len(TEXTS))]
    assert_alike(target, DraftModel(DRAFTS[draft](target), 3), ahead, TEXTS, params)
    assert not ahead.held.requests and not ahead.held.n_bytes


def test_a_draft_that_is_always_wrong_never_hits() -> None:
    ahead, _ = beside(off_by_one(markov(1)), 3)
    stats = Engine(markov(1), ahead, controller="fixed", entropy=3).generate([3, 1, 4], GREEDY).stats
    assert stats.accepted_tokens == 0 and ahead.report["proposals"] > 20 and hit_rate(ahead) == 0.0


@pytest.mark.parametrize("way", ["greedy", "sampled", "seeded"])
@pytest.mark.parametrize("kind", ["stock, bfloat16", "native"])
def test_a_llama_drafts_ahead_bit_for_bit_what_it_drafts_in_turn(way: str, kind: str) -> None:
    """Where a row's bits do not depend on the others of its forward, in whose company it is drafted changes nothing."""
    if kind == "native":
        if built(torch.float32).library is None:
            pytest.skip(built(torch.float32).reason)
        target, draft = native_target("native"), native_target("native")
    else:
        target, draft = noisy("llama", 0.02), packed("llama", dtype=torch.bfloat16)
    params = WAYS[way] if WAYS[way].greedy else replace(WAYS[way], temperature=0.3)  # so that the likeliest comes
    ahead, _ = beside(draft, 4)
    assert_alike(target, DraftModel(draft, 4), ahead, [list(prompt) for prompt in PROMPTS], params)
    assert hit_rate(ahead) > 0.05


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize(
    "controller",
    [
        lambda: ScriptedController([Budget(3), Budget(1), Budget(0), Budget(4), Budget(2, 1, 1), Budget(4, 1, 3)] * 4),
        lambda: FixedBudget(Budget(4, min_probability=0.4)),
        lambda: ScriptedController([Budget(4, floor=0.01 * (i // 4), odds=(0.1, 1.0)) for i in range(40)]),
    ],
    ids=["lengths change", "a least probability", "a floor that moves"],
)
def test_budgets_that_change_cut_or_miss_and_never_change_a_proposal(
    way: str, controller: Callable[[], Controller]
) -> None:
    target = markov(2, 3.0)
    ahead, _ = beside(target, 4)
    assert_alike(target, DraftModel(target, 4), ahead, [[3, 1, 4]], WAYS[way], controller)
    assert 0.0 < hit_rate(ahead) < 1.0


def test_a_draft_with_a_least_probability_of_its_own() -> None:
    target = markov(1, 3.0)
    ahead, _ = beside(near(target), 4, min_probability=0.5)
    lengths = set()
    for params in (GREEDY, SAMPLED):
        alone = DraftModel(near(target), 4, min_probability=0.5)
        lengths |= {len(tokens) for _, tokens, *_ in assert_alike(target, alone, ahead, [[3, 1, 4]], params)}
    assert hit_rate(ahead) > 0.0 and len(lengths) > 2, "they stop at several lengths"


# ------------------------------------------------------------------------------------------ what it knows of texts


def fresh_entries(model: LanguageModel, tokens: Sequence[int]) -> list[torch.Tensor]:
    cache = model.new_cache()
    model.forward([Segment(cache, torch.tensor(list(tokens)), chain_shape(len(tokens)), ())])
    cache.commit(range(len(tokens)))
    return [tensor for pair in cache.entries() for tensor in pair]


def looked_at(ahead: ParallelDraft, worker: SameProcess) -> tuple[Drafter, list[int]]:
    """A drafter whose worker's caches are compared with fresh ones after each proposal, and the lengths they had."""
    lengths: list[int] = []
    draft = worker.drafter.drafter

    def propose(batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[object]) -> list[Proposal]:
        made = ahead.propose(batch, budgets, noise)  # type: ignore[arg-type]
        for request in batch:
            cache, tokens = draft.caches[request.id], worker.drafter._texts[request.id].tokens
            assert tokens[: len(request.tokens)] == request.tokens
            lengths.append(cache.length - len(tokens))
            fresh = fresh_entries(draft.model, tokens[: cache.length])
            held = [tensor for pair in cache.entries() for tensor in pair]
            for one, other in zip(held, fresh, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        return made

    return altered(ahead, propose=propose), lengths


@pytest.mark.parametrize("way", ["greedy", "sampled", "seeded"])
@pytest.mark.parametrize("models", ["markov", "llama"])
def test_after_each_proposal_the_cache_is_a_fresh_one(way: str, models: str) -> None:
    """The text and what is taken to follow are committed; behind them lies what is drafted ahead."""
    target, draft = (markov(1), near(markov(1))) if models == "markov" else (noisy("llama", 0.05), packed("llama"))
    ahead, worker = beside(draft, 3)
    drafter, lengths = looked_at(ahead, worker)
    Engine(target, drafter, controller="fixed", entropy=3).generate(TEXTS, WAYS[way])
    assert set(lengths) == {0} and hit_rate(ahead) > 0.0
    assert not worker.drafter.drafter.caches


def test_the_committed_path_reaches_as_far_as_it_was_fed() -> None:
    """Told of what was emitted, the worker keeps accepted tokens and a guessed one."""
    target = markov(1)
    ahead, worker = beside(target, 3)
    begun = worker.drafter.drafter
    lengths: list[int] = []
    take = worker.drafter._take

    def taken(call: Call) -> Proposal | None:
        found = take(call)
        lengths.append(begun.caches[call.id].length - len(worker.drafter._texts[call.id].tokens))
        return found

    worker.drafter._take = taken  # type: ignore[method-assign]
    Engine(target, ahead, controller="fixed", entropy=3).generate([3, 1, 4], GREEDY)
    assert lengths[0] < 0 and set(lengths[1:]) == {0}  # all hits: what was emitted is read, the bonus token too


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_requests_that_come_and_go_in_the_middle(way: str) -> None:
    """One is cancelled while it was drafted ahead for, another comes then; the others notice nothing."""
    target = markov(1)

    def run(drafter: Drafter) -> list[list[int]]:
        engine = Engine(target, drafter, controller="fixed", entropy=3)
        first, second = engine.submit([1, 2, 3], WAYS[way]), engine.submit([4], WAYS[way])
        for _ in range(4):
            engine.step()
        engine.cancel(first)
        third = engine.submit([5, 5], WAYS[way])
        while not (second.closed and third.closed):
            engine.step()
        assert not drafter.held.requests
        return [each.tokens for each in (first, second, third)]

    ahead, worker = beside(near(target), 3)
    assert run(ahead) == run(DraftModel(near(target), 3))
    assert hit_rate(ahead) > 0.0 and not worker.drafter._texts


@pytest.mark.parametrize("way", ["greedy", "sampled", "seeded"])
def test_memory_that_is_short_puts_requests_back_and_changes_nothing(way: str) -> None:
    target = MarkovModel(markov(1).probs, context_length=2000)
    draft = near(target)
    params = replace(WAYS[way], max_tokens=600)
    plain = Engine(target, DraftModel(draft, 3), controller="fixed", entropy=3).generate(TEXTS[:2], params)
    ahead, worker = beside(draft, 3)
    engine = Engine(target, ahead, controller="fixed", entropy=3, max_cache_bytes=2 * 16 * key_span(603) - 1)
    sizes: list[tuple[int, int]] = []

    def look(_: object) -> None:
        caches = worker.drafter.drafter.caches.values()
        sizes.extend((cache.capacity, cache.most) for cache in caches if cache.capacity)

    engine.listeners.append(look)
    answers = engine.generate(TEXTS[:2], params)
    assert engine.preemptions > 0 and hit_rate(ahead) > 0.0
    assert not any(each.warnings for each in answers) and sizes and not ahead.held.requests
    assert all(capacity <= most < key_span(2000) for capacity, most in sizes)
    assert [len(each.token_ids) for each in answers] == [600, 600]
    if way != "sampled":  # which draw gives a token hangs on budgets, and these on the memory
        assert [each.token_ids for each in answers] == [each.token_ids for each in plain]


def test_what_cannot_go_across_is_drafted_here() -> None:
    """Options that read what was written; others of the same batch go across."""
    target = markov(1)
    shaped = replace(SAMPLED, repetition_penalty=1.2)
    ahead, worker = beside(markov(2), 3)
    drafts = [DraftModel(markov(2), 3), ahead]
    both = [
        Engine(target, each, controller="fixed", entropy=3).generate(TEXTS[:2], [shaped, SAMPLED]) for each in drafts
    ]
    assert list(map(seen, both[0])) == list(map(seen, both[1]))
    assert ahead.report["proposals"] == both[1][1].stats.by_drafter["draft"].target_calls
    asked = len(worker.replies)
    alone = [Engine(target, each, controller="fixed", entropy=3).generate(TEXTS[0], shaped) for each in drafts]
    assert seen(alone[0]) == seen(alone[1]) and alone[0].stats.draft_tokens > 0 and len(worker.replies) == asked


def test_noise_of_another_kind_is_drawn_with_here() -> None:
    class Own(KeyedNoise):
        pass

    ahead, worker = beside(markov(2), 3)
    tokens = [1, 2, 3]
    request = DraftRequest(0, SAMPLED, TokenView(tokens))
    ahead.begin(request)
    made = ahead.propose([request], [Budget(3)], [Own(3, 3, 0)])[0]
    assert not worker.replies and len(made.tree) == 3
    assert made.tree.host_ids == ahead.propose([request], [Budget(3)], [KeyedNoise(3, 3, 0)])[0].tree.host_ids
    assert len(worker.replies) == 1
    ahead.end(request)


def test_a_member_of_a_portfolio_draws_with_its_own_noise() -> None:
    ahead, _ = beside(markov(2), 3)
    found = []
    for draft in (DraftModel(markov(2), 3), ahead):
        drafter = Portfolio([PromptLookup(min_ngram=1), draft])
        answers = Engine(markov(1), drafter, controller="in-turn", entropy=3).generate(TEXTS, SAMPLED)
        found.append(list(map(seen, answers)))
    assert found[0] == found[1]
    assert ahead.report["proposals"] > 20


def test_a_controller_that_measures_can_use_it() -> None:
    ahead, _ = beside(markov(2), 3)
    answer = Engine(markov(1), ahead, controller=Goodput()).generate([3, 1, 4], GREEDY)
    assert answer.token_ids == Engine(markov(1)).generate([3, 1, 4], GREEDY).token_ids and not answer.warnings


def test_trees_are_refused() -> None:
    model = markov(2)
    _, worker = beside(model)
    with pytest.raises(OptionError, match="async drafts one chain, and branching or chains make trees"):
        ParallelDraft(DraftModel(model, branching=(2, 1)), worker)


def test_a_draft_that_is_the_target_guesses_the_token_that_the_rule_draws() -> None:
    """By the very number that draws it."""
    model = markov(1)
    for entropy in range(20):
        text = [entropy % 5, entropy // 7, 3]
        ahead, worker = beside(model, 3)
        params = replace(SAMPLED, max_tokens=13)
        answer = Engine(model, ahead, controller="fixed", entropy=entropy).generate(text, params)
        assert answer.stats.draft_acceptance_rate == 1.0
        assert [reply.hits for reply in worker.replies] == [0, 1, 1]
