"""The promise of beams: replay along what the target wrote is what the engine measures, also near answers' ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import pytest
import torch

from support.head_models import SHARPENED, MarkovWithEmbedding, fitted_redrafter, random_redrafter
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters import Redrafter
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.head import HeadRecord
from truedraft.engine import Answer
from truedraft.kinds.redrafter import traced_beams as beam_trees
from truedraft.kinds.redrafter.module import RedrafterHead, RedrafterRunner
from truedraft.kinds.redrafter.traced_beams import BeamTokens, tokens_of_beams
from truedraft.measure.replay import CURVE_NODES, Trace

PROMPTS = [[3, 1, 4], [1] * 9, [2], [5, 6], [7, 0], [4, 4, 2]]
WIDTHS, LENGTH = (1, 2, 4, 8, 16), 4  # there are only 8 token ids


@cache
def target() -> MarkovWithEmbedding:
    return MarkovWithEmbedding.random(8, seed=1, sharpness=2.5, context_length=160)


@cache
def head(steps: int = 4) -> RedrafterHead:
    """Hardly fitted or not at all, so that it is right often enough and by far not always."""
    answers = Engine(target()).generate(PROMPTS[:3], SamplingParams(max_tokens=60))
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=False)]
    return fitted_redrafter(target(), texts, steps=steps)


def traces_of(
    world: MarkovWithEmbedding, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], stop: int | None = None
) -> list[Trace]:
    """The answers with the vectors that their tokens were drawn from; a stop is the last token of its trace."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        stopped = answer.finish_reason == "stop"
        tokens = [*answer.token_ids, stop] if stopped and stop is not None else list(answer.token_ids)
        hidden = [world.vector_after([*prompt, *tokens[:place]]) for place in range(len(tokens))]
        found.append(Trace(torch.tensor(tokens), torch.stack(hidden), stopped))
    return found


def promises_for(
    traces: Sequence[Trace], widths: Sequence[int] = WIDTHS, steps: int = 4, survival: AcceptanceOdds | None = None
) -> list[BeamTokens]:
    return tokens_of_beams(RedrafterRunner(head(steps), target()), traces, widths, LENGTH, survival)


def measured(drafter: Redrafter, params: SamplingParams) -> float:
    answers = Engine(target(), drafter, controller="fixed").generate(PROMPTS, params)
    return sum((answer.stats for answer in answers), Counters()).mean_acceptance_length


def test_so_it_does_for_calibrated_beams() -> None:
    """The odds are not those of this head: they only must choose the same beams in replay and engine."""
    params, survival = SamplingParams(max_tokens=60), AcceptanceOdds.of(SHARPENED)
    traces = traces_of(target(), PROMPTS, Engine(target()).generate(PROMPTS, params))
    calibrated, raw = (promises_for(traces, (4, 8), survival=each) for each in (survival, None))
    parted = 0
    for each, other in zip(calibrated, raw, strict=True):
        for nodes, tokens, without in zip(each.nodes, each.tokens, other.tokens, strict=True):
            if tokens != without:  # elsewhere nothing would show
                sizes = {"beams": each.beams, "length": each.length, "nodes": nodes}
                drafter = Redrafter(
                    head(4).with_record(HeadRecord(facts={"survival": {"greedy": SHARPENED}})), **sizes, sampled=False
                )
                assert tokens == pytest.approx(measured(drafter, params)), sizes
                parted += 1
    assert parted > 1


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        *((2, 0), (6, 4), (60, 4)),
        *(
            pytest.param(count, steps, marks=pytest.mark.slow)
            for count, steps in ((2, 4), (6, 0), (12, 0), (12, 4), (60, 0))
        ),
    ],
)
def test_the_engine_keeps_the_promise(count: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every width, length and number of nodes, by a head that is fitted after some steps, or random after none.

    Short answers are mostly end, where trees are less deep.
    """
    monkeypatch.setattr(beam_trees, "_ROWS", 37)  # so that positions are looked at in parts
    params = SamplingParams(max_tokens=count)
    traces = traces_of(target(), PROMPTS, Engine(target()).generate(PROMPTS, params))
    promises = promises_for(traces, steps=steps)
    assert [(each.beams, each.length) for each in promises] == [(w, n) for w in WIDTHS for n in range(1, LENGTH + 1)]
    found = set()
    for each in promises:
        assert each.nodes == tuple(nodes for nodes in CURVE_NODES if nodes <= each.beams * each.length)
        points = list(zip(each.nodes, each.tokens, strict=True))
        for nodes, tokens in points if count < 60 else points[-2:]:
            drafter = Redrafter(head(steps), beams=each.beams, length=each.length, nodes=nodes, sampled=False)
            assert tokens == pytest.approx(measured(drafter, params)), (each.beams, each.length, nodes)
            found.add(tokens)
    assert found == {1.0} if count == 2 else len(found) > 4  # one token more, and nothing to draft


def test_so_it_does_along_sampled_answers() -> None:
    """The rule draws from the target and follows, so no chance is left along what it drew itself."""
    params = SamplingParams(max_tokens=12, temperature=1.0)
    for width, length, nodes in ((4, 3, 8), (8, 4, 3), (8, 4, 32)):
        drafter = Redrafter(head(), beams=width, length=length, nodes=nodes, sampled=False)
        answers = Engine(target(), drafter, controller="fixed", entropy=4).generate(PROMPTS, params)
        stats = sum((answer.stats for answer in answers), Counters())
        promise = promises_for(traces_of(target(), PROMPTS, answers), (width,))[length - 1]
        assert dict(zip(promise.nodes, promise.tokens, strict=True))[nodes] == pytest.approx(
            stats.mean_acceptance_length
        )
        assert stats.accepted_tokens > 0


def test_a_stop_ends_a_step_and_counts() -> None:
    plain = Engine(target()).generate(PROMPTS, SamplingParams(max_tokens=30))
    stop = plain[0].token_ids[9]
    params = SamplingParams(max_tokens=60, stop_token_ids=(stop,))
    answers = Engine(target()).generate(PROMPTS, params)
    traces = traces_of(target(), PROMPTS, answers, stop)
    assert any(trace.stopped and trace.steps > 1 for trace in traces)
    for each in promises_for(traces, (2, 8)):
        drafter = Redrafter(head(), beams=each.beams, length=each.length, nodes=each.nodes[-1], sampled=False)
        assert each.tokens[-1] == pytest.approx(measured(drafter, params))


def test_sizes_of_the_trees() -> None:
    """One beam is a chain and nothing merges; more than one share prefixes."""
    answers = Engine(target()).generate(PROMPTS, SamplingParams(max_tokens=30))
    for each in promises_for(traces_of(target(), PROMPTS, answers)):
        assert each.listed == min(each.beams, target().vocab_size) * each.length
        assert each.length <= each.merged <= each.listed
        assert (each.merged < each.listed) == (each.beams > 1 and each.length > 1)
        assert list(each.tokens) == sorted(each.tokens)


def test_fewer_token_ids_than_beams() -> None:
    world = MarkovWithEmbedding.random(3, seed=3, sharpness=2.0)
    small = random_redrafter(world, spread=3.0)
    params = SamplingParams(max_tokens=21)
    traces = traces_of(world, [[1], [2, 0]], Engine(world).generate([[1], [2, 0]], params))
    said: list[tuple[int, int]] = []
    promises = tokens_of_beams(
        RedrafterRunner(small, world), traces, (2, 32), 3, on_progress=lambda *now: said.append(now)
    )
    assert said == [(0, 2), (1, 2), (2, 2)]
    for each in promises:
        drafter = Redrafter(small, beams=each.beams, length=each.length, nodes=each.nodes[-1], sampled=False)
        answers = Engine(world, drafter, controller="fixed").generate([[1], [2, 0]], params)
        stats = sum((answer.stats for answer in answers), Counters())
        assert each.tokens[-1] == pytest.approx(stats.mean_acceptance_length)
    assert promises[3].tokens[-1] == 2.0  # 32 beams of one token hold all three of them: each step accepts one


def test_answers_without_a_second_token_promise_nothing() -> None:
    """There is no call to count, so there is no curve, and no NaN that JSON could not hold."""
    short = traces_of(target(), PROMPTS, Engine(target()).generate(PROMPTS, SamplingParams(max_tokens=1)))
    assert promises_for(short) == [] == promises_for([])
    long = traces_of(target(), PROMPTS, Engine(target()).generate(PROMPTS, SamplingParams(max_tokens=9)))
    mixed = promises_for([*short, *long, *short])
    assert mixed == promises_for(long)
    assert len(json.dumps(list(map(asdict, mixed)), allow_nan=False)) > 100
