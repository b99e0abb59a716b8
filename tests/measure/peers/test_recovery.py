"""What a server told, read as token ids."""

from __future__ import annotations

import math

import pytest

from truedraft import SamplingParams
from truedraft.measure.peers import Question
from truedraft.measure.peers.recovery import ReceivedAnswer, Recovery

ASKED = Question((1, 2), SamplingParams(max_tokens=2))


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_log_probabilities_that_are_no_numbers_are_as_good_as_none(broken: float) -> None:
    recovery = Recovery(None, vocab_size=8)
    for values, read in ((-1.0, -2.0), (-1.0, -2.0)), ((-1.0, broken), None):
        assert recovery.reply(ReceivedAnswer(None, "length", (3, 4), (3, 4), values), ASKED).logprobs == read
