"""A request's answer does not depend on how it is asked; where it does, that is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from certify.planted_faults import borrowed, chain, findings_of, healthy, markov, row_noise
from support.faulty_parts import keeps_rejected
from support.pairwise import by_turns
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Context, Finding, Stack, Status
from truedraft.certify.invariance import AlternatingBudget, Invariance
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.stats import Counters
from truedraft.drafters import DraftModel, PromptLookup, SuffixDrafter
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.engine import verifier
from truedraft.engine.policy import RequestView
from truedraft.verification.specs import rule_from_spec

TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2, 1, 7]]
KINDS = {
    "greedy": SamplingParams(max_tokens=20),
    "sampled": SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95),
    "seeded": SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3),
}
WAYS = {"streamed", "cancelled and asked again", "in a batch of 4"}
BUDGETS = {"without drafting", "one drafted token at most on a path", "drafting now and then"}


def findings(stack: Stack, kind: str, batch: int = 4) -> dict[str, Finding]:
    return findings_of(Invariance(), stack, KINDS[kind], batch, TEXTS)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": chain,
    "tree": lambda: DraftModel(markov(0, astray=1.0), branching=(2, 2)),
    "lookup": lambda: PromptLookup(min_ngram=1),
    "one that learns from answers": SuffixDrafter,
}


@pytest.mark.parametrize(("drafter", "kind"), by_turns(DRAFTERS, KINDS))
def test_correct_stacks_are_invariant(drafter: str, kind: str) -> None:
    found = findings(healthy().but(drafter=DRAFTERS[drafter]()), kind)
    if kind == "sampled":
        assert found.pop("with other budgets").status is Status.DOES_NOT_APPLY
        assert set(found) == WAYS
    else:
        assert set(found) == WAYS | BUDGETS
    for finding in found.values():
        assert finding.status is Status.HOLDS and finding.facts["identical"]
        assert finding.facts["tokens_compared"] == 60 and finding.facts["answers"] == 3


@pytest.fixture
def borrowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "batch_probs", borrowed)


def test_alone_a_correct_stack_holds_beside_neighbours() -> None:
    found = findings(healthy(), "greedy", batch=1)
    assert set(found) == {"streamed", "cancelled and asked again", "in a batch of 3"} | BUDGETS
    assert {finding.status for finding in found.values()} == {Status.HOLDS}


def test_no_time_is_not_enough_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way is under way, it is left within a step of four times the time; what came before counts."""
    time = VirtualTime(monkeypatch, step_s=1.0)
    ways = []
    for seconds in (0.0, 3.0, 6.0, 12.0, 18.0, 100.0):
        time.seconds = 0.0
        found = Invariance().run(Context(healthy(), TEXTS, KINDS["greedy"], 4, seconds))
        assert time.seconds <= max(4 * seconds, 100.0) + 1
        assert {finding.status for finding in found} <= {Status.HOLDS, Status.NOT_ENOUGH}
        ways.append(sum(finding.status is Status.HOLDS for finding in found))
        for finding in found:
            compared = finding.facts["tokens_compared"]
            assert (finding.status is Status.HOLDS) == (compared > 0)
            assert finding.status is Status.HOLDS or "give more minutes" in finding.summary
    assert ways == sorted(ways) and ways[0] == 0 and ways[-1] == len(found) and len(set(ways)) > 3


def test_requests_end_with_the_way_that_ran_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache is left over in the target's pool, wherever the time ran out."""
    time = VirtualTime(monkeypatch, step_s=1.0)
    for seconds in range(2, 20):
        time.seconds, target = 0.0, markov(0)
        taken: list[object] = []
        monkeypatch.setattr(target, "new_cache", lambda: taken.append(cache := target.pool.acquire()) or cache)  # noqa: B023
        monkeypatch.setattr(target, "release_cache", lambda cache: taken.remove(cache) or target.pool.release(cache))  # noqa: B023
        Invariance().run(Context(healthy().but(target=target), TEXTS, KINDS["greedy"], 4, seconds))
        assert not taken, seconds


@pytest.mark.parametrize("kind", ["sampled", "seeded"])
def test_a_request_judged_with_anothers_options_is_a_fault(kind: str, borrowing: None) -> None:
    found = findings(healthy(), kind)
    assert found["streamed"].status is Status.HOLDS, "alone there is nobody to borrow from"
    assert found["in a batch of 4"].status is Status.FAILS
    assert found["cancelled and asked again"].status is Status.FAILS


class CrossedProposals(DraftModel):
    """Gives requests of a batch the sampled proposals of their neighbours: they were drawn from other distributions."""

    def propose(self, batch: Sequence[DraftRequest], *rest: Sequence[object]) -> list:  # type: ignore[override, type-arg]
        made = super().propose(batch, *rest)  # type: ignore[arg-type]
        return [*made[1:], made[0]] if len({len(each.tree) for each in made}) == 1 else made

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request in batch:
            self.caches[request.id].rollback(0)


@pytest.mark.plants_failures
def test_proposals_of_a_neighbour_change_sampled_tokens_but_not_seeded_ones() -> None:
    """A neighbour's proposal is judged exactly, so seeded answers stay; sampled ones depend on who sits beside."""
    crossed = CrossedProposals(markov(0, astray=1.0), 3)
    assert findings(healthy().but(drafter=crossed), "sampled")["in a batch of 4"].status is Status.FAILS
    seeded = findings(healthy().but(drafter=crossed), "seeded")["in a batch of 4"]
    assert seeded.facts["identical"]
    # Sampled neighbours were given coupled draws, which the engine refused and asked for again; that is a failure.
    assert seeded.facts["recoveries"] > 0 and seeded.status is Status.FAILS


def test_a_rule_that_accepts_always_depends_on_budgets() -> None:
    found = findings(healthy().but(coupled_rule=faults.coupled_accepts_always()), "seeded")
    for name in BUDGETS:
        assert found[name].status is Status.FAILS and found[name].facts["faults"]


def test_a_slipping_cache_depends_on_budgets() -> None:
    found = findings(healthy().but(target=keeps_rejected(markov(0))), "greedy")
    assert found["without drafting"].status is Status.FAILS


def test_rounding_between_rows_gives_near_ties_only() -> None:
    target = row_noise(markov(0, lead=4e-4), 1e-3)
    found = findings(healthy().but(target=target), "greedy")
    assert {finding.status for finding in found.values()} == {Status.HOLDS}
    assert found["in a batch of 4"].facts["near_ties"] and not found["in a batch of 4"].facts["faults"]


def test_divergences_of_sampled_requests_are_counted_against_what_rounding_does(request: pytest.FixtureRequest) -> None:
    """Noise of 1e-3 explains a few; options of another request make more answers differ than it explains."""
    texts = [[a, b] for a in range(8) for b in range(2)]
    params = SamplingParams(max_tokens=12, temperature=1.0)
    target = row_noise(markov(0), 2e-6)

    def together() -> Finding:
        return findings_of(Invariance(), healthy().but(target=target), params, 4, texts)["in a batch of 4"]

    held = together()
    assert held.status in (Status.HOLDS, Status.MEASURED)
    request.getfixturevalue("borrowing")
    broken = together()
    assert broken.status is Status.FAILS
    assert broken.facts["untraced"] > broken.facts["explained_by_rounding"] > 0


def test_a_lossy_rule_may_depend_on_budgets_but_on_nothing_else() -> None:
    found = findings(healthy().but(drafter=PromptLookup(min_ngram=1), rule=rule_from_spec("typical")), "sampled")
    assert found.pop("with other budgets").status is Status.DOES_NOT_APPLY
    assert {finding.status for finding in found.values()} == {Status.HOLDS}


def test_the_alternating_budget_is_a_function_of_the_request() -> None:
    controller, limits = AlternatingBudget(), Budget(4, 2, 9)
    views = [RequestView(n, SamplingParams(), 5, 9, {"any": limits}, Counters(target_calls=n)) for n in range(4)]
    assert [decision.budget for decision in controller.decide(views)] == [NO_DRAFT, Budget(1, 2, 9), limits, NO_DRAFT]
