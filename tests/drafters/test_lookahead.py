"""Lookahead: what windows and pools hold, what is proposed within which budget, and answers that stay the target's."""

from __future__ import annotations

import itertools
import random
import sys
import tracemalloc
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from support.certified import assert_certified
from support.tiny_models import PROMPTS, packed, stock_logits
from support.tiny_models import stock as by_transformers
from truedraft import Engine, SamplingParams
from truedraft.certify.checks import Stack
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import Lookahead, from_spec
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.lookahead import MOST_KEYS, JacobiWindow, NgramPool
from truedraft.engine.policy import Effort, FixedBudget, measure_drafter
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.measure.walks import check_walkable
from truedraft.testing import MarkovModel, ScriptedController
from truedraft.verification import SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, distance, emitted_dist, target_dist

VOCAB = 5
TARGET = MarkovModel.random(VOCAB, seed=3)
GREEDY = SamplingParams(max_tokens=24)
WARM = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=4)
TEXT = [1, 0, 3, 2]
SIZES = [(4, 3, 2), (2, 5, 2), (3, 2, 2), (1, 4, 1), (0, 3, 2)]
NOISE = KeyedNoise(0, 0, 0)


def logits_of(target: MarkovModel, text: Sequence[int], proposal: Proposal) -> Tensor:
    """What the target says behind the text and behind each node, `[rows, vocab]`."""
    tree = proposal.tree
    paths = [(), *(tree.path_tokens(node) for node in range(len(tree)))]
    return torch.stack([target.probs_after([*text, *path]).log() for path in paths])


class Life:
    """A request that lives by hand, a step at a time, behind `MarkovModel`."""

    def __init__(self, drafter: Lookahead, text: Sequence[int] = TEXT, params: SamplingParams = GREEDY) -> None:
        self.drafter = drafter
        self.tokens = list(text)
        self.request = DraftRequest(0, params, self.tokens)
        drafter.begin(self.request)

    def propose(self, budget: Budget | None = None) -> Proposal:
        (proposal,) = self.drafter.propose([self.request], [budget or self.drafter.limits], [NOISE])
        proposal.check()
        return proposal

    def step(self, emitted: Sequence[int] | None = None, budget: Budget | None = None) -> Proposal:
        """Propose, and emit some tokens, or the greedy ones as far as they were drafted and one more."""
        proposal = self.propose(budget)
        text, tree = list(self.tokens), proposal.tree
        path: list[int] = []
        greedy: list[int] = []
        while True:
            greedy.append(int(TARGET.probs_after([*text, *greedy]).argmax()))
            children = tree.shape.children[path[-1] + 1 if path else 0]
            child = next((node for node in children if tree.host_ids[node] == greedy[-1]), None)
            if child is None:
                break
            path.append(child)
        told = greedy if emitted is None else list(emitted)
        outcome = StepOutcome(proposal, tuple(path[: len(told) - 1]), tuple(told))
        if len(tree):
            logits = logits_of(TARGET, text, proposal)
            outcome = StepOutcome(proposal, outcome.path, outcome.tokens, logits, logits)
        self.tokens.extend(told)
        self.drafter.observe([self.request], [outcome])
        return proposal

    @property
    def pool(self) -> NgramPool:
        return self.drafter._states[0].pool


# --- the pool ---


def test_a_pool_knows_the_latest_n_grams_of_each_token() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 5, 6), (1, 7, 8), (2, 5, 6), (1, 5, 6), (1, 9, 9)):
        pool.add(ngram)
    assert pool.after(1) == [(9, 9), (5, 6)]  # that seen again is younger than 7 8
    assert pool.after(2) == [(5, 6)]
    assert pool.after(3) == []
    assert len(pool) == 3


def test_a_pool_is_bounded_in_tokens_n_grams_and_bytes() -> None:
    drafter, chance = Lookahead(window=4, ngram=4, candidates=3), random.Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool = NgramPool(3)
    for _ in range(60_000):
        pool.add([chance.randrange(1000, 5000) for _ in range(4)])
    assert 0 < len(pool) <= 3 * MOST_KEYS
    for place in range(3 * MOST_KEYS):
        pool.add([5000 + place % MOST_KEYS, *(chance.randrange(1000, 5000) for _ in range(3))])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(pool) == 3 * MOST_KEYS
    assert held <= drafter.held.request_bytes <= 4 * held
    # A token that is used stays; those used longest ago go.
    pool.add((1, 2, 3, 4))
    for token in range(10_000, 10_000 + 3 * MOST_KEYS):
        pool.add((token, 2, 3, 4))
        pool.add((1, 2, 3, 4))
    assert pool.after(1) == [(2, 3, 4)]
    assert sys.getsizeof(pool) < 1000


# --- the window ---


def test_a_window_by_hand() -> None:
    window = JacobiWindow(3, 3, [7, 8, 9])
    assert window.paths == [(), (7,), (7, 8), (7, 8, 9)]
    assert window.advance(9, [1, 2, 3, 4]) == []  # it is not full before it has two levels
    assert window.paths == [(2,), (8, 3), (8, 9, 4)]
    assert window.advance(0, [5, 6, 7]) == [(0, 2, 5), (8, 3, 6), (9, 4, 7)]
    assert window.paths == [(5,), (3, 6), (3, 4, 7)]
    assert window.advance(1, [2, 2, 2]) == [(1, 5, 2), (3, 6, 2), (4, 7, 2)]


@pytest.mark.parametrize(("columns", "ngram"), [(1, 2), (1, 5), (2, 2), (4, 3), (5, 4), (3, 6)])
def test_windows_fill_up_and_keep_their_size(columns: int, ngram: int) -> None:
    drafter = Lookahead(columns, ngram, 1)
    window = JacobiWindow(columns, ngram, [4, 2])
    fresh = itertools.count(100)
    for number in range(2 * ngram):
        paths = window.paths
        nodes = {path[:length] for path in paths for length in range(1, len(path) + 1)}
        assert len(nodes) <= drafter.limits.nodes - (ngram - 1)
        assert max(map(len, paths)) <= drafter.limits.depth
        found = window.advance(0, [next(fresh) for _ in paths])
        if number < ngram - 2:
            assert found == []
        else:
            assert len(paths) == len(found) == columns
            assert {len(each) for each in found} == {ngram}
            assert [len(path) for path in window.paths] == [column + ngram - 2 for column in range(columns)]


@pytest.mark.parametrize(("columns", "ngram", "candidates"), SIZES[:3])
def test_each_new_token_is_what_the_target_says_behind_its_column(columns: int, ngram: int, candidates: int) -> None:
    """In the engine, by a real model: transformers' own argmax behind text and path, for every column of every step."""
    target, model = packed("llama"), by_transformers("llama")
    drafter, told = Lookahead(columns, ngram, candidates), []

    class Noted(JacobiWindow):
        def advance(self, root: int, following: Sequence[int]) -> list[tuple[int, ...]]:
            told.append((root, self.paths, list(following)))
            return super().advance(root, following)

    engine, prompt = Engine(target, drafter, controller="fixed"), list(PROMPTS[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("truedraft.drafters.lookahead.JacobiWindow", Noted)
        answer = engine.generate(prompt, SamplingParams(max_tokens=20))
    text = [*prompt, *answer.token_ids]
    assert answer.token_ids == Engine(target).generate(prompt, SamplingParams(max_tokens=20)).token_ids
    places, compared = iter(_step_ends(answer.token_ids, len(prompt), told)), 0
    for (root, paths, following), end in zip(told, places, strict=True):
        assert text[end - 1] == root
        for path, token in zip(paths, following, strict=True):
            logits = stock_logits(model, [*text[:end], *path])[-1]
            assert float(logits.max() - logits[token]) < 1e-4  # transformers' own rounding may part a tie
            compared += 1
    assert compared > 10 * columns


def _step_ends(answer: Sequence[int], prompt: int, told: Sequence[tuple[int, object, object]]) -> list[int]:
    """Where in the text each step with a window began: the roots of the steps, in order, are tokens of the answer."""
    ends, place = [], 0
    for root, _, _ in told:
        while answer[place] != root:
            place += 1
        place += 1
        ends.append(prompt + place)
    return ends


# --- what is proposed ---


def test_candidates_come_first_and_the_window_beside_them() -> None:
    life = Life(Lookahead(window=3, ngram=3, candidates=2), [1, 2, 3, 9, 1, 4, 0, 1])
    proposal = life.propose()
    assert proposal.tree.path_tokens(1) == (4, 0)  # the latest
    assert proposal.tree.path_tokens(3) == (2, 3)
    assert proposal.tree.shape.parents[:4] == (-1, 0, -1, 2)
    assert proposal.kinds == {DrawKind.DETERMINISTIC}
    tree = proposal.tree
    leaves = {tree.path_tokens(leaf) for leaf in tree.shape.leaves}
    assert leaves == {(4, 0, 1), (2, 3)}  # the first chain is the text's last tokens, 4 0 1; it shares what it can


@pytest.mark.parametrize(("columns", "ngram", "candidates"), SIZES)
def test_proposals_stay_within_their_budgets(columns: int, ngram: int, candidates: int) -> None:
    """And what fits is proposed: the candidates as far as they go, the window whole or not at all."""
    chance, seen = random.Random(columns), set()
    life = Life(Lookahead(columns, ngram, candidates))
    for _ in range(60):
        budget = Budget(chance.randint(0, 6), chance.randint(0, 5), chance.randint(0, 20))
        proposal = life.step(budget=budget)
        shape = proposal.tree.shape
        assert shape.depth <= budget.depth and len(shape) <= budget.nodes
        assert max(map(len, shape.children)) <= budget.width
        has_window = life.drafter._states[0].ends is not None or len(shape) > candidates * (ngram - 1)
        seen.add((budget.is_zero, len(shape) > 0, has_window))
    assert (True, False, False) in seen and (False, True, False) in seen
    assert all(not (zero and drafted) for zero, drafted, _ in seen)


def test_at_too_few_nodes_there_are_candidates_alone() -> None:
    life = Life(Lookahead(window=4, ngram=3, candidates=2), [1, 2, 3, 9, 1, 4, 0, 1])
    whole = life.propose()
    state = life.drafter._states[0]
    assert state.ends is not None
    for nodes in range(1, len(whole.tree)):
        few = life.propose(Budget(9, 9, nodes))
        assert state.ends is None
        assert few.tree.host_ids == whole.tree.host_ids[: min(nodes, 4)]
    assert life.propose(Budget(1, 9, 99)).tree.host_ids == [4, 2]
    assert life.propose(Budget(9, 1, 99)).tree.host_ids == [4, 0]
    assert life.propose(Budget(0)).tree.host_ids == []


def test_at_budget_zero_it_does_no_work_and_afterwards_goes_on() -> None:
    drafter = Lookahead(window=3, ngram=3, candidates=2)
    life = Life(drafter)
    for _ in range(4):
        life.step()
    pool, paths = len(life.pool), drafter._states[0].window.paths  # type: ignore[union-attr]
    known = drafter._states[0].known
    for token in (1, 2, 3):
        assert len(life.step([token], NO_DRAFT).tree) == 0
    assert (len(life.pool), drafter._states[0].known) == (pool, known)
    assert drafter._states[0].window.paths == paths  # type: ignore[union-attr]
    life.step()
    # The text that it missed is in the pool, and so is what the window turned up.
    assert (2, 3) in life.pool.after(1)
    assert drafter._states[0].window.paths != paths  # type: ignore[union-attr]


def test_a_proposal_that_was_not_judged_as_it_was_made_teaches_nothing() -> None:
    life = Life(Lookahead(window=3, ngram=2, candidates=2))
    proposal = life.propose()
    paths = life.drafter._states[0].window.paths  # type: ignore[union-attr]
    row = TARGET.probs_after(TEXT).log()[None]
    life.tokens.append(1)
    life.drafter.observe([life.request], [StepOutcome(Proposal.empty(), (), (1,), row, row)])
    assert life.drafter._states[0].window.paths == paths  # type: ignore[union-attr]
    # Told again, of the proposal before: it is over.
    logits = logits_of(TARGET, TEXT, proposal)
    life.drafter.observe([life.request], [StepOutcome(proposal, (), (1,), logits, logits)])
    assert life.drafter._states[0].window.paths == paths  # type: ignore[union-attr]


def test_a_request_that_begins_in_the_middle_starts_anew() -> None:
    """As one that comes with that text, whatever was in flight."""
    drafter = Lookahead(window=3, ngram=3, candidates=2)
    life = Life(drafter)
    for _ in range(4):
        life.step()
    life.propose()
    drafter.end(life.request)
    assert not drafter.held.requests and drafter.held.n_bytes == 0
    drafter.begin(life.request)
    fresh = Life(Lookahead(window=3, ngram=3, candidates=2), life.tokens)
    for _ in range(4):
        assert life.step().tree.host_ids == fresh.step().tree.host_ids


def test_hints_tell_how_many_candidates_there_are() -> None:
    drafter, kinds = Lookahead(window=2, ngram=3, candidates=2), []
    for text in ([1, 2, 3], [1, 2, 3, 1], [1, 2, 3, 1, 4, 4, 1]):
        life = Life(drafter, text)
        kinds.append(drafter.hint(life.request).kind)
    assert kinds[0] < kinds[1] < kinds[2]


# --- answers ---


@pytest.mark.parametrize(("columns", "ngram", "candidates"), SIZES[:4])
def test_the_distribution_of_what_is_emitted_is_the_target_s(columns: int, ngram: int, candidates: int) -> None:
    """By exact recursion, over trees that windows of a few steps are part of: every verdict on each of them."""
    windows = set()

    @cache
    def proposed(before: tuple[int, ...]) -> Proposal:
        life = Life(Lookahead(columns, ngram, candidates), TEXT, WARM)
        for token in [2, 0, 1, *before]:
            life.step([token])
        proposal = life.propose()
        windows.add(life.drafter._states[0].ends is not None)
        return proposal

    def scheme(prefix: tuple[int, ...], drafted: tuple[int, ...]) -> list[PlannedDraw]:
        tree = proposed(prefix[: len(prefix) - len(drafted)]).tree
        row = 0
        for token in drafted:
            row = 1 + next(node for node in tree.shape.children[row] if tree.host_ids[node] == token)
        eye = torch.eye(VOCAB, dtype=torch.float64)
        return [PlannedDraw(-1, eye[tree.host_ids[node]], DrawKind.DETERMINISTIC) for node in tree.shape.children[row]]

    def target(prefix: Sequence[int]) -> Tensor:
        return probs_from_logits(TARGET.probs_after([*TEXT, 2, 0, 1, *prefix]).log()[None], WARM)[0]

    dist = emitted_dist(SpeculativeSampling(), target, scheme, 4)
    assert distance(dist, target_dist(target, 4)) < 1e-12
    assert True in windows


@pytest.mark.parametrize(
    ("columns", "ngram", "candidates"),
    [SIZES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SIZES[2::2])],
)
def test_answers_are_certified(monkeypatch: pytest.MonkeyPatch, columns: int, ngram: int, candidates: int) -> None:
    stack = Stack(TARGET, Lookahead(columns, ngram, candidates), SpeculativeSampling())
    assert_certified(monkeypatch, stack, [[1, 2, 3], [4], [4, 4, 0, 2, 1], [3, 1]])


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_ragged_batches_answer_as_plain_decoding_while_budgets_come_and_go(params: SamplingParams) -> None:
    target, prompts = packed("llama"), [list(prompt) for prompt in PROMPTS]
    plain = [answer.token_ids for answer in Engine(target).generate(prompts, params)]
    wide = Budget(9, 9, 99)
    budgets = [NO_DRAFT, wide, Budget(2, 2, 3), wide, NO_DRAFT, NO_DRAFT, Budget(4, 2, 9), Budget(1, 1, 1)]
    for controller in (FixedBudget(), ScriptedController(budgets * 7)):
        for most in (1, 4):
            engine = Engine(target, Lookahead(4, 3, 2), controller=controller, max_batch=most)
            answers = engine.generate(prompts, params)
            assert [answer.token_ids for answer in answers] == plain
            assert not any(answer.warnings for answer in answers)
        assert not engine.drafter.held.requests


def test_windows_turn_up_what_the_text_does_not_have() -> None:
    """A target whose greedy answers go round in a circle of all its tokens, and a prompt with none of its steps."""
    table = torch.full((12, 12, 12), 0.01, dtype=torch.float64)
    for last in range(12):
        table[:, last, (last + 5) % 12] = 5.0
    target = MarkovModel(table / table.sum(-1, keepdim=True))
    prompt = [8, 3, 9, 0]
    params = SamplingParams(max_tokens=11)  # shorter than the circle, so no n-gram of the text comes again
    lengths = []
    for window in (0, 6):
        answer = Engine(target, Lookahead(window, 3, 2), controller="fixed").generate(prompt, params)
        lengths.append(answer.stats.mean_acceptance_length)
    assert lengths[0] == 1.0
    assert lengths[1] >= 1.4


# --- words and refusals ---


def test_words() -> None:
    made = from_spec("lookahead,window=5,ngram=3,candidates=4", TARGET)
    assert isinstance(made, Lookahead)
    assert (made.limits.depth, made.limits.width, made.limits.nodes) == (5, 6, 4 + 5 + 8)
    assert list(from_spec("portfolio(lookahead;prompt-lookup)", TARGET).members) == ["lookahead", "prompt-lookup"]
    with pytest.raises(UnknownOptionError, match="did you mean 'ngram'"):
        from_spec("lookahead,ngrams=3", TARGET)
    for options, said in {
        "window=-1": "window must be 0 or more and at most 1024, got -1",
        "ngram=1": "ngram must be 2 or more",
        "candidates=0": "candidates must be 1 or more",
        "window=100,ngram=12": "are 1121 nodes",
    }.items():
        with pytest.raises(OptionError, match=said):
            from_spec(f"lookahead,{options}", TARGET)


def test_a_plan_refuses_it_and_its_cost_can_be_measured() -> None:
    with pytest.raises(OptionError, match="after its own guesses, which answers do not show; measure it with"):
        check_walkable(Lookahead(), drawn=False)
    drafter = Lookahead()
    assert measure_drafter(drafter, packed("llama"), effort=Effort(0.05, 1, 2)).points
    assert not drafter.held.requests
