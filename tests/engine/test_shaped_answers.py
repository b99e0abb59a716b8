"""Penalties, biases and bans in the engine: answers are those of the definition, or follow its law.

That seeded answers are those of plain decoding, option by option, is for `test_option_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core.test_shaping import by_definition
from support.answers import fixed
from support.laws import law_of, p_value_of_answers
from support.pairwise import named, pairwise
from truedraft import Engine, SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.shaping import Shaping
from truedraft.core.tree import TokenTree
from truedraft.drafters import Drafter, DraftModel, Portfolio, PromptLookup
from truedraft.engine import verifier
from truedraft.testing import MarkovModel

VOCAB = 12  # as in core/test_shaping.py, whose ends are 0 and 11
PROMPT = [3, 1, 4, 1, 5]
OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {2: 3.0, 7: -100.0}},
    "bad-words": {"bad_words": ((1, 5), (6,), (2, 2))},
    "min-tokens": {"min_tokens": 9, "stop_token_ids": (0, 11)},
    "allowed": {"allowed_token_ids": (0, 1, 2, 3, 5, 8)},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {2: 1.0},
        "bad_words": ((1, 5),),
        "min_tokens": 6,
        "stop_token_ids": (0, 11),
        "allowed_token_ids": tuple(range(10)),
    },
}
DRAFTERS: dict[str, Callable[[MarkovModel], Drafter]] = {
    "lookup": lambda target: PromptLookup(min_ngram=1),
    "chain": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2)),
    "tree": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2), branching=(3, 2, 1)),
    "itself": lambda target: DraftModel(target, num_speculative_tokens=4),
    "merged": lambda target: Portfolio([DraftModel(target, num_speculative_tokens=3), PromptLookup(min_ngram=1)]),
}


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(VOCAB, seed=4)


def engine(target: MarkovModel, drafter: str) -> Engine:
    return Engine(target, DRAFTERS[drafter](target), controller="in-turn" if drafter == "merged" else "fixed")


def greedy_by_definition(target: MarkovModel, params: SamplingParams) -> list[int]:
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        logits = target.probs_after([*PROMPT, *answer]).log().tolist()
        changed = by_definition(logits, PROMPT, answer, params)
        token = max(range(VOCAB), key=lambda each: changed[each])
        if token in params.stop_token_ids:
            break
        answer.append(token)
    return answer


@pytest.mark.parametrize(("options", "drafter"), pairwise(named(**OPTIONS), DRAFTERS))
def test_greedy_answers_are_those_of_the_definition(target: MarkovModel, drafter: str, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=24, **options)
    answer = engine(target, drafter).generate(PROMPT, params)
    assert answer.token_ids == greedy_by_definition(target, params)
    if drafter == "itself" and answer.finish_reason == "length":
        # It changes its logits alike, so all that it drafts is accepted.
        assert answer.stats.accepted_tokens == answer.stats.draft_tokens


def forgetting(logits: Tensor, trees: Sequence[TokenTree], shapings: Sequence[Shaping], _: object) -> Tensor:
    """What options do to logits if nothing of a path counts."""
    rows = logits.split([len(tree) + 1 for tree in trees])
    return torch.cat([one.of_paths(own, [()] * len(own)) for own, one in zip(rows, shapings, strict=True)])


def test_penalties_that_forget_the_path_are_caught(target: MarkovModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines do that count committed tokens alone."""
    monkeypatch.setattr(verifier, "shaped_trees", forgetting)
    params = SamplingParams(max_tokens=24, frequency_penalty=0.8)
    assert engine(target, "itself").generate(PROMPT, params).token_ids != greedy_by_definition(target, params)


SMALL = 4
SAMPLED: dict[str, Any] = {
    "presence_penalty": 0.8,
    "repetition_penalty": 1.4,
    "logit_bias": {1: 0.7},
    "bad_words": ((2, 3),),
    "temperature": 0.8,
    "top_p": 0.95,
}
ANSWERS = 4_096  # a total variation of 0.08 is caught with probability 0.95, what is planted by half as many


@pytest.mark.parametrize(
    ("branching", "forgets"),
    [
        pytest.param((1, 1, 1), False, id="chain", marks=pytest.mark.slow),  # a path of the tree
        pytest.param((2, 2), False, id="tree"),
        pytest.param((1, 1, 1), True, id="chain, planted"),
        pytest.param((2, 2), True, id="tree, planted", marks=pytest.mark.slow),
    ],
)
def test_sampled_answers_follow_the_law_of_the_definition(
    branching: tuple[int, ...], forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct engine fails with probability 1e-6; one whose penalties forget the path must."""
    if forgets:
        monkeypatch.setattr(verifier, "shaped_trees", forgetting)
    target, draft = MarkovModel.random(SMALL, seed=4), MarkovModel.random(SMALL, seed=9)
    params = SamplingParams(max_tokens=3, **SAMPLED)

    def probs_after(answer: tuple[int, ...]) -> list[float]:
        logits = target.probs_after([1, 2, *answer]).log().tolist()
        changed = torch.tensor([by_definition(logits, [1, 2], list(answer), params)], dtype=torch.float64)
        return probs_from_logits(changed, params)[0].tolist()  # type: ignore[no-any-return]

    made = fixed(target, DraftModel(draft, branching=branching), max_batch=64, entropy=0)
    answers = ANSWERS // 2 if forgets else ANSWERS
    found = p_value_of_answers(made, [1, 2], params, law_of(probs_after, 3), answers)
    assert found < 1e-6 if forgets else found > 1e-6


def test_options_that_leave_no_token_fail_their_request_alone(target: MarkovModel) -> None:
    wanting = SamplingParams(max_tokens=9, allowed_token_ids=(2, 3), bad_words=((2,), (3, 3)))
    answers = engine(target, "chain").generate([PROMPT, PROMPT], [wanting, SamplingParams(max_tokens=9)])
    assert answers[0].finish_reason == "error"
    assert "the options leave no token that may follow after 1 tokens of the answer" in str(answers[0].error)
    assert answers[1].token_ids == Engine(target).generate(PROMPT, SamplingParams(max_tokens=9)).token_ids


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"allowed_token_ids": (3, 12)}, "allowed_token_ids names token id 12, and the model's ids end at 11"),
        ({"logit_bias": {50: 1.0}}, "logit_bias names token id 50"),
        ({"bad_words": ((1, 99),)}, "bad_words names token id 99"),
        ({"bad_words": ("spam",)}, "'spam' needs a tokenizer"),
    ],
)
def test_ids_and_words_that_do_not_exist(target: MarkovModel, options: dict[str, Any], told: str) -> None:
    answer = Engine(target).generate([PROMPT], SamplingParams(**options))[0]
    assert answer.finish_reason == "error" and told in str(answer.error)
