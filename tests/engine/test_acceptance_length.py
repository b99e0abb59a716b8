"""The mean acceptance length counts every token that a call of the target gave, those that end an answer included."""

from __future__ import annotations

import pytest

from cli.tiny import tiny_tokenizer
from truedraft import Engine, SamplingParams
from truedraft.engine import Answer
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.text.tokenizer import Tokenizer

PROMPT = [3, 1, 4]
CHAIN = [2, 5, 3, 6, 1, 4, 7]  # the target goes round these


@pytest.fixture
def target() -> MarkovModel:
    """Goes on with the next token of the chain; its ids above 0 are printable characters."""
    model = MarkovModel.random(8, seed=1)
    model.probs.zero_()
    for token in range(8):
        model.probs[..., token, CHAIN[(CHAIN.index(token) + 1) % 7] if token in CHAIN else CHAIN[0]] = 1.0
    model.tokenizer = Tokenizer(tiny_tokenizer(), "tiny")
    return model


def follow(tokens: list[int], count: int) -> list[int]:
    """What the target goes on with."""
    start = CHAIN.index(tokens[-1]) + 1
    return [CHAIN[(start + i) % 7] for i in range(count)]


def ended(target: MarkovModel, depth: int) -> list[tuple[Answer, int]]:
    """Answers that end by an end of text, a stop id and a stop text; and how many tokens ended each."""
    drafter = ScriptedDrafter(lambda tokens: [follow(list(tokens), depth)], depth=depth) if depth else None
    text = target.tokenizer.decode(follow(PROMPT, 6)[4:])  # the fifth and sixth token
    ending = MarkovModel(target.probs, eos_token_ids=(follow(PROMPT, 6)[5],))
    ending.tokenizer = target.tokenizer
    return [
        (Engine(ending, drafter, controller="fixed").generate(PROMPT), 1),
        (
            Engine(target, drafter, controller="fixed").generate(
                PROMPT, SamplingParams(stop_token_ids=(follow(PROMPT, 6)[5],))
            ),
            1,
        ),
        (Engine(target, drafter, controller="fixed").generate(PROMPT, SamplingParams(stop=(text,))), 2),
    ]


def test_plain_decoding_has_exactly_one_however_it_ends(target: MarkovModel) -> None:
    for answer, behind in ended(target, depth=0):
        stats = answer.stats
        assert (answer.finish_reason, stats.stop_tokens) == ("stop", behind)
        assert stats.prefill_tokens + stats.emitted_tokens == len(answer.token_ids) == 6 - behind
        assert stats.mean_acceptance_length == 1.0


def test_what_was_drafted_behind_the_end_is_not_counted(target: MarkovModel) -> None:
    """The prompt's forward gives one token, a call with four right guesses all others: five, and none behind them."""
    for answer, behind in ended(target, depth=6):
        assert (answer.finish_reason, answer.stats.stop_tokens) == ("stop", behind)
        assert (answer.stats.target_calls, answer.stats.mean_acceptance_length) == (1, 5.0)


def test_an_answer_that_ends_in_the_prompts_own_forward_has_no_call(target: MarkovModel) -> None:
    answer = Engine(target).generate(PROMPT, SamplingParams(stop_token_ids=(follow(PROMPT, 1)[0],)))
    assert (answer.token_ids, answer.stats.stop_tokens, answer.stats.target_calls) == ([], 0, 0)
