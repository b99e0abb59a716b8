"""What options do to logits: by definition, against transformers' own processors, and on trees."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from truedraft import SamplingParams
from truedraft.core.shaping import Shaping, shaped_trees
from truedraft.core.tree import TokenTree

VOCAB = 12
PROMPT = [3, 1, 4, 1, 5]
ANSWER = [2, 7, 7]
ENDS = [0, 11]


def shaping(answer: list[int] = ANSWER, **options: Any) -> Shaping:
    params = SamplingParams(**options)
    words = [word for word in params.bad_words if not isinstance(word, str)]
    return Shaping(params, [*PROMPT, *answer], len(PROMPT), ENDS, words, VOCAB)


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


def by_transformers(processor: Any, logits: Tensor, answer: list[int] = ANSWER) -> Tensor:
    return processor(torch.tensor([[*PROMPT, *answer]]), logits.clone())


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(1)
    expected = by_transformers(RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert torch.equal(shaping(repetition_penalty=penalty).of_paths(logits, [()]), expected)


def test_biases_are_those_of_transformers() -> None:
    logits = random_logits(1)
    expected = by_transformers(SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -100.0}), logits)
    assert torch.equal(shaping(logit_bias={9: -100, 4: 2.5}).of_paths(logits, [()]), expected)


@pytest.mark.parametrize("words", [((7,),), ((7, 7),), ((7, 2), (7, 7, 5)), ((2, 7, 7, 6), (1, 5, 2))])
def test_bad_words_are_those_of_transformers(words: tuple[tuple[int, ...], ...]) -> None:
    logits = random_logits(1)
    expected = by_transformers(NoBadWordsLogitsProcessor([list(word) for word in words]), logits)
    assert torch.equal(shaping(bad_words=words).of_paths(logits, [()]), expected)


@pytest.mark.parametrize("least", [3, 4])
def test_min_tokens_is_that_of_transformers(least: int) -> None:
    logits = random_logits(1)
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, ENDS)
    assert torch.equal(shaping(min_tokens=least).of_paths(logits, [()]), by_transformers(processor, logits))


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """By hand: the answer is 2 7 7, so 7 loses 0.5 + 2 * 0.25 and 2 loses 0.75; nothing of the prompt does."""
    logits = torch.zeros(1, VOCAB)
    found = shaping(presence_penalty=0.5, frequency_penalty=0.25).of_paths(logits, [()])[0]
    assert {token: -float(found[token]) for token in range(VOCAB) if found[token]} == {2: 0.75, 7: 1.0}


def test_the_order_of_options() -> None:
    """A bias comes before penalties: 2 becomes positive by it and is halved; what is banned stays so."""
    logits = torch.full((1, VOCAB), -1.0)
    options: dict[str, Any] = {"repetition_penalty": 2.0, "allowed_token_ids": (2, 3, 6), "bad_words": ((7, 6),)}
    found = shaping(logit_bias={2: 5.0, 9: 100.0, 6: 50.0}, **options).of_paths(logits, [()])[0].tolist()
    assert found == [-math.inf] * 2 + [2.0, -2.0] + [-math.inf] * (VOCAB - 4)


ALL: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.7,
    "logit_bias": {4: 1.5, 0: 3.0},
    "min_tokens": 5,
    "bad_words": ((7, 3), (6,), (3, 3, 1)),
    "allowed_token_ids": tuple(range(1, VOCAB)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{name: value} for name, value in ALL.items()] + [ALL], ids=[*ALL, "all"])
def test_at_a_node_it_is_what_plain_decoding_comes_to(options: dict[str, Any], dtype: torch.dtype) -> None:
    """The same bits as at the root, had the node's path been committed, at once or step by step."""
    tree = TokenTree.from_paths([[7, 3, 3, 1], [7, 3, 9], [5, 5, 5], [2]])
    logits = random_logits(len(tree) + 1).to(dtype)
    params = SamplingParams(max_tokens=9, **options)
    words = [word for word in params.bad_words if not isinstance(word, str)]
    tokens = list(PROMPT)
    stepwise = Shaping(params, tokens, len(PROMPT), ENDS, words, VOCAB)
    for token in ANSWER:
        stepwise.of_paths(logits[:1], [()])
        tokens.append(token)
    found = shaped_trees(logits, [tree], [stepwise], [False])
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(len(tree) + 1):
        path = tree.path_tokens(row - 1) if row else ()
        committed = shaping([*ANSWER, *path], **(options | {"max_tokens": 9}))
        assert torch.equal(found[row], committed.of_paths(logits[row : row + 1], [()])[0])


def test_given_logits_and_columns_of_a_larger_draft_stay() -> None:
    logits = random_logits(2)
    before, wide = logits.clone(), torch.cat([logits, torch.ones(2, 3)], 1)
    found = shaping(**ALL | {"max_tokens": 9}).of_paths(wide, [(), (7,)])
    assert torch.equal(logits, before)
    assert torch.equal(found[:, VOCAB:], wide[:, VOCAB:])


def test_only_options_that_look_at_tokens_read_paths() -> None:
    assert not shaping(allowed_token_ids=(1,), logit_bias={1: 1.0}, min_tokens=2, bad_words=((3,),)).reads_paths
    for name, value in {"presence_penalty": 1, "repetition_penalty": 2, "bad_words": ((1, 2),)}.items():
        assert shaping(**{name: value}).reads_paths


def test_only_params_that_change_logits_shape_them() -> None:
    assert not SamplingParams(temperature=0.7, top_k=3, logprobs=2, stop=("a",)).shapes_logits
    for name, value in ALL.items():
        assert SamplingParams(**{name: value}).shapes_logits, name


def test_random_options_by_definition() -> None:
    """All options at once, in plain Python, over random texts."""
    draw = random.Random(5)
    for seed in range(40):
        answer = [draw.randrange(VOCAB) for _ in range(draw.randrange(6))]
        path = tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(4)))
        options = {name: value for name, value in ALL.items() if draw.random() < 0.6}
        logits = random_logits(1, seed).double()
        made = shaping(answer, **options | {"max_tokens": 9}).of_paths(logits, [path])[0]
        expected = by_definition(
            logits[0].tolist(), [*PROMPT], [*answer, *path], SamplingParams(max_tokens=9, **options)
        )
        assert made.tolist() == pytest.approx(expected)


def by_definition(logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    found = []
    text = prompt + answer
    for token, value in enumerate(logits):
        logit = value
        banned = bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        for word in params.bad_words:
            banned |= tuple([*text, token][-len(word) :]) == word
        banned |= token in ENDS and len(answer) < params.min_tokens
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in text:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * answer.count(token) + params.presence_penalty * (token in answer)
        found.append(-math.inf if banned else logit)
    return found


def test_copies_of_params_keep_what_was_given() -> None:
    params = SamplingParams(**ALL | {"max_tokens": 9})
    assert dataclasses.replace(params, seed=1).logit_bias == ((0, 3.0), (4, 1.5))
    assert hash(params) == hash(dataclasses.replace(params))
