"""What an engine promises beside its distribution, and what it may be asked with."""

from __future__ import annotations

import math

import pytest

from truedraft import SamplingParams
from truedraft.certify.checks import Status
from truedraft.certify.engines import certify_engine
from truedraft.certify.engines.behaviour import lengths
from truedraft.errors import OptionError
from truedraft.peers import ProcessPeer, Question, Reply
from truedraft.testing import MarkovModel


@pytest.mark.parametrize(("unsure", "status"), [("", Status.FAILS), ("read from its text", Status.HOLDS)])
def test_an_answer_is_too_long_only_where_its_ids_are_those_that_were_drawn(unsure: str, status: Status) -> None:
    asked = Question((1, 2), SamplingParams(max_tokens=2))
    kept, *_ = lengths([(asked, Reply((1, 2, 3), "abc", "length", unsure=unsure))], MarkovModel.random(6, seed=1))
    assert kept.status is status


@pytest.mark.parametrize("allowance", [math.nan, math.inf, -1.0])
def test_an_allowance_that_is_none_is_refused(allowance: float) -> None:
    target = MarkovModel.random(6, seed=1)
    peer = ProcessPeer(lambda prompt, max_tokens, temperature: [0] * max_tokens)
    with pytest.raises(OptionError, match=f"allowance must be a number of 0 or more, got {allowance}"):
        certify_engine(peer, target, [(1, 2)], SamplingParams(temperature=1.0), allowance=allowance)
