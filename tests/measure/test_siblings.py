"""What several draws at a place bring along a trace: against the rule's kernel, against every text, and the engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from support.chi_square import p_value
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.proposal import DrawKind
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.drafters import DraftModel
from truedraft.measure.traces import trace_answers
from truedraft.measure.walks import ChainDraws, TreeDraws, Walk, draws_of, walk_along
from truedraft.testing import MarkovModel
from truedraft.verification import SpeculativeSampling
from truedraft.verification.rule import DrawnToken, JudgedRow

VOCAB = 3
RULE = SpeculativeSampling()


def pair() -> tuple[MarkovModel, MarkovModel]:
    big = MarkovModel.random(VOCAB, seed=4, sharpness=1.2, context_length=60)
    q = 0.5 * big.probs + 0.5 * MarkovModel.random(VOCAB, seed=5, context_length=60).probs
    return big, MarkovModel(q, context_length=60)


def drawn(q: Tensor, draws: int, kind: DrawKind) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every sequence of draws with its probability; fewer where the distribution is used up."""

    def go(so_far: tuple[int, ...], mass: float, left: Tensor) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(so_far) == draws or not float(left.sum()):
            yield mass, so_far
            return
        for token, each in enumerate(left / left.sum()):
            if float(each) > 0.0:
                below = left.clone()
                if kind is DrawKind.WITHOUT_REPLACEMENT:
                    below[token] = 0.0
                yield from go((*so_far, token), mass * float(each), below)

    yield from go((), 1.0, q)


def by_the_kernel(p: Tensor, q: Tensor, draws: int, kind: DrawKind) -> dict[tuple[int, int], float]:
    """By token and number of draws that name it: the probability that it is accepted as a draft."""
    found: dict[tuple[int, int], float] = {}
    for mass, tokens in drawn(q, draws, kind):
        row = JudgedRow(p, tuple(DrawnToken(token, 0, q, kind) for token in tokens))
        for outcome in RULE.outcomes([row]):
            if outcome.accepted:
                key = outcome.tokens[0], tokens.count(outcome.tokens[0])
                found[key] = found.get(key, 0.0) + mass * outcome.probability
    return found


WORLDS = [
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    ([0.1, 0.6, 0.3], [0.3, 0.3, 0.4]),
    ([0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.15, 0.05]),
    ([0.6, 0.4, 0.0, 0.0], [0.0, 0.5, 0.25, 0.25]),
    ([0.3, 0.3, 0.4], [0.3, 0.3, 0.4]),
]


@pytest.mark.parametrize(("p", "q"), WORLDS)
def test_chains_are_accepted_as_the_kernel_says(p: list[float], q: list[float]) -> None:
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    for token in range(len(p)):
        if p[token] == 0.0:
            continue
        factors = ChainDraws(3).factors(p[token], target, draft, token)
        for came in (1, 2, 3):
            exact = by_the_kernel(target, draft, came, DrawKind.INDEPENDENT)
            for below in (1, 2, 3):
                assert factors[came, below] * p[token] == pytest.approx(exact.get((token, below), 0.0), abs=1e-12)
        single = TreeDraws((1,), seed=0)
        survival = single.survival([single.factors(p[token], None, draft, token)])
        assert survival[0] == pytest.approx(factors[1].sum(), abs=1e-12)


@pytest.mark.parametrize(("p", "q"), WORLDS)
def test_draws_without_replacement_are_accepted_as_the_kernel_says(p: list[float], q: list[float]) -> None:
    """The mean of 4,000 places, which lies within 0.02 of the exact one unless it is wrong; the seed is fixed."""
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    for token in range(len(p)):
        if p[token] == 0.0:
            continue
        draws = TreeDraws((3, 2, 1), seed=1)
        places = [draws.factors(p[token], target, draft, token) for _ in range(4000)]
        means = np.mean(places, axis=0)
        assert max(map(max, places)) <= 1.0 + 1e-12
        for width in (1, 2, 3):
            exact = by_the_kernel(target, draft, width, DrawKind.WITHOUT_REPLACEMENT)
            share = sum(mass for (of, _), mass in exact.items() if of == token)
            assert means[width - 1] * p[token] == pytest.approx(share, abs=1e-12 if width == 1 else 0.02)


def test_survival_follows_the_chains_that_are_left() -> None:
    """Two chains over two equal distributions: both pass with q(x), and where one does the other was elsewhere."""
    law, draws = torch.tensor([0.5, 0.5], dtype=torch.float64), ChainDraws(2)
    apart = torch.tensor([0.0, 1.0], dtype=torch.float64)
    alike, other, none = (draws.factors(0.5, law, q, 0) for q in (law, apart, None))
    # The first draw is always accepted where p = q, so the trace's token is one that was drafted first.
    assert draws.survival([alike, alike, other]).tolist() == [1.0, 1.0, 0.0]
    assert draws.survival([none]).tolist() == [0.0]


def test_which_draws_a_drafter_makes() -> None:
    _, small = pair()
    assert isinstance(draws_of(DraftModel(small, 3), 0), TreeDraws)
    assert isinstance(draws_of(DraftModel(small, 3, chains=2), 0), ChainDraws)
    assert isinstance(draws_of(DraftModel(small, branching=(2, 1)), 0), TreeDraws)


# ------------------------------------------------------------------------------- whole answers


def forced(big: MarkovModel, drafter: DraftModel, prompt: list[int], text: tuple[int, ...]) -> tuple[Walk, float]:
    """The walk along one text as if the target had drawn it, and the text's probability."""
    params = SamplingParams(max_tokens=len(text), temperature=1.0)
    entropy = sum(3**n * t for n, t in enumerate(text))
    trace = trace_answers(big, [("1", prompt, params)], [drafter], entropy=entropy)[0]
    dists = [big.probs_after([*prompt, *text[:place]]).float() for place in range(len(text))]
    seen = list(trace.seen)
    for step, token in zip(range(len(seen) - len(text), len(seen)), text, strict=True):
        seen[step] = dataclasses.replace(seen[step], tokens=(token,))
    probs = tuple(float(dist[token]) for dist, token in zip(dists, text, strict=True))
    assert len(trace.dists) == (len(text) if drafter.limits.width > 1 else 0)
    made = dataclasses.replace(trace, tokens=text, probs=probs, seen=tuple(seen), dists=tuple(dists))
    (walk,) = walk_along(drafter, big, [made])
    return walk, float(np.prod(probs))


def expected_calls(big: MarkovModel, small: MarkovModel, prompt: list[int], tokens: int, drafter: DraftModel) -> float:
    """Expected target calls behind the first token, by the rule's kernel: what each step emits, and how likely."""
    (kind,) = drafter.kinds

    def below(path: RankPath, made: Sequence[int]) -> int:
        """Draws behind the accepted one, which is the last of the path."""
        if drafter.ranks is not None:
            return drafter.ranks.children[path]
        passed = sum(token == made[path[-1]] for token in made)
        return passed if drafter.chains > 1 else (*drafter.branching, 1)[len(path)]

    def after(text: list[int], left: int) -> float:
        depth = min(drafter.limits.depth, left - 1)
        first = drafter.branching[0] if drafter.ranks is None else drafter.ranks.children[()]
        return 0.0 if left == 0 else 1.0 + going(text, left, (), depth, first)

    def going(text: list[int], left: int, path: RankPath, depth: int, draws: int) -> float:
        p, q = (each / each.sum() for each in (m.probs_after(text).double() for m in (big, small)))
        if len(path) == depth or not draws:  # a bonus token
            return sum(float(p[x]) * after([*text, x], left - 1) for x in range(VOCAB) if left > 1)
        found = 0.0
        for mass, made in drawn(q, draws, kind):
            row = JudgedRow(p, tuple(DrawnToken(token, 0, q, kind) for token in made))
            for outcome in RULE.outcomes([row]):
                token, weight = outcome.tokens[0], mass * outcome.probability
                if outcome.continues:
                    longer = (*path, made.index(token))
                    found += weight * going([*text, token], left - 1, longer, depth, below(longer, made))
                else:
                    found += weight * after([*text, token], left - 1)
        return found

    p = big.probs_after(prompt).double()
    return sum(float(p[x]) * after([*prompt, x], tokens - 1) for x in range(VOCAB))


RANKS = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0)]


def by_ranks(small: MarkovModel, paths: list[RankPath]) -> DraftModel:
    """A draft model whose draws are those of some ranks."""
    ranks = RankTree(tuple(paths))
    drafter = DraftModel(small, branching=ranks.branching)
    drafter.ranks, drafter.limits = ranks, Budget(ranks.depth, ranks.width, len(ranks))
    return drafter


@pytest.mark.parametrize(
    ("make", "within"),
    [
        *((lambda small, length=length: DraftModel(small, length), 1e-6) for length in (1, 2, 3)),
        (lambda small: DraftModel(small, 3, chains=2), 1e-6),
        (lambda small: DraftModel(small, 2, chains=3), 1e-6),
        (lambda small: DraftModel(small, branching=(2, 1, 1)), 0.01),
        (lambda small: DraftModel(small, branching=(2, 2)), 0.01),
        (lambda small: by_ranks(small, RANKS), 0.01),
        (lambda small: by_ranks(small, [(0,), (1,), (2,), (1, 0)]), 0.01),
    ],
    ids=["1", "2", "3", "chains=2", "chains=3", "2-1-1", "2-2", "most behind the first", "a chain behind the second"],
)
def test_expected_calls_over_all_texts(make: Callable[[MarkovModel], DraftModel], within: float) -> None:
    """Chains to rounding; trees within what the few draws that stand for all leave of 81 texts; seeds are fixed."""
    big, small = pair()
    drafter, prompt, tokens = make(small), [0, 1], 4
    total = 0.0
    for text in itertools.product(range(VOCAB), repeat=tokens):
        walk, weight = forced(big, drafter, prompt, text)
        total += weight * float(walk.steps([drafter.limits.nodes]).calls[0])
    assert total == pytest.approx(expected_calls(big, small, prompt, tokens, drafter), abs=within)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda small: DraftModel(small, 3), id="chain"),
        pytest.param(lambda small: DraftModel(small, 3, chains=3), id="chains"),
        pytest.param(lambda small: DraftModel(small, branching=(3, 2, 1)), id="tree", marks=pytest.mark.slow),
        pytest.param(lambda small: by_ranks(small, RANKS), id="ranks"),
    ],
)
def test_calls_and_nodes_are_those_of_the_engine(make: Callable[[MarkovModel], DraftModel]) -> None:
    """Within six standard errors of 300 answers: a false alarm has a probability below 1e-8, and the seed is fixed."""
    big, small = pair()
    prompts = [[n % 3, (n // 3) % 3] for n in range(300)]
    params = SamplingParams(max_tokens=24, temperature=1.0)
    drafter = make(small)
    asked = [(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    walks = walk_along(drafter, big, trace_answers(big, asked, [drafter], batch=100), batch=100)  # type: ignore[arg-type]
    steps = [walk.steps([drafter.limits.nodes]) for walk in walks]
    replayed = np.array([[float(each.calls[0]), float((each.visits * each.nodes).sum())] for each in steps])
    answers = Engine(big, drafter, controller="fixed", entropy=10_000).generate(prompts, params)
    engine = np.array([[float(each.stats.target_calls), float(each.stats.draft_tokens)] for each in answers])
    error = np.hypot(replayed.std(axis=0), engine.std(axis=0)) / 300**0.5
    assert (abs(replayed.mean(axis=0) - engine.mean(axis=0)) < 6 * error).all()
    assert replayed[:, 0].std() < engine[:, 0].std(), "what chance there is in verdicts is summed up, not drawn"


def test_a_smaller_budget_drafts_shorter_chains() -> None:
    big, small = pair()
    longest = DraftModel(small, 4, chains=2)
    params = SamplingParams(max_tokens=20, temperature=1.0)
    traces = trace_answers(big, [("1", [0, 1], params)], [longest])
    (walk,) = walk_along(longest, big, traces)
    steps = walk.steps([2, 4, 8])
    for number, length in enumerate((1, 2, 4)):
        (own,) = walk_along(DraftModel(small, length, chains=2), big, traces)
        alone = own.steps([2 * length])
        assert alone.calls[0] == pytest.approx(float(steps.calls[number]), abs=1e-12)
        assert alone.nodes[0].tolist() == steps.nodes[number].tolist()
        assert alone.depths[0].tolist() == steps.depths[number].tolist()
    assert (steps.nodes[2] < 8).any()  # chains agree now and then


def test_a_smaller_budget_drafts_the_first_ranks() -> None:
    big, small = pair()
    largest = by_ranks(small, RANKS)
    traces = trace_answers(big, [("1", [0, 1], SamplingParams(max_tokens=20, temperature=1.0))], [largest])
    (walk,) = walk_along(largest, big, traces)
    steps = walk.steps([2, 3, 6, 9])
    for number, nodes in enumerate((2, 3, 6, 6)):
        (own,) = walk_along(by_ranks(small, RANKS[:nodes]), big, traces)
        alone = own.steps([nodes])
        assert alone.nodes[0].tolist() == steps.nodes[number].tolist()
        assert alone.depths[0].tolist() == steps.depths[number].tolist()
        assert alone.calls[0] == pytest.approx(float(steps.calls[number]), rel=0.1)  # other draws stand for all
    assert steps.nodes.max() == 6 and steps.depths.max() == 3


@pytest.mark.slow
def test_answers_from_draws_by_ranks_follow_the_target() -> None:
    """The first three tokens of 6,000 answers; a right engine fails once in a million runs, and the seed is fixed."""
    big, small = pair()
    prompt, count = [0, 1], 6000
    engine = Engine(big, by_ranks(small, RANKS), controller="fixed", entropy=7, max_batch=64)
    answers = engine.generate([prompt] * count, SamplingParams(max_tokens=6, temperature=1.0))
    counts, exact = np.zeros((VOCAB,) * 3), np.zeros((VOCAB,) * 3)
    for answer in answers:
        counts[tuple(answer.token_ids[:3])] += 1
    for text in itertools.product(range(VOCAB), repeat=3):
        exact[text] = np.prod([float(big.probs_after([*prompt, *text[:n]])[text[n]]) for n in range(3)])
    assert sum(each.stats.accepted_tokens for each in answers) > count
    assert p_value(counts, exact) > 1e-6
