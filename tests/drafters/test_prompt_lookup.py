"""Prompt lookup finds what followed the longest ending."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.drafters import DraftRequest, PromptLookup
from truedraft.drafters.prompt_lookup import copied
from truedraft.errors import OptionError
from truedraft.testing import MarkovModel

NOISE = KeyedNoise(0, 0, 0)


def propose(lookup: PromptLookup, request: DraftRequest, budget: Budget | None = None) -> list[int]:
    return lookup.propose([request], [budget or lookup.limits], [NOISE])[0].tree.host_ids


def slow_lookup(tokens: list[int], longest: int, shortest: int, length: int) -> list[int]:
    """The obvious version: for each size from the longest, look back from the end."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tokens) > size and tokens[start : start + size] == tokens[-size:]:
                guess = list(tokens)
                for place in range(start + size, start + size + length):
                    guess.append(guess[place])
                return guess[len(tokens) :]
    return []


def test_the_worked_example() -> None:
    lookup = PromptLookup(num_speculative_tokens=3)
    request = DraftRequest(0, SamplingParams(), [5, 6, 7, 5, 6])
    lookup.begin(request)
    assert propose(lookup, request) == [7, 5, 6]
    assert copied([5, 6, 7], 1, 5) == [6, 7, 6, 7, 6]
    assert propose(lookup, request, Budget(1)) == [7]
    assert propose(lookup, request, Budget(0)) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 39))
def test_it_agrees_with_the_obvious_version_however_the_text_grows(tokens: list[int], cut: int) -> None:
    lookup = PromptLookup(num_speculative_tokens=4, max_ngram=3, min_ngram=1)
    request = DraftRequest(0, SamplingParams(), tokens[:cut])
    lookup.begin(request)
    assert propose(lookup, request) == slow_lookup(request.tokens, 3, 1, 4)
    for token in tokens[cut:]:
        request.tokens.append(token)
        assert propose(lookup, request) == slow_lookup(request.tokens, 3, 1, 4)


def test_a_repeating_answer_is_accepted_in_blocks() -> None:
    target = MarkovModel.random(4, seed=3)
    answer = Engine(target, PromptLookup(), controller="fixed").generate([1, 2], SamplingParams(max_tokens=60))
    assert answer.stats.mean_acceptance_length > 4.0


def test_state_ends_with_the_request() -> None:
    lookup = PromptLookup()
    request = DraftRequest(3, SamplingParams(), [1, 2])
    lookup.begin(request)
    lookup.end(request)
    lookup.end(request)  # a failed request may be ended without having begun
    with pytest.raises(KeyError):
        propose(lookup, request)


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 0}, {"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        PromptLookup(**options)
