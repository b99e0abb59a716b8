"""Traces behind other prompts; their replay against the engine call by call, or exact sums where chance is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from support.head_models import MarkovWithEmbedding, fitted_heads, fitted_redrafter
from support.tiny_models import PROMPTS, noisy, packed
from truedraft import Engine, SamplingParams
from truedraft.core.params import SamplingParams as Params
from truedraft.core.stats import Counters
from truedraft.drafters import Cascade, DraftModel, Medusa, PromptLookup, Redrafter
from truedraft.drafters.base import Drafter, Features, NoDrafter
from truedraft.drafters.portfolio import Portfolio
from truedraft.errors import DrafterError, ModelError, OptionError
from truedraft.measure.traces import AnswerTrace, trace_after, trace_answers
from truedraft.measure.walks import Walk, walk_along
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.testing import MarkovModel, ScriptedDrafter

TOKENS = 60
WORLD_PROMPTS: list[list[int]] = [[3, 1, 4], [1] * 9, [2], [5, 6]]
GREEDY = Params(max_tokens=TOKENS)
DRAWN = Params(max_tokens=TOKENS, temperature=0.8, top_p=0.95)
SEEDED = Params(max_tokens=TOKENS, temperature=0.8, seed=1)
Of = Callable[[int], Drafter]


@cache
def target() -> HuggingFaceModel:
    return packed("llama")


@cache
def draft() -> HuggingFaceModel:
    return noisy("llama", 0.1)


@cache
def world(ends: int | None = None) -> MarkovWithEmbedding:
    options = {"context_length": 160} | ({} if ends is None else {"eos_token_ids": (ends,)})
    return MarkovWithEmbedding.random(8, seed=1, sharpness=2.5, **options)


@cache
def texts() -> list[list[int]]:
    answers = Engine(world()).generate(WORLD_PROMPTS[:2], SamplingParams(max_tokens=60))
    return [[*p, *a.token_ids] for p, a in zip(WORLD_PROMPTS, answers, strict=False)]


def seeded(params: Params, count: int) -> list[Params]:
    """Options of several requests, each with a seed of its own if they have one."""
    return [dataclasses.replace(params, seed=params.seed and 100 + number) for number in range(count)]


def traced(
    model: MarkovWithEmbedding | HuggingFaceModel, prompts: Sequence[Sequence[int]], params: Params, drafter: Drafter
) -> list[AnswerTrace]:
    drafter.check(model)
    each = zip(prompts, seeded(params, len(prompts)), strict=True)
    asked = [(str(number), list(prompt), own) for number, (prompt, own) in enumerate(each)]
    return trace_answers(model, asked, [drafter], batch=3)


def calls_of(walks: Sequence[Walk], size: int) -> float:
    return sum(float(walk.steps([size]).calls[0]) for walk in walks)


def lived(
    model: MarkovWithEmbedding | HuggingFaceModel, prompts: Sequence[Sequence[int]], params: Params, drafter: Drafter
) -> Counters:
    answers = Engine(model, drafter, controller="fixed").generate(
        [list(p) for p in prompts], seeded(params, len(prompts))
    )
    return sum((answer.stats for answer in answers), Counters())


def assert_as_the_engine(
    model: MarkovWithEmbedding | HuggingFaceModel,
    prompts: Sequence[Sequence[int]],
    params: Params,
    of: Of,
    sizes: Sequence[int],
    least: float = 1.1,
) -> None:
    """For every size the engine's own target calls, and its mean acceptance length."""
    largest = of(sizes[-1])
    traces = traced(model, prompts, params, largest)
    walks = walk_along(largest, model, traces, batch=3)
    tokens = sum(walk.tokens for walk in walks)
    found = []
    for size in sizes:
        stats = lived(model, prompts, params, of(size))
        assert calls_of(walks, size) == stats.target_calls, f"{size} nodes"
        assert tokens / stats.target_calls == pytest.approx(stats.mean_acceptance_length, abs=1e-12)
        drafted = sum(float((walk.steps([size]).visits * walk.steps([size]).nodes).sum()) for walk in walks)
        assert drafted == stats.draft_tokens
        found.append(stats.mean_acceptance_length)
    assert max(found) > least and len(set(found)) > 1  # else equality says little


@pytest.mark.parametrize("params", [GREEDY, DRAWN, SEEDED], ids=["greedy", "drawn", "seeded"])
def test_prompt_lookup(params: Params) -> None:
    def of(length: int) -> Drafter:
        return PromptLookup(length, max_ngram=2, min_ngram=1)

    # Of drawn requests the engine's answers differ from plain decoding's, so its calls are those of other texts.
    if params is DRAWN:
        largest = of(4)
        walks = walk_along(largest, world(), traced(world(), WORLD_PROMPTS, params, largest))
        assert 1.0 < sum(walk.tokens for walk in walks) / calls_of(walks, 4) < 5.0
        return
    assert_as_the_engine(world(), WORLD_PROMPTS, params, of, (1, 2, 4, 7), least=1.05)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chains_of_a_draft_model(params: Params) -> None:
    assert_as_the_engine(target(), PROMPTS, params, lambda length: DraftModel(draft(), length), (1, 2, 3, 5))


def beams(length: int, nodes: int) -> Drafter:
    return Redrafter(fitted_redrafter(world(), texts()), beams=4, length=length, nodes=nodes)


@pytest.mark.parametrize(
    ("of", "sizes"),
    [
        (lambda nodes: Medusa(fitted_heads(world(), texts()), nodes=nodes), (1, 2, 3, 5, 8, 16)),
        (partial(beams, 1), (1, 2, 3)),
        (partial(beams, 2), (1, 2, 3, 4)),
        (partial(beams, 3), (1, 2, 3, 4)),
    ],
    ids=["medusa", "beams 1", "beams 2", "beams 3"],
)
def test_heads(of: Of, sizes: Sequence[int]) -> None:
    assert_as_the_engine(world(), WORLD_PROMPTS, GREEDY, of, sizes, least=1.2)


@pytest.mark.parametrize("kind", ["tree of a draft model", "seeded beams"])
def test_one_size(kind: str) -> None:
    model, prompts, params, drafter = (
        (target(), PROMPTS, GREEDY, DraftModel(draft(), branching=(3, 2, 1)))
        if kind == "tree of a draft model"
        else (world(), WORLD_PROMPTS, SEEDED, beams(3, 6))
    )
    walks = walk_along(drafter, model, traced(model, prompts, params, drafter))
    assert calls_of(walks, drafter.limits.nodes) == lived(model, prompts, params, drafter).target_calls


def test_answers_that_end() -> None:
    """The token that ends an answer is drafted and accepted like any other, and no step follows it."""
    ending = world(ends=5)
    ends = [trace.stopped for trace in traced(ending, WORLD_PROMPTS, SEEDED, PromptLookup(3))]
    assert any(ends)
    draft = MarkovModel(ending.probs**0.8 / (ending.probs**0.8).sum(-1, keepdim=True), context_length=160)
    assert_as_the_engine(ending, WORLD_PROMPTS, SEEDED, lambda length: DraftModel(draft, length), (1, 2, 4))


def test_what_cannot_be_replayed() -> None:
    tree = DraftModel(draft(), branching=(2, 1))
    unsure = DraftModel(draft(), 3, min_probability=0.3)
    both = Portfolio([PromptLookup(2), DraftModel(draft(), 2)])
    traces = traced(target(), PROMPTS[:1], DRAWN, PromptLookup(2))
    with pytest.raises(OptionError, match="give trace_answers this drafter"):
        walk_along(tree, target(), traces)
    drawn = Redrafter(fitted_redrafter(world(), texts()), beams=2, length=2, nodes=4, sampled=True)
    with pytest.raises(OptionError, match="best of several paths"):
        walk_along(drawn, world(), traces)
    with pytest.raises(OptionError, match="min_probability"):
        walk_along(unsure, target(), traces)
    with pytest.raises(OptionError, match="several drafters"):
        walk_along(both, target(), traces)


def test_a_drafter_that_fails_ends_its_requests() -> None:
    def fail(tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        raise RuntimeError("no idea")

    broken = ScriptedDrafter(fail)
    traces = traced(target(), PROMPTS, GREEDY, broken)
    with pytest.raises(DrafterError, match="no idea"):
        walk_along(broken, target(), traces)
    assert len(broken.ended) == len(PROMPTS)


def test_a_target_that_fails() -> None:
    from truedraft.testing import altered

    def fail(segments: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(ModelError, match="prompt a"):
        trace_answers(altered(target(), forward=fail), [("a", [1, 2], GREEDY)])


def test_the_worked_example() -> None:
    never = 1 << 40
    fewest = np.array([[1, 2], [never, never], [1, never], [never, never]])
    walk = Walk(fewest, (fewest < never).astype(float), np.array([[0, 1, 2]] * 4), np.array([2, 2, 2, 2]))
    steps = walk.steps([0, 1, 2])
    assert steps.calls.tolist() == [4.0, 2.0, 2.0]
    assert steps.visits[2].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert steps.depths[1].tolist() == [1, 1, 1, 1]


# ------------------------------------------------------------------------------------------ cascades


@pytest.mark.parametrize("params", [GREEDY, DRAWN, SEEDED], ids=["greedy", "drawn", "seeded"])
def test_a_walk_says_how_much_a_cascades_guesses_save(params: Params) -> None:
    """Guesses of the middle model's twin are all right; a token that it never writes is always wrong."""
    model = world()
    right = Cascade(DraftModel(model, 8), DraftModel(model), 6)
    least = min(range(8), key=lambda token: max(float(model.probs_after([each])[token]) for each in range(8)))
    wrong = Cascade(ScriptedDrafter(lambda tokens: [[least] * 4]), DraftModel(model), 6)
    shares = []
    for drafter in (right, wrong):
        walks = walk_along(drafter, model, traced(model, WORLD_PROMPTS, params, drafter))
        shares += [sum(walk.guessed for walk in walks) / len(walks)]
    assert shares[0] > 0.9
    assert shares[1] < 0.35


LAYERS = (0, 1)


def rows_of(trace: AnswerTrace) -> list[torch.Tensor]:
    """All vectors in their order: what entered the LM head, then each layer's."""
    parts = [torch.cat([each.hidden for each in trace.seen if each.hidden is not None])]
    return parts + [torch.cat([each.layers[place] for each in trace.seen]) for place in range(len(trace.layers))]


@pytest.mark.parametrize("rows", ["kept", "last"])
def test_behind_its_own_prompt_it_is_the_trace(rows) -> None:  # type: ignore[no-untyped-def]
    target, watcher = packed("llama"), NoDrafter()
    watcher.features = Features(rows, layers=LAYERS)
    asked = [(str(number), list(each), SamplingParams(max_tokens=9)) for number, each in enumerate(PROMPTS[:2])]
    first, second = trace_answers(target, asked, [watcher])
    for trace in (first, second):
        found = trace_after(target, trace.prompt, trace, watcher.features, LAYERS)
        assert [each.tokens for each in found.seen] == [each.tokens for each in trace.seen]
        for own, expected in zip(rows_of(found), rows_of(trace), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=2e-4)
        assert replace(found, seen=trace.seen) == trace
    moved = trace_after(target, second.prompt, first, watcher.features, LAYERS)
    assert moved.tokens == first.tokens and moved.prompt == second.prompt
    assert moved.remaining(0) == first.remaining(0)
    assert not torch.allclose(rows_of(moved)[0][-1], rows_of(first)[0][-1], atol=1e-2)


def test_a_drafter_that_sees_tokens_alone_needs_no_forward() -> None:
    trace = AnswerTrace("x", (5, 6), (7, 8, 9), SamplingParams(), 0, 20, False, ())
    found = trace_after(None, (1, 2, 3), trace, None)  # type: ignore[arg-type]
    assert [each.tokens for each in found.seen] == [(7,), (8,), (9,)] and found.limit == 21
