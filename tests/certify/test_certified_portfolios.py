"""Certificates of portfolios: every member is asked, alone and merged, and what is wrong with one of them is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from certify.planted_faults import TEXTS, StaleDraft, markov
from certify.test_statistics import samples_of, smallest
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Context, Deadline, Finding, Part, Stack, Status
from truedraft.certify.controls import SampledControls
from truedraft.certify.draft_state import DraftState
from truedraft.certify.equality import Equality
from truedraft.certify.invariance import Invariance
from truedraft.certify.statistics import FALSE_ALARM, Statistics, joint_result
from truedraft.drafters import DraftModel, Portfolio, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.engine.policy import Goodput, RoundRobin
from truedraft.verification import SpeculativeSampling

SAMPLED = SamplingParams(max_tokens=24, temperature=1.0)


def portfolio(*, first: Drafter | None = None) -> Portfolio:
    chain = first or DraftModel(markov(0, astray=0.8), 3)
    return Portfolio([chain, DraftModel(markov(0, astray=0.5), branching=(2, 2)), PromptLookup(min_ngram=1)])


def stack(drafter: Drafter | None = None, **parts: object) -> Stack:
    return Stack(markov(0), drafter or portfolio(), SpeculativeSampling(), **parts)  # type: ignore[arg-type]


def test_every_member_drafts_alone_and_with_each_other() -> None:
    engine = stack().engine(2)
    together: Counter[tuple[str, ...]] = Counter()
    sizes: dict[str, set[int]] = {}

    def note(record) -> None:  # type: ignore[no-untyped-def]
        for step in record.requests:
            together[tuple(share.drafter for share in step.shares)] += 1
            for share in step.shares:
                sizes.setdefault(share.drafter, set()).add(share.depth)

    engine.listeners.append(note)
    engine.generate(TEXTS, SamplingParams(max_tokens=50, temperature=1.0, ignore_eos=True))
    names = ["draft", "draft-2", "prompt-lookup"]
    assert all(together[(name,)] for name in names) and together[()]
    assert all(together[one, other] or together[other, one] for one in names for other in names if one < other)
    assert together["draft", "draft-2"] and together["draft-2", "draft"]  # in both orders
    assert sizes["draft"] >= {1, 2, 3} and sizes["draft-2"] >= {1, 2}


@pytest.mark.parametrize("controller", [None, Goodput()], ids=["in turn", "learning"])
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=24), SAMPLED, SamplingParams(max_tokens=24, temperature=1.0, seed=1)]
)
def test_answers_are_the_same_where_they_must_be(params: SamplingParams, controller: Goodput | None) -> None:
    """A learning controller's budgets hang on time, so sampled requests are asked without it."""
    context = Context(stack(controller=controller), TEXTS, params, 3)
    found = [*Equality().run(context), *Invariance().run(context)]
    assert {each.status for each in found} <= {Status.HOLDS, Status.DOES_NOT_APPLY}


def test_engines_of_one_stack_have_controllers_of_their_own() -> None:
    made = stack(controller=Goodput())
    one, other = made.engine(1), made.engine(4)
    assert one.controller is not other.controller
    assert isinstance(stack().engine(1).controller, RoundRobin)


def state_of(drafter: Drafter) -> dict[str, Finding]:
    found = DraftState().run(Context(stack(drafter), TEXTS, SamplingParams(max_tokens=32), 3))
    assert all(each.part is Part.DRAFT_STATE for each in found)
    return {each.name.split("'")[1]: each for each in found}


def test_each_member_is_held_against_a_fresh_one() -> None:
    found = state_of(portfolio())
    assert list(found) == ["draft", "draft-2", "prompt-lookup"]
    assert {each.status for each in found.values()} == {Status.HOLDS}
    assert all(each.facts["compared"] > 5 for each in found.values())
    assert [each.facts["caches_compared"] > 5 for each in found.values()] == [True, True, False]


def test_a_stale_member_is_named() -> None:
    found = state_of(portfolio(first=StaleDraft(markov(0, astray=0.8), branching=(3, 2, 1))))
    assert {name: each.facts["stale"] for name, each in found.items()} == {
        "draft": True,
        "draft-2": False,
        "prompt-lookup": False,
    }


def smallest_of(asked: Stack, *batches: int) -> Iterator[float]:
    """The smallest p-value after so many batches, and so many more."""
    return map(smallest, samples_of(asked, batches, SAMPLED, judge=markov(0)))


def test_sampled_answers_of_merged_trees_follow_the_target() -> None:
    assert all(found > FALSE_ALARM for found in smallest_of(stack(), 40))
    result = joint_result(Context(stack(), TEXTS, SAMPLED, 4), Deadline(0.0), lambda done: None)
    assert result is not None and result.p_value > 1e-4 and result.accepted > 0.1


@pytest.mark.parametrize("fault", ["rule", "member"])
def test_a_fault_is_found_wherever_it_is(fault: str) -> None:
    """In the rule, or in the second of three members alone."""
    healthy = portfolio()
    members = dict(healthy.members)
    members["draft-2"] = faults.hides_unlikely_draws(DraftModel(markov(0, astray=0.5), 2), 0.3)
    broken = {
        "rule": stack().but(rule=faults.accepts_always(SpeculativeSampling())),
        "member": stack(Portfolio(members)),
    }[fault]
    assert any(found < FALSE_ALARM for found in smallest_of(broken, 20, 100, 300))


def test_controls_are_shown_at_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, step_s=0.01)
    context = Context(stack(), TEXTS, SAMPLED, 4, seconds=4.0)
    sampled = Statistics().run(context)
    found = SampledControls().run(Context(stack(), TEXTS, SAMPLED, 4, seconds=4.0, earlier=tuple(sampled)))
    assert Status.FAILS not in {each.status for each in found}
    settings = {each.name: each.facts["setting"] for each in found}
    assert len(settings) == 7 and all("alone" in each or "target itself" in each for each in settings.values())
