"""What an engine promises beside its distribution, what it may be asked with, and greedy answers of two of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from certify.engines.known_answers import SAMPLED, model, reply
from support.letters import Letters
from truedraft import SamplingParams
from truedraft.certify import Report
from truedraft.certify.checks import Status
from truedraft.certify.engines import certify_engine, compare_engines
from truedraft.certify.engines.answer_probs import EXACT, AnswerProbs, Judge
from truedraft.certify.engines.evidence import (
    COPIED,
    WEIGHTS,
    Bets,
    Evidence,
    alternatives_for,
    drafted,
    ngram_candidates,
)
from truedraft.certify.engines.under_test import check_lengths, check_stops
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import FILTERS, Peer, PeerFacts, ProcessPeer, Question, Reply
from truedraft.testing import MarkovModel


@pytest.mark.parametrize(("unsure", "status"), [("", Status.FAILS), ("read from its text", Status.HOLDS)])
def test_an_answer_is_too_long_only_where_its_ids_are_those_that_were_drawn(unsure: str, status: Status) -> None:
    asked = Question((1, 2), SamplingParams(max_tokens=2))
    kept, *_ = check_lengths([(asked, Reply((1, 2, 3), "abc", "length", unsure=unsure))], model())
    assert kept.status is status


def test_an_allowance_that_is_none_is_refused() -> None:
    for allowance in (math.nan, math.inf, -1.0):
        peer = ProcessPeer(lambda prompt, max_tokens, temperature: [0] * max_tokens)
        with pytest.raises(OptionError, match=f"allowance must be a number of 0 or more, got {allowance}"):
            certify_engine(peer, model(), [(1, 2)], SAMPLED, allowance=allowance)


Answers = Mapping[int, tuple[int, int, float] | tuple[()] | None]


def told(answers: Answers, mode: str) -> Peer:
    """Answers each prompt of one token by a token and its nearest rival, this far below it; None drops the answer."""

    def instead(question: Question, reply: Reply) -> Reply | PeerError:
        answer = answers[question.prompt[0]]
        if answer is None:
            return PeerError("no")
        if not answer:
            return Reply((), None, "stop", (), ())
        token, rival, below = answer
        if not question.params.logprobs:
            return Reply((token,))
        top = [(token, -0.5), (rival, -0.5 - below)][: question.params.logprobs]
        return Reply((token,), None, "length", (-0.5,), (dict(top),))

    return Drawing(instead, mode)


NEAR, APART = (3, 4, 0.01), (3, 4, 2.0)


@pytest.mark.parametrize(
    ("one", "two", "mode", "status", "facts"),
    [
        ({1: NEAR, 2: APART}, {1: (4, 3, 0.01), 2: APART}, "raw", Status.HOLDS, {"near_ties": 1}),
        ({1: NEAR, 2: APART}, {1: NEAR, 2: (4, 3, 2.0)}, "raw", Status.FAILS, {"same": 1}),
        # What is dropped shifts no other.
        ({1: APART, 2: (5, 6, 2.0)}, {1: None, 2: (5, 6, 2.0)}, "raw", Status.HOLDS, {"same": 1}),
        # The end itself has no log-probabilities; going on has.
        ({1: NEAR}, {1: ()}, "raw", Status.HOLDS, {"near_ties": 1}),
        ({1: ()}, {1: APART}, "raw", Status.FAILS, {"near_ties": 0}),
        ({1: NEAR}, {1: (4, 3, 0.01)}, "", Status.MEASURED, {"near_ties": 0}),
    ],
)
def test_greedy_answers_part_at_near_ties_alone(
    one: Answers, two: Answers, mode: str, status: Status, facts: dict[str, int]
) -> None:
    peers = told(one, mode), told(two, mode)
    (found,) = compare_engines(*peers, [(token,) for token in one], SamplingParams()).findings
    assert found.status is status and facts.items() <= found.facts.items()


@pytest.mark.parametrize(
    ("reply", "ends", "wrong"),
    [
        (Reply((0, 1), "ab", "stop"), (), 0),
        (Reply((0, 1, 2), None, "length"), (), 1),  # goes on past it
        (Reply((0, 1, 2, 3), "abcd", "length"), (), 1),
        (Reply((0,), "a", "stop"), (), 1),  # ends before it
        (Reply((0,), "a", "stop"), (5,), 0),  # which an end of text may do
        (Reply((0,), "a", "length"), (), 0),
        (Reply((0, 4), "ae", "stop"), (), 0),  # another answer than without the stop text
    ],
)
def test_answers_end_at_their_stop_text(reply: Reply, ends: tuple[int, ...], wrong: int) -> None:
    plain = Question((0,), SamplingParams(max_tokens=8))
    stopped = replace(plain, params=replace(plain.params, stop=("c",)))
    model = MarkovModel(torch.tensor([0.1] * 5 + [0.5]).expand(6, 6, 6), eos_token_ids=ends)
    judge = Judge(model, FILTERS, EXACT)
    found = check_stops([(stopped, reply)], [(plain, Reply((0, 1, 2, 3)))], Letters(6), judge)  # type: ignore[arg-type]
    assert found.facts["wrong"] == wrong and (found.status is Status.FAILS) == bool(wrong)


TARGET = model()
PROMPTS = [(a, b) for a in range(3) for b in range(3)]


class Drawing(Peer):
    """Draws from the target itself, greedily where that is asked for; tells raw log-probabilities.

    `instead` may put another reply in the place of one to a question.
    """

    def __init__(
        self,
        instead: Callable[[Question, Reply], Reply | PeerError] = lambda question, reply: reply,
        mode: str = "raw",
        takes: Sequence[str] = (),
    ) -> None:
        self.facts = PeerFacts("drawing", "", takes=("max_tokens", "temperature", "logprobs", *takes), logprobs=mode)
        self._generator = torch.Generator().manual_seed(1)
        self.instead = instead
        self.asked: list[Question] = []

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        self.asked += questions
        yield from ((number, self.instead(each, self._drawn(each))) for number, each in enumerate(questions))

    def _drawn(self, question: Question) -> Reply:
        text, told = list(question.prompt), []
        for _ in range(question.params.max_tokens):
            p = TARGET.probs_after(text)
            drawn = p.argmax() if question.params.greedy else torch.multinomial(p, 1, generator=self._generator)[0]
            text.append(int(drawn))
            told.append(math.log(float(p[drawn])))
        ids = tuple(text[len(question.prompt) :])
        return Reply(ids, None, "length", tuple(told) if question.params.logprobs else None)


def certified(peer: Peer, tokens: int = 400, **more: Any) -> Report:
    return certify_engine(peer, TARGET, PROMPTS, SAMPLED, tokens=tokens, together=4, **more)


def status_of(report: Report, name: str) -> Status:
    return next(each.status for each in report.findings if each.name == name)


def test_an_engine_that_draws_from_the_target_deviates_in_nothing() -> None:
    report = certified(Drawing(), tokens=2000)
    assert not report.failures
    assert status_of(report, "told log-probabilities are the target's") is Status.MEASURED
    assert report.facts["allowance"] < 1e-3


def test_long_answers_are_asked_for_as_many_at_once_as_short_ones() -> None:
    peer = Drawing()
    certified(peer, tokens=400)
    sampled = [question.params.max_tokens for question in peer.asked if not question.params.greedy]
    assert sampled.count(48) >= 4


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_no_tokens_are_not_enough(params: SamplingParams) -> None:
    peer = Drawing(lambda question, reply: Reply(()) if question.params.greedy else reply)
    report = certify_engine(peer, TARGET, PROMPTS, params, tokens=64)
    assert "greedy tokens at their own prefixes" in [each.name for each in report.undecided]


def test_log_probabilities_behind_temperature_and_filters_are_not_compared() -> None:
    wrong = Drawing(lambda question, reply: replace(reply, logprobs=(-9.0,) * 32), "processed")
    report = certified(wrong)
    assert status_of(report, "told log-probabilities are the target's") is Status.DOES_NOT_APPLY
    assert report.facts["allowance"] == pytest.approx(0.015)


def test_an_engine_that_refuses_log_probabilities_is_asked_without() -> None:
    peer = Drawing(lambda question, reply: PeerError("no logprobs") if question.params.logprobs else reply)
    report = certified(peer)
    assert status_of(report, "greedy tokens at their own prefixes") is Status.HOLDS
    assert not report.facts["dropped"]
    peer.asked.clear()
    report = certify_engine(peer, TARGET, PROMPTS, SamplingParams(), tokens=4000, together=4)
    plain_ones = [question for question in peer.asked if question.params.logprobs is None]
    assert len(plain_ones) == len(PROMPTS)  # as many as with them


def test_ids_that_the_model_has_not_are_dropped_and_told() -> None:
    answers = itertools.count()
    report = certified(Drawing(lambda question, reply: reply if next(answers) % 9 else Reply((0, 99))))
    assert report.facts["dropped"]["it answered token id 99, and the model has 6: its tokenizer is another one"] > 1


def test_ids_that_were_read_from_text_call_nothing_a_fault() -> None:
    always = Reply((0,) * 4, None, "length")
    report = certified(Drawing(lambda question, reply: always), tokens=2000)
    assert status_of(report, "sampled tokens at their own prefixes") is Status.FAILS
    report = certified(Drawing(lambda question, reply: replace(always, unsure="of its text")), tokens=2000)
    assert status_of(report, "sampled tokens at their own prefixes") is Status.NOT_ENOUGH
    assert not report.failures


def test_a_draft_that_knows_fewer_ids_and_shorter_texts_is_taken_as_far_as_it_goes() -> None:
    small = MarkovModel.random(4, seed=2, context_length=20)
    assert not certified(Drawing(), drafts={"small": small}).failures


def test_an_engine_that_fails_at_last_loses_nothing_of_what_was_found() -> None:
    peer = Drawing(
        lambda question, reply: PeerError("gone") if question.params.max_tokens == 24 else reply, takes=["seed"]
    )
    report = certify_engine(peer, TARGET, PROMPTS, SamplingParams(temperature=1.0, seed=0), tokens=400, together=1)
    assert "stop texts and seeds" in [each.name for each in report.undecided]
    assert status_of(report, "greedy tokens at their own prefixes") is Status.HOLDS


def test_time_is_looked_at_between_groups_of_questions() -> None:
    peer = Drawing()
    certified(peer, tokens=10**6, seconds=1e-6)
    assert not [question for question in peer.asked if not question.params.greedy]


def test_answers_that_end_where_the_engines_context_is_full_are_not_short() -> None:
    params = SamplingParams(max_tokens=8)
    full = [(Question(tuple(range(n)), params), Reply((1,) * (9 - n))) for n in (4, 5)]
    *_, kept = check_lengths(full, TARGET)
    assert kept.status is Status.HOLDS
    *_, kept = check_lengths([*full, (Question((0, 1), params), Reply((1, 2)))], TARGET)
    assert kept.status is Status.FAILS


def answer_of(*tokens: int) -> AnswerProbs:
    question = Question((1, 2), SamplingParams(temperature=1.0, max_tokens=len(tokens)))
    (answer,) = Judge(TARGET, FILTERS, EXACT).answer_probs([(question, Reply(tokens))])
    return answer


def test_bets_pay_for_answers_that_were_dropped_and_other_evidence_stands_still() -> None:
    evidence = Evidence(6, SAMPLED, FILTERS, [], 0.0)
    evidence.add(answer_of(0, 1, 2, 3), {}, repeated=True)
    before = evidence.log_parts()
    evidence.lose(1, 4)
    paid = evidence.log_parts()
    assert {name for name in before if before[name] != paid[name]} == {"bets"} and paid["bets"] < before["bets"]
    evidence.add(answer_of(0, 1, 2, 3), {}, repeated=True)
    after = evidence.log_parts()
    assert {name for name in before if paid[name] != after[name]} == {"bets", "outside"}
    assert evidence._events.tokens == 8


def test_no_choice_among_answers_gains_more_than_what_was_paid_for_them() -> None:
    """Whatever an answer that was dropped said, bets would have been as low at the least as they are after paying."""
    for tokens in itertools.product(range(6), repeat=2):
        known, unknown = (Bets(alternatives_for(SAMPLED, FILTERS, [COPIED])) for _ in range(2))
        answer = answer_of(*tokens)
        known.add(answer, {COPIED: ngram_candidates(answer)})
        unknown.lose(2, 0.0)
        assert (unknown._logs <= known._logs + 1e-12).all()


def test_an_engine_whose_answers_are_dropped_for_what_they_say_is_not_called_faulty() -> None:
    """Every answer that ends with token 3, so that what is left lacks it."""
    dropped = PeerError("half a character")
    report = certified(Drawing(lambda question, reply: dropped if reply.token_ids[-1] == 3 else reply), tokens=4000)
    assert sum(report.facts["dropped"].values()) > 20
    assert not report.failures


def test_two_servers_one_of_which_drops_answers_are_not_called_different() -> None:

    def instead(question: Question, reply: Reply) -> Reply | PeerError:
        drops = reply.token_ids[0] == 3 and not question.params.greedy
        return PeerError("half a character") if drops else reply

    report = compare_engines(Drawing(), Drawing(instead), PROMPTS, SAMPLED, tokens=6000, together=4)
    finding = report.findings[0]
    assert finding.status is Status.NOT_ENOUGH and "were dropped" in finding.summary


def test_a_draft_without_some_ids_gains_nothing_on_average() -> None:
    """Whether there is a draft at a token must not hang on that token."""
    small = MarkovModel.random(4, seed=2)
    alternatives = alternatives_for(SAMPLED, FILTERS, ["small"])
    judge = Judge(TARGET, FILTERS, EXACT, {"small": small})
    mean = torch.zeros(len(alternatives), len(WEIGHTS), dtype=torch.float64)
    for token in range(6):
        answer = answer_of(0, token)
        drafts = drafted(answer, judge)
        assert drafts["small"].sum(dim=-1).tolist() == pytest.approx([1.0, 1.0])
        first, both = Bets(alternatives), Bets(alternatives)
        first.add(answer_of(0), {name: q[:1] for name, q in drafts.items()})
        both.add(answer, drafts)
        mean += answer.probs[1, token] * (both._logs - first._logs).exp()
    assert float(mean.max()) <= 1.0 + 1e-9


def test_the_order_of_ends_of_text_changes_no_bet() -> None:
    logs = []
    for ends in ((4, 5), (5, 4)):
        params = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=8)
        answered = Question((1, 2), params), reply(0, 3, 1, ended="stop")
        (answer,) = Judge(model(ends), FILTERS, EXACT).answer_probs([answered])
        bets = Bets(alternatives_for(params, FILTERS, []))
        bets.add(answer, {})
        logs.append(bets._logs)
    # all but what looks at ids: the last token again
    torch.testing.assert_close(logs[0], logs[1])


def test_a_fault_of_greedy_answers_is_told_though_the_engine_fails_afterwards() -> None:
    gone = PeerError("gone")
    report = certified(Drawing(lambda question, reply: Reply((0,) * 32) if question.params.greedy else gone))
    assert status_of(report, "greedy tokens at their own prefixes") is Status.FAILS
    with pytest.raises(PeerError, match="gone"):
        certified(Drawing(lambda question, reply: gone))
