"""Greedy and seeded equality: correct stacks hold, every planted fault is a fault, rounding gives near ties only."""

from __future__ import annotations

import math

import pytest
import torch

from certify.planted_faults import TEXTS, findings_of, markov, row_noise, wrong_mask, wrong_positions
from support.coupled_choice import coupled_choice
from support.faulty_parts import keeps_rejected
from support.tiny_models import PROMPTS, noisy, packed
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Context, Finding, Stack, Status
from truedraft.certify.equality import Equality, enough_prompts, lead_needed
from truedraft.core.probs import probs_from_logits
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel
from truedraft.verification import Rule, SpeculativeSampling

GREEDY = SamplingParams(max_tokens=24)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=5)


def chain(seed: int = 0) -> Drafter:
    """Often right about `markov(0)`, or with another seed hardly ever."""
    return DraftModel(markov(seed, astray=1.0))


def tree(seed: int = 0) -> Drafter:
    return DraftModel(markov(seed, astray=1.0), branching=(2, 2, 1))


def stack(target: LanguageModel, drafter: Drafter, coupled_rule: Rule | None = None) -> Stack:
    return Stack(target, drafter, SpeculativeSampling(), coupled_rule)


def findings(stack: Stack, params: SamplingParams, batch: int = 5) -> dict[str, Finding]:
    return findings_of(Equality(), stack, params, batch)


@pytest.mark.parametrize("drafter", [chain, tree, lambda: PromptLookup(min_ngram=1)], ids=["chain", "tree", "lookup"])
def test_correct_stacks_are_equal(drafter: type[Drafter]) -> None:
    found = findings(stack(markov(0), drafter()), SEEDED)
    assert list(found) == [
        "rounding, float32",
        "greedy, batch 1, float32",
        "greedy, batch 5, float32",
        "seeded, batch 1, float32",
        "seeded, batch 5, float32",
    ]
    assert {finding.status for finding in found.values()} == {Status.HOLDS}
    for name, finding in found.items():
        if not name.startswith("rounding"):
            assert finding.facts["identical"] and finding.facts["tokens_compared"] == 5 * 24
            assert finding.facts["dtype"] == "float32" and finding.facts["accepted_tokens"] > 0
            assert "bit for bit equal" in finding.summary


def test_a_llama_with_a_tree_is_equal() -> None:
    own = stack(packed("llama"), DraftModel(noisy("llama", 0.1), branching=(2, 1)))
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=1)
    found = Equality().run(Context(own, [PROMPTS[0], PROMPTS[2]], params, 2))
    assert [finding.status for finding in found] == [Status.MEASURED] + [Status.HOLDS] * 4
    assert all(finding.facts["identical"] for finding in found[1:])


def test_greedy_requests_have_no_seeded_findings_and_batch_1_is_compared_once() -> None:
    assert list(findings(stack(markov(0), chain()), GREEDY, batch=1)) == [
        "rounding, float32",
        "greedy, batch 1, float32",
    ]


@pytest.mark.parametrize(
    ("target", "drafter"),
    [(keeps_rejected(markov(0)), chain()), (keeps_rejected(markov(0)), tree()), (wrong_mask(markov(0)), tree())],
    ids=["slipping cache, chain", "slipping cache, tree", "wrong mask"],
)
def test_a_broken_target_is_a_fault(target: LanguageModel, drafter: Drafter) -> None:
    found = findings(stack(target, drafter), SEEDED)
    assert found["rounding, float32"].status is Status.FAILS
    for kind in ("greedy", "seeded"):
        finding = found[f"{kind}, batch 5, float32"]
        assert finding.status is Status.FAILS and finding.facts["faults"] and not finding.facts["near_ties"]
        assert "fault" in finding.summary


def test_wrong_positions_are_a_fault() -> None:
    own = stack(wrong_positions(packed("llama")), DraftModel(noisy("llama", 0.02), 3))
    params = SamplingParams(max_tokens=24)
    found = Equality().run(Context(own, [PROMPTS[0]], params))
    assert found[0].status is Status.FAILS
    assert found[1].status is Status.FAILS and found[1].facts["faults"]


def test_a_rule_that_accepts_always_is_a_fault_and_says_where() -> None:
    found = findings(stack(markov(0), chain(seed=3), faults.coupled_accepts_always()), SEEDED)
    assert found["rounding, float32"].status is Status.HOLDS
    for kind in ("greedy", "seeded"):
        for batch in (1, 5):
            finding = found[f"{kind}, batch {batch}, float32"]
            assert finding.status is Status.FAILS
            fault = finding.facts["faults"][0]
            # The prefill's token is right, the first drafted one is not.
            assert fault["position"] >= 1 and fault["margin"] > 0 and fault["rounding"] == 0
            assert fault["expected"]["id"] != fault["found"]["id"] and len(fault["best"]) == 2


def test_rounding_between_rows_gives_near_ties_only() -> None:
    """The two best logits of every row are 4e-4 apart, and noise of 1e-3 decides between them."""
    target = row_noise(markov(0, lead=4e-4), 1e-3)
    found = findings(stack(target, chain()), GREEDY)
    assert found["rounding, float32"].status is Status.MEASURED
    for batch in (1, 5):
        finding = found[f"greedy, batch {batch}, float32"]
        assert finding.status is Status.HOLDS and not finding.facts["identical"]
        assert finding.facts["near_ties"] and not finding.facts["faults"] and not finding.facts["untraced"]
        for tie in finding.facts["near_ties"]:
            assert 0 < tie["margin"] <= 2 * tie["rounding"] <= 2 * 2.001e-3
        assert "near tie" in finding.summary and "no fault" in finding.summary


def test_rounding_decides_perturbed_margins_too() -> None:
    """Even distributions at a low temperature: the gaps between the best two of log p + G are about 0.02 in logits."""
    target = row_noise(markov(0, sharpness=0.02), 3e-4)
    params = SamplingParams(max_tokens=24, temperature=0.02, seed=2)
    own = stack(target, DraftModel(markov(0, sharpness=0.02)))
    prompts = [[a, b] for a in range(5) for b in range(2)]
    found = {finding.name: finding for finding in Equality().run(Context(own, prompts, params, 5))}
    finding = found["seeded, batch 5, float32"]
    assert finding.status is Status.HOLDS and finding.facts["near_ties"] and not finding.facts["faults"]
    assert all(0 < tie["margin"] <= 2 * tie["rounding"] for tie in finding.facts["near_ties"])


@pytest.mark.parametrize("lead", [None, 4e-4])
def test_a_fault_among_roundings_is_still_a_fault(lead: float | None) -> None:
    target = row_noise(markov(0, lead=lead), 1e-3)
    found = findings(stack(target, chain(seed=3), faults.coupled_accepts_always()), GREEDY)
    assert found["rounding, float32"].status is Status.MEASURED
    finding = found["greedy, batch 5, float32"]
    assert finding.status is Status.FAILS
    assert all(fault["margin"] > 2 * fault["rounding"] > 0 for fault in finding.facts["faults"])


def timed(seconds: float, params: SamplingParams = GREEDY) -> list[Finding]:
    own = stack(markov(0), DraftModel(markov(0), 3))
    return Equality().run(Context(own, TEXTS, params, 2, seconds))[-2:]


def test_no_time_is_not_enough_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one step more than the four times the time that the first group may take; nothing compared, nothing held."""
    time = VirtualTime(monkeypatch, step_s=1.0)
    for seconds in (0.0, 2.0, 10.0):
        time.seconds = 0.0
        alone, together = timed(seconds)
        assert time.seconds <= 4 * seconds + 1
        assert alone.facts["answers"] <= 1 and together.facts["answers"] == 0
        assert together.status is Status.NOT_ENOUGH
        assert "0 tokens of 0 answers" in together.summary and "give more minutes" in together.summary
    assert alone.facts["answers"] == 1 and alone.status is Status.HOLDS, "24 steps plainly and 7 with the draft"


def test_the_first_group_may_take_longer_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is 70 steps: 48 plainly, 14 alone, 8 together. 24 seconds are too few, four times as many enough."""
    time = VirtualTime(monkeypatch, step_s=1.0)
    alone, together = timed(24.0)
    assert alone.status is together.status is Status.HOLDS
    assert alone.facts["answers"] == together.facts["answers"] == 2
    assert 24.0 < time.seconds <= 96.0
    time.seconds = 0.0
    alone, together = timed(100.0)
    assert together.facts["answers"] == 2 <= alone.facts["answers"] < 4, "the second group was given up half-way"
    assert 85.0 <= time.seconds <= 86.0, "equality's part of 100 s without what rounding is measured in, and one step"


def test_answers_without_tokens_are_no_evidence() -> None:
    """A stop id that ends every answer at once: equal, and worth nothing."""
    found = timed(math.inf, SamplingParams(max_tokens=24, stop_token_ids=tuple(range(8))))
    assert {finding.status for finding in found} == {Status.NOT_ENOUGH}
    assert all(finding.facts["answers"] > 0 and not finding.facts["tokens_compared"] for finding in found)


def test_repeated_prompts_differ() -> None:
    found = enough_prompts([[1, 2, 3], [4]], 5)
    assert found == [[1, 2, 3], [4], [2, 3], [4], [3]]


def test_the_lead_that_a_token_needs() -> None:
    row = torch.tensor([2.0, 1.5, -1.0, -math.inf])

    def greedy(logits: torch.Tensor) -> int:
        return int(logits.argmax())

    assert lead_needed(row, greedy, {0}) == 0.0
    assert lead_needed(row, greedy, {1}) == pytest.approx(0.5, abs=1e-12)
    assert lead_needed(row, greedy, {1, 2}) == pytest.approx(0.5, abs=1e-12)
    assert lead_needed(row, greedy, {3}) == math.inf and lead_needed(row, greedy, set()) == math.inf


def test_the_lead_of_a_perturbed_choice_is_its_gap_times_the_temperature() -> None:
    row, gumbel = torch.tensor([2.0, 1.5, -1.0]), torch.tensor([0.1, 0.3, 2.0], dtype=torch.float64)
    params = SamplingParams(temperature=0.5, seed=1)

    def choose(logits: torch.Tensor) -> int:
        return int(coupled_choice(probs_from_logits(logits[None], params), gumbel))

    # Scores up to a constant: 4.1, 3.3 and 0.
    assert choose(row) == 0
    assert lead_needed(row, choose, {1}) == pytest.approx(0.4, abs=1e-9)
    assert lead_needed(row, choose, {2}) == pytest.approx(2.05, abs=1e-9)
