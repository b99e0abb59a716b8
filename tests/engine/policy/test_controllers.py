"""Controllers by their words, and those that know no costs."""

from __future__ import annotations

import random

import pytest
import torch

from support.simulated_drafting import SimulatedRequest, simulated
from truedraft import SamplingParams
from truedraft.core.stats import Counters, DraftShare, RequestStep, StepRecord
from truedraft.engine.policy import (
    AssistedHeuristic,
    Budget,
    ConfidenceStop,
    Controller,
    FixedBudget,
    Goodput,
    RequestView,
    RoundRobin,
    Schedule,
)
from truedraft.engine.policy.specs import KINDS, controller_from_spec, controller_help
from truedraft.errors import OptionError, UnknownOptionError

CHAIN, TREE = Budget(40, 1, 40), Budget(6, 4, 24, 0.1)


def view(number: int = 0, limits: Budget = CHAIN) -> RequestView:
    return RequestView(number, SamplingParams(), 10, 100, {"draft": limits, "other": Budget(1)}, Counters(), {})


def record(*steps: tuple[int, int, int]) -> StepRecord:
    """Of requests by number, with so many tokens drafted and accepted."""
    made = []
    for number, depth, accepted in steps:
        shares = (DraftShare("draft", depth, depth, tuple(range(accepted))),) if depth else ()
        made.append(
            RequestStep(number, 10, 1 + depth, False, depth, depth, depth, accepted, accepted + 1, shares=shares)
        )
    return StepRecord(tuple(made), 0.0, 0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------ transformers' heuristic


def theirs(start: int, matches: list[int | None]) -> list[int]:
    """Lengths by transformers' own code: those drafted in turn, where so many tokens matched; None is all of them."""
    generator = pytest.importorskip("transformers.generation.candidate_generator").AssistedCandidateGenerator
    one = generator.__new__(generator)
    one.num_assistant_tokens = start
    one.assistant_generation_config = type(
        "Options", (), {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.0}
    )()
    lengths = []
    for matched in matches:
        length = one.num_assistant_tokens
        lengths.append(length)
        own = length if matched is None else min(matched, length)
        one.update_candidate_strategy(None, torch.zeros(1, length + 1, 2), own)
    return lengths


@pytest.mark.parametrize("start", [1, 5])
def test_lengths_are_those_of_transformers(start: int) -> None:
    chance = random.Random(start)
    matches = [chance.choice([None, None, 0, 1, 2, 3, 4]) for _ in range(60)]
    controller = AssistedHeuristic(start)
    lengths = []
    for matched in matches:
        (decision,) = controller.decide([view(limits=Budget(500, 1, 500))])
        length = decision.budget.depth
        assert decision.budget.nodes == length
        lengths.append(length)
        controller.observe(record((0, length, length if matched is None else min(matched, length))))
    assert lengths == theirs(start, matches)
    assert min(lengths) == 1 or start == 5


def test_each_request_follows_its_own_verdicts_within_the_limits() -> None:
    controller = AssistedHeuristic()
    for _ in range(30):
        depths = [each.budget.depth for each in controller.decide([view(0), view(1), view(2, TREE)])]
        controller.observe(record((0, depths[0], depths[0]), (1, depths[1], 0), (2, depths[2], 0)))
    zero, one, two = (each.budget for each in controller.decide([view(0), view(1), view(2, TREE)]))
    assert (zero.depth, zero.nodes) == (40, 40)
    assert (one.depth, one.nodes) == (1, 1)
    assert two == Budget(1, 4, 24, 0.1), "of a tree only the depth is cut"


def test_steps_in_which_nothing_was_drafted_say_nothing_and_who_left_is_forgotten() -> None:
    controller = AssistedHeuristic()
    controller.observe(record((0, 0, 0)))
    assert controller.decide([view()])[0].budget.depth == 5
    controller.observe(record((0, 5, 5)))
    assert controller.decide([view()])[0].budget.depth == 7
    controller.observe(record((1, 5, 5)))
    assert controller.decide([view()])[0].budget.depth == 5
    controller.observe(record((0, 2, 2)))
    assert controller.decide([view()])[0].budget.depth == 7, "cut at an answer's end and accepted is a whole proposal"


# ------------------------------------------------------------------------------------------ the others


def test_a_confidence_stop_takes_the_limits_and_a_threshold() -> None:
    (decision,) = ConfidenceStop(0.25).decide([view(limits=TREE)])
    assert (decision.drafter, decision.budget) == ("draft", Budget(6, 4, 24, 0.25))
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(OptionError, match=r"probability in \[0, 1\]"):
            ConfidenceStop(wrong)


def test_the_schedule_of_the_docstring() -> None:
    schedule = Schedule({16: 0, 1: 4, 4: 2})

    def lengths(requests: int) -> set[int]:
        return {each.budget.depth for each in schedule.decide([view(number) for number in range(requests)])}

    assert [lengths(count) for count in (1, 3, 4, 15, 16, 40)] == [{4}, {4}, {2}, {2}, {0}, {0}]
    schedule = Schedule({2: 3})
    assert schedule.decide([view(limits=TREE)])[0].budget == TREE, "below its least number"
    assert schedule.decide([view(0, TREE), view(1, TREE)])[1].budget == Budget(3, 4, 3, 0.1)


@pytest.mark.parametrize("lengths", [{}, {0: 3}, {1: -1}])
def test_impossible_schedules_are_refused(lengths: dict[int, int]) -> None:
    with pytest.raises(OptionError, match=r"schedule|whole number of"):
        Schedule(lengths)


def test_a_fixed_budget_is_given_to_all() -> None:
    assert [each.budget for each in FixedBudget().decide([view(limits=TREE), view()])] == [TREE, CHAIN]
    assert [each.budget for each in FixedBudget(Budget(2)).decide([view(), view(1)])] == [Budget(2)] * 2


@pytest.mark.parametrize("controller", [AssistedHeuristic(), ConfidenceStop(), Schedule({1: 3, 2: 0}), FixedBudget()])
def test_they_run(controller: Controller) -> None:
    simulation = simulated(0.7, controller=controller)
    simulation.run(1.0)
    assert simulation.of_plain > 1.0
    simulation.requests.append(SimulatedRequest(1))
    simulation.run(0.1)
    assert simulation.requests[1].emitted > 0


KINDS_BY_WORD = {"goodput": Goodput, "fixed": FixedBudget, "heuristic": AssistedHeuristic, "confidence": ConfidenceStop,
                 "in-turn": RoundRobin, "schedule": Schedule}  # fmt: skip


def test_every_kind_is_made_from_its_word_alone_or_with_its_own_options() -> None:
    assert set(KINDS) == set(KINDS_BY_WORD)
    for word, kind in KINDS.items():
        options = "".join(f",{name}={value}" for name, value in kind.options.items())
        assert type(controller_from_spec(word + options)) is KINDS_BY_WORD[word]
        assert word == "schedule" or type(controller_from_spec(word)) is KINDS_BY_WORD[word]
        assert word in controller_help() and kind.meaning in controller_help()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("godput", "goodput"),
        ("", "controller"),
        ("goodput,probin=0.1", "probing"),
        ("goodput,explore=thompson", "it is gone, take only probing"),
        ("goodput,probing=2", "0.5"),
        ("goodput,probing=much", "number"),
        ("goodput,probing=nan", "nan"),
        ("fixed,length=3", "length"),
        ("fixed:4", "4"),
        ("fixed(a;b)", "fixed"),
        ("heuristic,start=0", "1 or more"),
        ("heuristic,start=x", "'x'"),
        ("confidence,threshold=2", "2"),
        ("schedule", "at least one"),
        ("schedule,1=x", "'x'"),
        ("schedule,a=1", "'a'"),
        ("schedule,0=1", "0"),
        ("schedule:folder,1=2", "folder"),
        ("schedule(a;b),1=2", "schedule"),
        ("goodput,probing=0.1,probing=0.2", "twice"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(words: str, says: str) -> None:
    with pytest.raises((OptionError, UnknownOptionError)) as caught:
        controller_from_spec(words)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message and len(message) < 250
