"""Requests under lossy rules: which distributions they are judged by, what their statistics say, and what stays
exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from support.answers import fixed
from support.fixed_noise import answers_of
from support.letters import Letters
from support.pairwise import pairwise
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.core.verdict import Divergence
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.engine import Answer
from truedraft.errors import InvalidLogitsError, OptionError
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.verification import LenientSampling, Rule, SpeculativeSampling, TypicalAcceptance

VOCAB = 8
PROMPT = [3, 1, 4]
RULES = [LenientSampling(0.5), LenientSampling(0.05), TypicalAcceptance(), TypicalAcceptance(0.02, 0.1)]
DRAFTERS = {
    "none": lambda: None,
    "prompt lookup": lambda: PromptLookup(min_ngram=1),
    "chain": lambda: DraftModel(MarkovModel.random(VOCAB, seed=2)),
    "tree": lambda: DraftModel(MarkovModel.random(VOCAB, seed=2), branching=(3, 2, 1)),
}
OPTIONS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.9),
    "nucleus": SamplingParams(max_tokens=40, temperature=1.3, top_p=0.8, top_k=5),
}


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(VOCAB, seed=1)


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter | None:
    return DRAFTERS[request.param]()


@pytest.fixture(params=RULES, ids=lambda rule: rule.spec)
def rule(request: pytest.FixtureRequest) -> Rule:
    return request.param


def probs_on(target: MarkovModel, answer: Answer) -> list[torch.Tensor]:
    """The target's distribution at temperature 1 before each token of an answer."""
    return [target.probs_after([*PROMPT, *answer.token_ids[:i]]) for i in range(len(answer.token_ids))]


def engine_of(target: MarkovModel, rule: Rule, drafter: str = "tree") -> Engine:
    return fixed(target, DRAFTERS[drafter](), rule, entropy=5)


def tokens_judged(answer: Answer) -> int:
    assert answer.stats.divergence is not None
    return answer.stats.divergence.tokens


# ------------------------------------------------------------------------------- the statistics


@pytest.mark.parametrize(
    ("drafter", "rule", "options"),
    pairwise(DRAFTERS, [pytest.param(rule, id=rule.spec) for rule in RULES], OPTIONS),
    indirect=["drafter", "rule"],
)
def test_every_emitted_token_is_measured_once(
    target: MarkovModel, drafter: Drafter | None, rule: Rule, options: str
) -> None:
    stats = fixed(target, drafter, rule, entropy=5).generate(PROMPT, OPTIONS[options]).stats
    assert stats.divergence is not None
    assert stats.divergence.tokens == 40 == stats.emitted_tokens + stats.prefill_tokens
    assert stats.mean_total_variation == pytest.approx(stats.divergence.total_variation / 40)
    assert stats.mean_kl == pytest.approx(stats.divergence.kl / 40)
    assert 0.0 <= stats.mean_total_variation <= 1.0 and 0.0 <= stats.mean_kl < math.inf
    assert stats.mean_total_variation_greedy is not None and stats.mean_kl_greedy is not None


@pytest.mark.parametrize("rule", [TypicalAcceptance(), LenientSampling(0.5).greedy_form], ids=["typical", "lenient"])
def test_the_figures_of_a_greedy_answer_follow_from_its_tokens(target: MarkovModel, rule: Rule) -> None:
    """At temperature 0 the distributions are those at temperature 1: 1 - p(x) and -log p(x) of the tokens that came
    out."""
    answer = engine_of(target, rule).generate(PROMPT, OPTIONS["greedy"])
    probs = probs_on(target, answer)
    p_x = [float(dist[token]) for dist, token in zip(probs, answer.token_ids, strict=True)]
    largest = [float(dist.max()) for dist in probs]
    stats = answer.stats
    assert stats.mean_total_variation == pytest.approx(1 - sum(p_x) / 40)
    assert stats.mean_kl == pytest.approx(-sum(map(math.log, p_x)) / 40)
    assert stats.mean_total_variation_greedy == pytest.approx(1 - sum(largest) / 40)
    assert stats.mean_kl_greedy == pytest.approx(-sum(map(math.log, largest)) / 40)
    assert p_x != largest  # the rule was lenient somewhere


def test_plain_decoding_under_lenience_is_exact_and_under_typical_acceptance_greedy(target: MarkovModel) -> None:
    lenient = Engine(target, None, LenientSampling(0.1), entropy=5).generate(PROMPT, OPTIONS["sampled"])
    assert lenient.token_ids == Engine(target, entropy=5).generate(PROMPT, OPTIONS["sampled"]).token_ids
    assert lenient.stats.mean_total_variation == lenient.stats.mean_kl == 0.0
    typical = Engine(target, None, TypicalAcceptance()).generate(PROMPT, OPTIONS["sampled"])
    assert typical.token_ids == Engine(target).generate(PROMPT, OPTIONS["greedy"]).token_ids
    assert typical.stats.mean_total_variation == typical.stats.mean_total_variation_greedy


def test_tokens_behind_a_stop_count_nowhere(target: MarkovModel, rule: Rule) -> None:
    full = engine_of(target, rule).generate(PROMPT, OPTIONS["greedy"])
    for stop in range(VOCAB):
        params = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
        answer = engine_of(target, rule).generate(PROMPT, params)
        kept = full.token_ids.index(stop) if stop in full.token_ids else 40
        assert answer.token_ids == full.token_ids[:kept]
        assert tokens_judged(answer) == kept


def test_what_a_stop_text_takes_back_counts_nowhere(target: MarkovModel) -> None:
    target.tokenizer = Letters(VOCAB)
    engine = Engine(target, None, TypicalAcceptance())
    full = engine.submit(PROMPT, SamplingParams(max_tokens=9))
    while engine.step():
        pass
    text = target.tokenizer.decode(full.tokens[len(PROMPT) :])
    stop = next(text[i : i + 2] for i in range(3, 8) if text.find(text[i : i + 2]) == i)
    kept = text.find(stop)
    cut = engine.generate(PROMPT, SamplingParams(max_tokens=9, stop=(stop,)))
    assert (cut.finish_reason, len(cut.token_ids)) == ("stop", kept)
    assert cut.stats.divergence == Divergence.of(full.divergences[:kept])


def test_lossless_rules_measure_nothing(target: MarkovModel, drafter: Drafter | None) -> None:
    for params in OPTIONS.values():
        stats = fixed(target, drafter, SpeculativeSampling(), entropy=5).generate(PROMPT, params).stats
        assert stats.divergence is None and stats.mean_total_variation is None and stats.mean_kl is None
        assert stats.mean_total_variation_greedy is None and stats.mean_kl_greedy is None


# ------------------------------------------------------------------------------- what is emitted


def test_more_is_accepted_than_by_the_lossless_rule(target: MarkovModel) -> None:
    def length(rule: Rule, params: SamplingParams) -> float:
        answers = engine_of(target, rule, "chain").generate([[i, i] for i in range(8)], params)
        return sum(each.stats.emitted_tokens for each in answers) / sum(each.stats.target_calls for each in answers)

    for params in OPTIONS.values():
        assert length(LenientSampling(0.05), params) > length(SpeculativeSampling(), params)
    # Above temperature 0 a drafter draws tokens, which need not be the typical ones.
    assert length(TypicalAcceptance(), OPTIONS["greedy"]) > length(SpeculativeSampling(), OPTIONS["greedy"])


def test_at_temperature_zero_top_k_does_not_narrow_the_distribution(target: MarkovModel) -> None:
    """With top-k 1 the distribution would be one-hot and nothing but the argmax could stay."""
    narrow = SamplingParams(max_tokens=40, top_k=1, top_p=0.1, min_p=1.0)
    for rule in RULES:
        engine = engine_of(target, rule)
        assert engine.generate(PROMPT, narrow).token_ids == engine.generate(PROMPT, OPTIONS["greedy"]).token_ids


def test_above_temperature_zero_the_request_keeps_its_own_distribution(target: MarkovModel, rule: Rule) -> None:
    """Under top-k 1 only the argmax has mass, so no rule can emit anything else."""
    params = SamplingParams(max_tokens=30, temperature=0.7, top_k=1)
    answer = engine_of(target, rule).generate(PROMPT, params)
    assert answer.token_ids == Engine(target).generate(PROMPT, SamplingParams(max_tokens=30)).token_ids
    assert answer.stats.mean_total_variation == pytest.approx(0.0, abs=1e-12)


def test_a_seed_is_refused_by_name_and_decides_nothing_of_greedy_answers(target: MarkovModel, rule: Rule) -> None:
    lossy, lossless = fixed(target, rule=rule, entropy=5), Engine(target)
    seeded = SamplingParams(max_tokens=40, temperature=0.9, seed=5)
    for ask in (lambda: lossy.generate(PROMPT, seeded), lambda: lossless.submit(PROMPT, seeded, rule=rule)):
        with pytest.raises(OptionError, match=f"rule {rule.spec!r} is lossy") as caught:
            ask()
        assert caught.value.field == "seed"
    assert lossy.generate([PROMPT], seeded)[0].finish_reason == "error"
    greedy = lossy.generate(PROMPT, OPTIONS["greedy"])
    assert lossy.generate(PROMPT, replace(OPTIONS["greedy"], seed=5)).token_ids == greedy.token_ids


def test_a_mixed_batch_answers_as_each_request_alone(target: MarkovModel, drafter: Drafter | None, rule: Rule) -> None:
    params = list(OPTIONS.values())
    engine = fixed(target, drafter, rule, entropy=5)
    together = answers_of(engine, [PROMPT] * 3, params)
    for answer, own in zip(together, params, strict=True):
        (alone,) = answers_of(engine, [PROMPT], own)
        assert answer.token_ids == alone.token_ids
        assert answer.stats.mean_kl == pytest.approx(alone.stats.mean_kl)
    total = sum((answer.stats for answer in together), Counters())
    assert total.divergence is not None and total.divergence.tokens == 120


def test_broken_logits_end_the_answer_where_they_are(target: MarkovModel, rule: Rule) -> None:
    """Token 6 is followed by NaN; what was emitted before it stays, and is measured."""
    probs = target.probs.clone()
    probs[:, 6] = torch.nan
    probs[:, :6, 6] = 0.9
    broken = MarkovModel(probs / probs.sum(dim=-1, keepdim=True))
    engine = fixed(broken, ScriptedDrafter(lambda tokens: [[6, 1, 2]]), rule, entropy=5)
    request = engine.submit([1, 2], SamplingParams(max_tokens=20))
    while engine.step():
        pass
    assert isinstance(request.error, InvalidLogitsError)
    assert request.counters.divergence is not None
    assert request.counters.divergence.tokens == request.emitted > 0
