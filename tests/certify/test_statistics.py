"""The tests of sampled answers, token by token, jointly over a reduced vocabulary, and of lossy rules.

They are silent over 100 seeds of correct stacks, and loud at every planted fault.

False alarms: a correct stack fails with probability 1e-3 at most, so one of 100 does with 0.1 at most, and the seeds
are fixed. The smallest detectable deviation is checked in test_e_process.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from certify.planted_faults import TEXTS, chain, healthy, markov, third_at, wrong_mask, wrong_positions
from support.faulty_parts import keeps_rejected
from support.tiny_models import PROMPTS, noisy, packed
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Context, Deadline, Stack, Status, numbered
from truedraft.certify.controls import drafting_one
from truedraft.certify.e_process import Events, TokenTests
from truedraft.certify.sampling import Decision, Scored, plain_probs, scored_answers
from truedraft.certify.statistics import JointResult, LossyDivergence, Statistics, joint_probs, joint_result
from truedraft.core.intervals import ratio_of_totals
from truedraft.core.probs import probs_from_logits
from truedraft.core.theory import holm
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.models.base import LanguageModel, Segment
from truedraft.testing import reduced
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.specs import rule_from_spec

FALSE_ALARM = 1e-3
WARM, COOL = SamplingParams(temperature=1.0), SamplingParams(temperature=0.8)


def samples_of(
    stack: Stack,
    batches: Sequence[int],
    params: SamplingParams = WARM,
    *,
    judge: LanguageModel | None = None,
    batch: int = 4,
    seed: int = 0,
    texts: Sequence[Sequence[int]] = TEXTS,
    length: int = 24,
) -> Iterator[TokenTests]:
    """Answers, tested after so many batches and so many more; each time the same tests."""
    tests = TokenTests(stack.target.vocab_size, batch)
    runs = scored_answers(stack.but(entropy=seed), texts, params, batch, judge=judge, length=length)
    for number, answers in zip(range(1, max(batches) + 1), runs, strict=False):
        for scored in answers:
            tests.add(scored)
        if number in batches:
            yield tests


def sample_of(stack: Stack, batches: int, *own: SamplingParams, **options: Any) -> TokenTests:
    """So many batches of answers, tested."""
    (found,) = samples_of(stack, [batches], *own, **options)
    return found


def smallest(sample: TokenTests) -> float:
    return min(holm([test.p_value for test in sample.results()]))


@pytest.mark.parametrize("seed", [0, 20, *(pytest.param(first, marks=pytest.mark.slow) for first in (40, 60, 80))])
def test_a_hundred_seeds_of_correct_stacks_pass(seed: int) -> None:
    """Drafters, rules and options take turns; each of the 100 samples has tokens of its own."""
    target = markov(0)
    drafters = [chain(), DraftModel(markov(0, astray=1.0), branching=(2, 2)), PromptLookup()]
    options = [WARM, SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.2, seed=0)]
    for number in range(seed, seed + 20):
        drafter, params = drafters[number % 3], options[number // 3 % 3]
        rule: Rule = BlockVerification() if number % 2 and number % 3 != 1 else SpeculativeSampling()
        params = numbered(params, 1000 * number)
        sample = sample_of(Stack(target, drafter, rule), 1, params, seed=number)
        assert sample.tokens == 4 * 24
        assert sample.impossible == 0
        assert smallest(sample) > FALSE_ALARM, number


def broken_stacks() -> dict[str, Stack]:
    """With their healthy targets, which judge them."""
    tree = DraftModel(markov(0, astray=1.0), branching=(2, 2))
    hides = drafting_one(healthy(), faults.hides_unlikely_draws(chain(), 0.3))
    llama = Stack(packed("llama"), DraftModel(noisy("llama", 0.5), num_speculative_tokens=3), SpeculativeSampling())
    return {
        "cache": healthy().but(target=keeps_rejected(markov(0))),
        "mask": healthy().but(target=wrong_mask(markov(0)), drafter=tree),
        "positions": llama.but(target=wrong_positions(packed("llama"))),
        "one request's temperature": healthy().but(target=third_at(0.5)),
        "accepts always": healthy().but(rule=faults.accepts_always(SpeculativeSampling())),
        "residual": healthy().but(rule=faults.residual_is_target(SpeculativeSampling())),
        "temperature of q": healthy().but(rule=faults.judges_another_temperature(SpeculativeSampling(), 2.0)),
        "one key": healthy().but(rule=faults.one_key_twice(SpeculativeSampling())),
        "hides draws": hides,
    }


@pytest.mark.parametrize("name", broken_stacks())
def test_a_planted_fault_is_found(name: str) -> None:
    stack = broken_stacks()[name]
    texts, judge = (PROMPTS, packed("llama")) if stack.target.vocab_size > 8 else (TEXTS, markov(0))
    found = samples_of(stack, (8, 24, 80), texts=texts, judge=judge)
    assert any(smallest(sample) < FALSE_ALARM for sample in found), "not in 80 * 4 * 24 tokens"


def test_one_requests_wrong_options_are_found_where_it_stands() -> None:
    """The test of the third place has by far the smallest p-value of those by place."""
    sample = sample_of(broken_stacks()["one request's temperature"], 24, judge=markov(0))
    by_place = {test.name: test.p_value for test in sample.results() if ", place " in test.name}
    assert min(by_place, key=by_place.__getitem__).endswith("place 2")
    others = [p for name, p in by_place.items() if not name.endswith("place 2")]
    assert min(others) > FALSE_ALARM / len(sample.results())


def test_findings_hold_for_a_correct_stack_and_fail_for_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 250 steps each, which are a second here."""
    VirtualTime(monkeypatch, step_s=0.004)
    sound = healthy().but(entropy=7)
    told: list[float] = []
    tokens, joint = Statistics().run(Context(sound, TEXTS, WARM, 4, 1.0, told.append))
    assert tokens.status is joint.status is Status.HOLDS
    assert 0.0 < tokens.facts["smallest_detectable_tv"] < 0.5
    assert joint.facts["answers"] >= 32
    assert told == sorted(told)
    assert told[-1] == 1.0
    broken = sound.but(rule=faults.accepts_always(SpeculativeSampling()))
    tokens, joint = Statistics().run(Context(broken, TEXTS, WARM, 4, 1.0, told.append))
    assert tokens.status is Status.FAILS


def test_plain_probs_are_those_of_one_forward_after_another() -> None:
    target = packed("llama")
    prompt, answer = list(PROMPTS[0]), [3, 9, 11, 60, 2]
    (probs,) = plain_probs(target, [(prompt, answer)], WARM)
    for place in range(len(answer)):
        text = [*prompt, *answer[:place]]
        cache = target.new_cache()
        output = target.forward([Segment(cache, torch.tensor(text), chain_shape(len(text)), (len(text) - 1,))])
        expected = torch.softmax(output.logits[0].float(), dim=-1)
        assert torch.allclose(probs[place], expected, atol=1e-5)
    long = [list(range(1, 97)) * 4, [5] * 10]
    many = plain_probs(markov(0), [([text % 8 for text in long[0]], [1, 2]), ([3], [1]), ([4], [])], WARM)
    assert [len(probs) for probs in many] == [2, 1, 0]


def test_sets_by_hand() -> None:
    """Three tokens with known distributions, a drawn draft, a fixed candidate, and none."""
    probs = torch.tensor([[0.6, 0.3, 0.09, 0.01], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    decisions = [
        Decision(0, torch.tensor([0.1, 0.1, 0.1, 0.7]), ()),
        Decision(1, None, (2, 0)),
        Decision(0, None, ()),
    ]
    events = Events(4, batch=1)
    chances, hits = events.measure(Scored(probs, [3, 2, 2], [1, 0], decisions, 0, coupled=False))
    column = {name: number for number, name in enumerate(events.names)}

    def seen(name: str) -> list[tuple[float, bool]]:
        at = column[name]
        return [(round(c, 4), h) for c, h in zip(chances[:, at].tolist(), hits[:, at].tolist(), strict=True)]

    assert seen("the likeliest token") == [(0.6, False), (0.4, False), (0.25, False)]
    assert seen("unlikely tokens") == [(0.01, True), (0.0, False), (0.0, False)]
    # Half of the mass is reached at token 0, then at 2, then at 1: later ids are those behind it.
    assert seen("later ids") == [(0.4, True), (0.4, False), (0.5, True)]
    assert seen("the last token") == [(0.6, False), (0.4, False), (0.25, True)]
    assert seen("recent tokens") == [(0.9, False), (0.7, False), (1.0, True)]
    assert seen("what the draft overrates") == [(0.1, True), (0.4, True), (-1.0, False)]
    assert seen("the draft's first guess") == [(0.01, True), (0.3, True), (-1.0, False)]
    # Underrated are 0 and 1 (left: 0.5, 0.2), half of which is reached at 0; then 1 and 3 (0.2, 0.4), half at 3.
    assert seen("later ids of what the draft underrates") == [(0.3, False), (0.0, False), (-1.0, False)]
    assert seen("the likeliest token, behind accepted tokens") == [(-1.0, False), (0.4, False), (-1.0, False)]
    for number in range(3):
        halves = seen(f"random half {number}")
        members = events._members[:, number] > 0.5
        assert halves[0] == (round(float(probs[0, members].sum()), 4), bool(members[3]))


def test_candidates_that_the_noise_chose_are_no_set() -> None:
    probs = torch.full((1, 4), 0.25)
    events = Events(4, batch=1)
    chances, _ = events.measure(Scored(probs, [2], [1], [Decision(0, None, (2,))], 0, coupled=True))
    assert float(chances[0, events.names.index("what the draft overrates")]) == -1.0


def test_the_joint_distribution_is_the_product_of_the_targets_distributions() -> None:
    target, prompt, kept = markov(0), [1, 2, 3], (0, 3, 6)
    dist = joint_probs(reduced(target, kept), prompt, kept, COOL)
    assert float(dist.sum()) == pytest.approx(1.0)

    def after(text: list[int]) -> torch.Tensor:
        logits = target.probs_after(text).double().log()
        masked = torch.full_like(logits, -math.inf)
        masked[list(kept)] = logits[list(kept)]
        return probs_from_logits(masked[None], COOL)[0][list(kept)]

    expected = torch.zeros(3, 3, 3, dtype=torch.float64)
    for a, b, c, d in itertools.product(range(3), repeat=4):
        text = [*prompt, kept[a]]
        start = float(after(prompt)[a] * after(text)[b])
        expected[b, c, d] += start * float(after([*text, kept[b]])[c] * after([*text, kept[b], kept[c]])[d])
    assert torch.allclose(dist, expected, atol=1e-6)


def result_of(stack: Stack) -> JointResult:
    """After 400 steps, which are 2 seconds here."""
    with pytest.MonkeyPatch.context() as patch:
        VirtualTime(patch, step_s=0.005)
        context = Context(stack.but(entropy=3), TEXTS[:3], COOL)
        found = joint_result(context, Deadline(2.0), lambda done: None)
    assert found is not None
    return found


def test_answers_follow_the_distribution_and_broken_ones_do_not() -> None:
    """False alarm: 1e-6."""
    good = result_of(healthy())
    assert good.p_value > 1e-6
    assert good.accepted > 0.3
    assert len(good.kept) == 3
    bad = result_of(healthy().but(rule=faults.accepts_always(SpeculativeSampling())))
    assert bad.p_value < 1e-6


def test_what_it_would_have_found_it_finds() -> None:
    """Distributions moved by that total variation, half of the cells up: found in 97 % of 300 (99 % are promised)."""
    generator = np.random.default_rng(4)
    probs = torch.tensor([*generator.dirichlet(np.full(27, 3.0)), 0.0])
    counts, level = torch.zeros(28, dtype=torch.float64), 1e-4
    counts[0] = 4000
    size, found = JointResult(counts, probs, 1.0, (0, 1, 2)).smallest_detectable(level), 0
    for _ in range(300):
        signs = torch.tensor([*generator.permutation([-1.0, 1.0] * 13 + [0.0]).tolist(), 0.0])
        moved = probs * (1.0 + 2 * size * signs)
        drawn = torch.tensor(generator.multinomial(4000, (moved / moved.sum()).numpy())).double()
        found += JointResult(drawn, probs, 1.0, (0, 1, 2)).p_value < level
    assert 0.02 < size < 0.2
    assert found >= 291


def test_no_room_no_joint_distribution() -> None:
    stack = Stack(markov(0), DraftModel(markov(0)), SpeculativeSampling())
    cold = SamplingParams(temperature=1.0, top_k=1)
    assert joint_result(Context(stack, TEXTS[:3], cold), Deadline(1.0), lambda done: None) is None


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    """95 % of intervals over 12 answers hold 0.5; over 800 the share is within 4 standard deviations, 3 %."""
    chance, held = random.Random(2), 0
    for _ in range(800):
        tokens = [chance.randint(10, 30) for _ in range(12)]
        sums = [sum(chance.random() for _ in range(many)) for many in tokens]
        interval = ratio_of_totals(sums, tokens)
        held += interval.low <= 0.5 <= interval.high
    assert held / 800 > 0.92


@pytest.mark.parametrize("spec", ["speculative,lenience=0.3", "typical"])
def test_lossy_rules_are_measured(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, step_s=0.01)
    stack = Stack(markov(0), DraftModel(markov(0, astray=1.5)), rule_from_spec(spec))
    if spec == "typical":
        stack = stack.but(drafter=PromptLookup())
    inside, outside = LossyDivergence().run(Context(stack, TEXTS, WARM, 4, 2.0))
    assert inside.status is outside.status is Status.MEASURED
    low, high = inside.facts["total_variation_ci95"]
    assert 0.0 <= low < inside.facts["total_variation"] < high
    assert outside.facts["least_total_variation"] <= high
    if spec != "typical":
        assert outside.facts["least_total_variation"] > 0.0


def test_at_temperature_zero_there_is_no_distribution_to_test_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, step_s=0.01)
    stack = Stack(markov(0), PromptLookup(), rule_from_spec("typical"))
    (inside,) = LossyDivergence().run(Context(stack, TEXTS, SamplingParams(), 2, 0.5))
    assert inside.status is Status.MEASURED
