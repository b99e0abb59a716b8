"""Greedy requests are judged from logits, without a distribution: the same tokens, and failures that stay where they
are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.answers import fixed
from support.fixed_noise import answers_of
from support.markov import greedy, spoiled
from support.tiny_models import PROMPTS, VOCAB, stock
from truedraft import Engine, SamplingParams
from truedraft.core import probs as probs_module
from truedraft.core.probs import probs_from_logits
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.engine import Answer
from truedraft.errors import InvalidLogitsError
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.cache import RequestCache
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.testing import MarkovModel, ScriptedDrafter, reduced
from truedraft.verification import ArgmaxRule

SMALL = 8
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9)
SEEDED = SamplingParams(max_tokens=40, temperature=0.9, seed=3)

DRAFTERS = {
    "none": lambda target: None,
    "prompt lookup": lambda target: PromptLookup(min_ngram=1),
    "chain": lambda target: DraftModel(MarkovModel.random(SMALL, seed=2)),
    "tree": lambda target: DraftModel(MarkovModel.random(SMALL, seed=2), branching=(3, 2, 1)),
    "itself": lambda target: DraftModel(target, num_speculative_tokens=3),
}


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(SMALL, seed=1)


@pytest.fixture(params=DRAFTERS, ids=lambda name: name.replace(" ", "-"))
def drafter(request: pytest.FixtureRequest, target: MarkovModel) -> Drafter | None:
    return DRAFTERS[request.param](target)


def with_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every request gets distributions, as those that are sampled do."""
    monkeypatch.setattr(ArgmaxRule, "sees", "probs")


def count_probs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of rows of each distribution that is made."""
    rows: list[int] = []

    def counted(logits: Tensor, params: SamplingParams) -> Tensor:
        rows.append(len(logits))
        return probs_from_logits(logits, params)

    monkeypatch.setattr(probs_module, "probs_from_logits", counted)
    return rows


def test_greedy_makes_no_distribution(
    target: MarkovModel, drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_probs(monkeypatch)
    engine = fixed(target, drafter)
    engine.generate([[3, 1, 4], [2]], GREEDY)
    assert made == []
    engine.generate([3, 1, 4], SAMPLED)
    assert made


def test_answers_are_those_that_distributions_give(
    target: MarkovModel, drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled and seeded requests in one batch, in every order of neighbours."""
    prompts = [[3, 1, 4], [1] * 9, [2], [5, 6], [3, 3], [7]]
    params = [GREEDY, SAMPLED, GREEDY, GREEDY, SEEDED, SAMPLED]
    engine = fixed(target, drafter)
    without = answers_of(engine, prompts, params)
    alone = [answers_of(engine, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    backwards = answers_of(engine, prompts[::-1], params[::-1])[::-1]
    with_probs(monkeypatch)
    made = count_probs(monkeypatch)
    with_them = answers_of(engine, prompts, params)
    assert sum(made) > 0
    told, *others = (
        [(answer.token_ids, answer.stats, answer.origins) for answer in answers]
        for answers in (without, alone, backwards, with_them)
    )
    assert others == [told] * 3


def test_bfloat16_logits_are_judged_as_their_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 equal largest logits are common, and the lowest id wins by either way."""
    model = HuggingFaceModel(stock("llama", dtype=torch.bfloat16), None, "llama", fastest_backend)
    prompts = [list(prompt) for prompt in PROMPTS]
    for drafter in (None, DraftModel(model, branching=(3, 2, 1))):
        engine = fixed(model, drafter)
        without = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
        with monkeypatch.context() as patch:
            with_probs(patch)
            assert [answer.token_ids for answer in engine.generate(prompts, GREEDY)] == without


def test_ties_go_to_the_lowest_id(target: MarkovModel) -> None:
    """All logits are equal but that of the last token, which is lower."""
    model = spoiled(target, lambda row, pair: row.zero_()[-1:].fill_(-1.0))
    for drafter in (None, ScriptedDrafter(lambda tokens: [[1, 0], [0, 0, 2]])):
        answer = fixed(model, drafter).generate([3, 1], SamplingParams(max_tokens=9))
        assert answer.token_ids == [0] * 9


# --- logits that are not numbers ---


SPOILS: dict[str, Callable[[Tensor], object]] = {
    "all NaN": lambda row: row.fill_(torch.nan),
    "one NaN": lambda row: row[3:4].fill_(torch.nan),
    "a NaN where the least likely token is": lambda row: row[row.argmin()].fill_(torch.nan),
    "infinite": lambda row: row[5:6].fill_(torch.inf),
    "infinite both ways": lambda row: row[:2].copy_(torch.tensor([torch.inf, -torch.inf])),
    "nothing allowed": lambda row: row.fill_(-torch.inf),
}


def greedy_text(model: MarkovModel, prompt: Sequence[int], count: int) -> list[int]:
    return [*prompt, *greedy(model, prompt, count)]


def broken_behind(target: MarkovModel, pair: tuple[int, int], spoil: str) -> MarkovModel:
    return spoiled(target, lambda row, own: own == pair and SPOILS[spoil](row))


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_broken_row_fails_its_own_request_only(target: MarkovModel, drafter: Drafter | None, spoil: str) -> None:
    """What plain decoding emits before the broken row is there; the neighbours, greedy and sampled, do not notice."""
    prompts = [[3, 1], [1, 1], [2, 5]]
    texts = [greedy_text(target, prompt, 12) for prompt in prompts]
    others = {pair for text in (texts[0], texts[2]) for pair in itertools.pairwise(text)}
    place = next(i for i in range(1, 12) if (texts[1][i], texts[1][i + 1]) not in others)
    broken = broken_behind(target, (texts[1][place], texts[1][place + 1]), spoil)
    params = SamplingParams(max_tokens=12)
    answers = fixed(broken, drafter).generate(prompts, params)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert [answers[0].token_ids, answers[2].token_ids] == [texts[0][2:], texts[2][2:]]
    assert answers[1].token_ids == texts[1][2 : place + 2]
    assert "gave NaN or infinite logits" in (answers[1].error or "")
    with pytest.raises(InvalidLogitsError, match=f"after {place} tokens of its answer"):
        fixed(broken, drafter).generate(prompts[1], params)


def test_a_broken_row_that_no_answer_comes_by_does_not_matter(target: MarkovModel) -> None:
    text = greedy_text(target, [3, 1], 12)
    seen = set(itertools.pairwise(text))
    # Drafted beside each right token; the row below the wrong one is broken.
    pair = next((text[i], wrong) for i in range(2, 9) for wrong in range(SMALL) if (text[i], wrong) not in seen)
    broken = broken_behind(target, pair, "all NaN")
    beside = ScriptedDrafter(lambda tokens: [[pair[1]], greedy_text(target, tokens, 2)[-2:]])
    answer = fixed(broken, beside).generate([3, 1], SamplingParams(max_tokens=12))
    assert (answer.finish_reason, answer.token_ids) == ("length", text[2:])


def test_minus_infinity_forbids_a_token_and_nothing_else(target: MarkovModel, drafter: Drafter | None) -> None:
    """A mask of all but two tokens; the answer goes on among them."""
    tokens, params = [3, 1], SamplingParams(max_tokens=20)
    for _ in range(20):
        dist = target.probs_after(tokens)
        tokens.append(2 if dist[2] >= dist[5] else 5)
    engine = fixed(reduced(target, [2, 5]), drafter)
    greedy, narrow, sampled = engine.generate([[3, 1]] * 3, [params, replace(params, top_k=2), SAMPLED])
    assert greedy.token_ids == narrow.token_ids == tokens[2:]
    assert set(sampled.token_ids) == {2, 5}


def test_a_row_of_minus_infinity_and_one_number_is_that_token() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 3] = -1e30
    assert probs_from_logits(logits, GREEDY)[0].tolist() == [0, 0, 0, 1, 0]
    certain = torch.zeros(5, 5, 5, dtype=torch.float64)
    certain[:, :, 3] = 1.0
    answer = Engine(MarkovModel(certain)).generate([0], SamplingParams(max_tokens=4))
    assert answer.token_ids == [3] * 4


# --- what a rejected token leaves in the cache ---


def poisoned(body: BackendMaker) -> tuple[list[Answer], list[list[int]]]:
    """Answers with a drafter that also guesses a token whose embedding is NaN, and those of a sound model.

    The bad token is drafted four times over beside the right ones, on a path of its own, at two steps of three; at
    the third nothing is drafted, so what it left behind the accepted tokens is not written over.
    """
    prompts = [[5, 9, 11], [1, 2], [60] * 70]
    sound = HuggingFaceModel(stock("llama"), None, "sound", body)
    plain = [answer.token_ids for answer in Engine(sound).generate(prompts, GREEDY)]
    texts = {tuple(prompt[:2]): [*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)}
    bad = next(token for token in range(VOCAB) if not any(token in text for text in texts.values()))
    module: Any = stock("llama")
    module.get_input_embeddings().weight.data[bad] = torch.nan
    calls = itertools.count()

    def script(tokens: Sequence[int]) -> list[list[int]]:
        text = texts[tuple(tokens[:2])]
        following = text[len(tokens) : len(tokens) + 2]
        return [following, [bad] * 4] if next(calls) % 3 and len(following) == 2 else []

    engine = fixed(HuggingFaceModel(module, None, "spoiled", body), ScriptedDrafter(script))
    first = engine.generate(prompts, GREEDY)
    return [*first, *engine.generate(prompts, GREEDY)], [*plain, *plain]  # then with caches that were given back


BODIES = pytest.mark.parametrize("body", [StockBackend, fastest_backend])


@BODIES
def test_nan_values_of_a_rejected_token_do_not_poison_later_steps(body: BackendMaker) -> None:
    """Later forwards read the key/value positions behind with the weight 0, and 0 times NaN is NaN."""
    answers, plain = poisoned(body)
    assert [answer.finish_reason for answer in answers] == ["length"] * 6
    assert [answer.token_ids for answer in answers] == plain
    assert all(0 < answer.stats.accepted_tokens < answer.stats.draft_tokens for answer in answers)


@BODIES
def test_the_poison_is_one(body: BackendMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache that forgets what it has to clean, the requests of the test above fail."""
    commit = RequestCache.commit

    def forgetful(self: RequestCache, path: Sequence[int]) -> None:
        commit(self, path)
        self.storage._stale = self.storage._end = 0

    monkeypatch.setattr(RequestCache, "commit", forgetful)
    answers, _ = poisoned(body)
    assert "error" in {answer.finish_reason for answer in answers}
