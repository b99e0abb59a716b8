"""Bets on faults, on counts behind equal beginnings and on pairs of answers: all of them fair, and faults named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from certify.engines.known_answers import answer_by
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.e_process import EventTests
from truedraft.certify.engines.answer_probs import AnswerProbs, filtered
from truedraft.certify.engines.evidence import COPIED, Alternative, Bets, Repeated, alternatives_for, ngram_candidates
from truedraft.certify.engines.run import TwoSamples
from truedraft.core import probs as L
from truedraft.measure.peers import FILTERS

VOCAB = 6


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gains(
    alternatives: Sequence[Alternative],
    logits: Tensor,
    params: SamplingParams,
    slack: float = 0.0,
    drafts: Mapping[str, Tensor] | None = None,
    likeliest: int | None = None,
) -> Tensor:
    """What each bet gains at each token, `[vocab, alternatives, weights]`."""
    found = []
    for token in range(VOCAB):
        answer = answer_by(logits, [token], params, slack=slack)
        if likeliest is not None:
            answer = replace(answer, likeliest=logits.topk(likeliest, dim=-1).indices)
        bets = Bets(alternatives)
        bets.add(answer, drafts or {})
        found.append(bets._logs.exp())
    return torch.stack(found)


def worst_within(p: Tensor, gain: Tensor, slack: float) -> Tensor:
    """Among distributions whose logarithms lie within `slack` of p's the one that has the largest mean of `gain`."""
    order = gain.argsort(descending=True)
    best, value = p, float((p * gain).sum())
    for high in range(len(p) + 1):  # the best ones up, the others down, one in between takes what is left
        moved = p * math.exp(-slack)
        moved[order[:high]] = p[order[:high]] * math.exp(slack)
        for between in order.tolist():
            own = moved.clone()
            own[between] += 1.0 - own.sum()
            if p[between] * math.exp(-slack) - 1e-12 <= own[between] <= p[between] * math.exp(slack) + 1e-12:
                found = float((own * gain).sum())
                if found > value:
                    best, value = own, found
    return best


@pytest.mark.parametrize("slack", [0.0, 0.02, 0.1])
def test_no_engine_within_the_allowance_gains_on_average(slack: float) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95)
    for seed in range(15):
        logits = random_logits(1, seed)
        other = torch.softmax(random_logits(1, 100 + seed), dim=-1)

        def alternative(answer: AnswerProbs, drafts: Mapping[str, Tensor], other: Tensor = other) -> Tensor:
            return other * (answer.probs > 0.0) / (other * (answer.probs > 0.0)).sum()

        p = answer_by(logits, [0], params, slack=slack).probs[0]
        for gain in gains([Alternative("another", "another", alternative)], logits, params, slack)[:, 0].unbind(1):
            assert float((worst_within(p, gain, slack) * gain).sum()) <= 1.0 + 1e-9


def test_no_engine_whose_logits_are_off_gains_on_average() -> None:
    """Errors of logits move the normaliser, too: the worst ones lift what a bet is on, and lower all else."""
    params, off = SamplingParams(temperature=0.5), 0.1
    largest = 0.0
    for seed in range(15):
        logits, other = random_logits(1, seed), torch.softmax(random_logits(1, 100 + seed), dim=-1)
        another = Alternative("another", "another", lambda answer, drafts, other=other: other)
        gain = gains([another], logits, params, off)[:, 0]
        for high in range(1, VOCAB):
            lifted = gain[:, -1].argsort(descending=True)[:high]
            moved = logits - off
            moved[0, lifted] += 2.0 * off
            theirs = filtered(moved, params, FILTERS).probs[0]
            largest = max(largest, float((theirs @ gain).max()))
    assert 0.98 < largest <= 1.0 + 1e-9


def test_nothing_is_paid_on_a_doubtful_token_that_has_no_mass_here() -> None:
    """With a nucleus of 0.55 the second token is left out, and the engine may have kept it."""
    logits = torch.tensor([[0.56, 0.2, 0.1, 0.1, 0.03, 0.01]], dtype=torch.float64).log()
    params = SamplingParams(temperature=1.0, top_p=0.55)
    answer = answer_by(logits, [1], params, slack=0.05)
    assert bool(answer.doubtful[0, 1]) and float(answer.probs[0, 1]) == 0.0 and bool(answer.gain.isfinite()[0])
    bets = Bets([Alternative("another", "another", lambda own, drafts: own.under(SamplingParams(temperature=3.0), ()))])
    bets.add(answer, {})
    assert bets.log_evidence > -0.1  # what the allowance costs; the token itself pays nothing


def test_events_allow_for_odds_within_the_allowance() -> None:
    slack, p = 0.05, torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    for high in range(1, 7):
        members = torch.tensor([bool(high & 1), bool(high & 2), bool(high & 4)])
        moved = p * torch.where(members, math.exp(slack), math.exp(-slack))
        moved /= moved.sum()
        mean = torch.zeros(22, 1, dtype=torch.float64)
        for token in range(3):
            test = EventTests(["event"], 0.0, slack)
            test.add(torch.tensor([[float(p[members].sum())]]), members[token].view(1, 1))
            mean += moved[token] * test._logs.exp()
        assert float(mean.max()) <= 1.0 + 1e-9


@pytest.mark.slow
def test_nothing_is_gained_from_an_engine_that_cuts_a_nucleus_elsewhere_by_rounding() -> None:
    params, off = SamplingParams(temperature=0.8, top_p=0.8), 0.04
    generator = torch.Generator().manual_seed(11)
    alternatives = alternatives_for(params, FILTERS, ["draft"])
    elsewhere = 0
    for seed in range(80):
        logits = random_logits(1, seed)
        drafts = {"draft": torch.softmax(random_logits(1, 500 + seed), dim=-1)}
        gain = gains(alternatives, logits, params, off, drafts)
        for _ in range(20):
            noise = 2.0 * torch.rand(VOCAB, generator=generator, dtype=torch.float64) - 1.0
            theirs = filtered(logits + off * noise, params, FILTERS).probs[0]
            elsewhere += bool(((theirs > 0.0) != (answer_by(logits, [0], params, slack=off).probs[0] > 0.0)).any())
            assert float((theirs @ gain.flatten(1)).max()) <= 1.0 + 1e-9
    assert elsewhere > 10


def test_a_greedy_near_tie_is_passed_over() -> None:
    logits = torch.tensor([[1.0, 0.99, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    bets = Bets(alternatives_for(SamplingParams(), FILTERS, []))
    bets.add(answer_by(logits, [1], SamplingParams(), slack=0.01), {})
    assert bets.log_evidence == pytest.approx(0.0)


FAULTS = {
    "temperature applied twice": SamplingParams(temperature=0.6),
    "temperature ignored": SamplingParams(temperature=0.6),
    "greedy above temperature 0": SamplingParams(temperature=0.9),
    "top-p off by one token": SamplingParams(temperature=1.0, top_p=0.8),
    "top-k off by one token": SamplingParams(temperature=1.0, top_k=3),
    "filters in another order": SamplingParams(temperature=2.0, top_p=0.8),
    "state of another text": SamplingParams(temperature=1.0),
    "the residual is p": SamplingParams(temperature=1.0),
    "keeps every drafted token": SamplingParams(temperature=1.0),
    "judged at another temperature": SamplingParams(temperature=1.0),
    "drafted tokens of low q are dropped": SamplingParams(temperature=1.0),
}


@pytest.mark.parametrize(
    ("fault", "told_apart"),
    [
        *((fault, None) for fault in FAULTS),
        *((fault, 4) for fault in ("temperature applied twice", "top-p off by one token", "the residual is p")),
    ],
)
def test_a_fault_is_named(fault: str, told_apart: int | None) -> None:
    params = FAULTS[fault]
    generator = torch.Generator().manual_seed(7)
    alternatives = alternatives_for(params, FILTERS, ["draft"])
    bets = Bets(alternatives)
    wanted = next(one for one in alternatives if one.fault == fault)
    for seed in range(60 if told_apart is None else 80):
        logits = 2.0 * random_logits(40, seed)
        drafts = {"draft": torch.softmax(2.0 * random_logits(40, 1000 + seed), dim=-1)}
        emitted = wanted.probs(answer_by(logits, [0] * 40, params), drafts)
        answer = answer_by(logits, torch.multinomial(emitted, 1, generator=generator)[:, 0].tolist(), params)
        if told_apart is not None:
            answer = replace(answer, likeliest=logits.topk(told_apart, dim=-1).indices)
        bets.add(answer, drafts)
    best = bets.results()[0]
    assert best.log_evidence > math.log(1e3)
    assert best.fault == fault


def test_tokens_that_follow_the_target_lose_bets() -> None:
    generator = torch.Generator().manual_seed(8)
    params = SamplingParams(temperature=0.7)
    bets = Bets(alternatives_for(params, FILTERS, ["draft"]))
    most = 0.0
    for seed in range(60):
        logits = random_logits(40, seed)
        answer = answer_by(logits, [0] * 40, params)
        tokens = torch.multinomial(answer.probs, 1, generator=generator)[:, 0].tolist()
        drafts = {"draft": torch.softmax(random_logits(40, 1000 + seed), dim=-1)}
        bets.add(answer_by(logits, tokens, params), drafts)
        most = max(most, bets.log_evidence)
    assert most < math.log(1e3)


def test_shared_gumbel_noise_gives_what_drawing_with_it_gives() -> None:
    p = torch.softmax(random_logits(1, 5), dim=-1)
    q = torch.softmax(1.5 * random_logits(1, 6), dim=-1)
    draws = 200_000
    generator = torch.Generator().manual_seed(9)
    gumbel = -(-torch.rand(draws, VOCAB, generator=generator, dtype=torch.float64).log()).log()
    drafts = (q.log() + gumbel).argmax(dim=-1)
    kept = torch.rand(draws, generator=generator, dtype=torch.float64) < (p / q)[0, drafts]
    replaced = (L.residual(p, q).log() + gumbel).argmax(dim=-1)
    tokens = torch.where(kept, drafts, replaced)
    counted = torch.bincount(tokens, minlength=VOCAB) / draws
    expected = faults.ONE_GUMBEL.emitted(p, q)[0]
    assert float((expected - p[0]).abs().max()) > 0.01  # it is a fault
    assert (counted - expected).abs().max() < 5.0 * 0.5 / math.sqrt(draws)


def test_nobody_gains_on_average_where_only_some_tokens_are_told_apart() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    alternatives = alternatives_for(params, FILTERS, ["draft"])
    for seed in range(20):
        logits = random_logits(1, seed)
        drafts = {"draft": torch.softmax(random_logits(1, 500 + seed), dim=-1)}
        gain = gains(alternatives, logits, params, drafts=drafts, likeliest=3)
        assert float((answer_by(logits, [0], params).probs[0] @ gain.flatten(1)).max()) <= 1.0 + 1e-9


def test_candidates_are_copied_from_behind_the_same_tokens() -> None:
    # text 5 1 2 3 | 1 2 3: behind (5 1 2 3) the last token came nowhere before; behind 1 stood 2; behind 1 2 stood 3
    logits = torch.zeros(3, VOCAB, dtype=torch.float64)
    answer = answer_by(logits, [1, 2, 3], prompt=(5, 1, 2, 3))
    found = ngram_candidates(answer)
    assert found.sum(dim=-1).tolist() == [0.0, 1.0, 1.0]
    assert found.argmax(dim=-1).tolist()[1:] == [2, 3]


def test_nothing_is_wrong_with_drawing_where_nothing_was_drawn() -> None:
    names = [one.name for one in alternatives_for(SamplingParams(temperature=1.0), FILTERS, [COPIED])]
    assert f"{COPIED}: whatever the target says" in names
    assert f"{COPIED}: {faults.ONE_GUMBEL.detail}" not in names


P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)


def drawn(generator: torch.Generator, rows: Iterable[Tensor] = P) -> list[int]:
    return [int(torch.multinomial(row, 1, generator=generator)) for row in rows]


def add(found: Repeated, *tokens: int) -> None:
    found.add(answer_by(P[: len(tokens)].log(), list(tokens), prompt=(7,)))


def counted(*answers: tuple[int, ...]) -> Repeated:
    found = Repeated()
    for answer in answers:
        add(found, *answer)
    return found


def test_the_next_token_gains_nothing_on_average_whatever_came_before() -> None:
    past = [(0, 2), (0, 2), (1, 0), (0, 2)]
    before = counted(*past)._logs.clone()
    for number in range(len(before)):
        mean = sum(
            float(P[0, token]) * math.exp(float(counted(*past, (token,))._logs[number] - before[number]))
            for token in range(3)
        )
        assert mean == pytest.approx(1.0, abs=1e-5)


def test_answers_that_follow_the_target_give_no_evidence() -> None:
    generator = torch.Generator().manual_seed(1)
    found, most = Repeated(), 0.0
    for _ in range(800):
        add(found, *drawn(generator))
        most = max(most, found.log_evidence)
    assert most < math.log(1e3)


def test_a_joint_distribution_with_right_margins_is_found() -> None:
    # 60 % of second tokens are token 2, but never behind the token 0.
    generator = torch.Generator().manual_seed(2)
    found = Repeated()
    for _ in range(300):
        first = int(torch.multinomial(P[0], 1, generator=generator))
        second = 1 - int(torch.rand(1, generator=generator) < 0.5) if first == 0 else 2
        add(found, first, second)
    assert found.log_evidence > math.log(1e6)


def test_answers_that_share_their_noise_are_found_and_named() -> None:
    generator = torch.Generator().manual_seed(3)
    found = Repeated()
    for _ in range(60):
        answer = drawn(generator)
        for _ in range(4):
            add(found, *answer)
    assert found.log_shared > math.log(1e6)


def test_either_order_of_a_pair_is_as_good_on_average() -> None:
    past = [((0, 1), (0, 2)), ((1, 1), (0, 2)), ((0, 1), (1, 2))]
    pair = ((0, 1), (1, 2))
    logs = []
    for one, other in (pair, pair[::-1]):
        samples = TwoSamples()
        for first, second in past:
            samples.add((7,), first, second)
        before = samples._logs.clone()
        samples.add((7,), one, other)
        logs.append((samples._logs - before).exp())
    torch.testing.assert_close((logs[0] + logs[1]) / 2.0, torch.ones_like(logs[0]))
    assert not torch.allclose(logs[0], logs[1])


def pairs(second: torch.Tensor, count: int) -> TwoSamples:
    generator = torch.Generator().manual_seed(4)
    samples = TwoSamples()
    for _ in range(count):
        samples.add((7,), drawn(generator), drawn(generator, (second, P[1])))
    return samples


def test_engines_that_draw_alike_are_not_told_apart() -> None:
    assert pairs(P[0], 1000).process.log10 < 3.0


def test_engines_that_draw_otherwise_are_told_apart() -> None:
    samples = pairs(torch.tensor([0.35, 0.3, 0.35], dtype=torch.float64), 1500)
    assert samples.process.log10 > 3.0
    assert samples.different > 100
