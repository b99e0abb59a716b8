"""The mean acceptance length counts every token that a call of the target gave, those that end an answer included."""

from __future__ import annotations

import pytest

from cli.tiny import tiny_tokenizer
from truedraft import Engine, SamplingParams
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


@pytest.mark.parametrize(("depth", "length"), [(0, 1.0), (6, 5.0)])
def test_it_counts_what_came_up_to_the_end(target: MarkovModel, depth: int, length: float) -> None:
    """Answers that end by an end of text, a stop id and a stop text of two tokens. Plain decoding has exactly one; a
    call with right guesses gives all but the prompt's own token: five, and none behind the end."""
    drafter = ScriptedDrafter(lambda tokens: [follow(list(tokens), depth)], depth=depth) if depth else None
    *_, fifth, last = follow(PROMPT, 6)
    ending = MarkovModel(target.probs, eos_token_ids=(last,))
    ending.tokenizer = target.tokenizer
    text = SamplingParams(stop=(target.tokenizer.decode([fifth, last]),))
    by_id = SamplingParams(stop_token_ids=(last,))
    for model, params, behind in ((ending, SamplingParams(), 1), (target, by_id, 1), (target, text, 2)):
        answer = Engine(model, drafter, controller="fixed").generate(PROMPT, params)
        stats = answer.stats
        assert (answer.finish_reason, stats.stop_tokens, stats.mean_acceptance_length) == ("stop", behind, length)
        assert stats.prefill_tokens + stats.emitted_tokens == len(answer.token_ids) == 6 - behind
        assert stats.target_calls == (1 if depth else 5)


def test_an_answer_that_ends_in_the_prompts_own_forward_has_no_call(target: MarkovModel) -> None:
    answer = Engine(target).generate(PROMPT, SamplingParams(stop_token_ids=(follow(PROMPT, 1)[0],)))
    assert (answer.token_ids, answer.stats.stop_tokens, answer.stats.target_calls) == ([], 0, 0)
