"""What an engine promises beside its distribution, what it may be asked with, and greedy answers of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from truedraft import SamplingParams
from truedraft.certify.checks import Status
from truedraft.certify.engines import EngineReport, certify_engine, compare_engines
from truedraft.certify.engines.behaviour import lengths
from truedraft.errors import OptionError, PeerError
from truedraft.peers import Peer, PeerFacts, ProcessPeer, Question, Reply
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


class Told(Peer):
    """Answers each prompt of one token by a token and its nearest rival, this far below it; None drops the answer."""

    def __init__(self, told: Mapping[int, tuple[int, int, float] | None]) -> None:
        self.facts = PeerFacts("told", "", takes=("max_tokens", "logprobs"), logprobs="raw")
        self._told = told

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Reply | PeerError:
        told = self._told[question.prompt[0]]
        if told is None:
            return PeerError("no")
        token, rival, below = told
        top = {token: -0.5, rival: -0.5 - below}
        shown = dict(list(top.items())[: question.params.logprobs])
        return Reply((token,), None, "length", (-0.5,), (shown,))


def compared(
    one: Mapping[int, tuple[int, int, float] | None], two: Mapping[int, tuple[int, int, float] | None]
) -> EngineReport:
    prompts = [(token,) for token in one]
    return compare_engines(Told(one), Told(two), prompts, SamplingParams(), sends_seeds=False)


def test_greedy_answers_that_part_at_a_near_tie_are_no_deviation() -> None:
    first = {1: (3, 4, 0.01), 2: (5, 6, 2.0)}
    report = compared(first, {1: (4, 3, 0.01), 2: (5, 6, 2.0)})
    assert not report.deviates and report.findings[0].facts["near_ties"] == 1
    assert compared(first, {1: (3, 4, 0.01), 2: (6, 5, 2.0)}).deviates


def test_a_greedy_answer_that_was_dropped_shifts_no_other() -> None:
    first = {1: (3, 4, 2.0), 2: (5, 6, 2.0)}
    report = compared(first, {1: None, 2: (5, 6, 2.0)})
    assert not report.deviates and report.findings[0].facts["same"] == 1
