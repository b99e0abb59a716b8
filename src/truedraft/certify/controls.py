"""Negative controls: the certificate's own tests, shown faults of known size, must find them.

A test that nothing fails proves nothing. Each control plants one fault around the user's own stack, works out how far
it puts the law of each token off, and lets the tests that certify run on what comes out. They must find it within as
many tokens as they were given to certify, and it must be at least three times as large as the smallest deviation that
they would have found there, so that finding it was no luck; otherwise no certificate is issued. Only tokens whose law a
fault puts off noticeably are counted: how far it does is known before the token is. Where the user's own drafter leaves
a fault little room (it agrees with the target, or its guesses are not drawn), a stand-in drafts: the target itself,
sharpened or as it is, perhaps at a higher temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.betting import Bets, holm
from truedraft.certify.clock import PATIENCE, Deadline
from truedraft.certify.control_settings import (
    BATCH,
    LENGTH,
    ROOM,
    Control,
    Setting,
    beginnings,
    best_setting,
    drafted,
    settings_of,
)
from truedraft.certify.directions import Directions, Scored
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.sampling_runs import scored_answers
from truedraft.certify.stack import Stack
from truedraft.core.laws import total_variation
from truedraft.core.sampling import SamplingParams

TIMES_DETECTABLE = 3.0
"""A control's fault is at least so many times the smallest deviation that its tests would find."""
_RESERVE = 0.08
"""Of the time for all controls, what one that comes later is sure of."""

SAMPLED = (
    Control(
        "every draft is accepted",
        lambda stack: stack.but(rule=faults.AcceptsAlways(stack.rule)),
        faults.emitted_always,
    ),
    Control(
        "the residual is replaced by p",
        lambda stack: stack.but(rule=faults.ResidualIsTarget(stack.rule)),
        faults.emitted_by_target_residual,
    ),
    Control(
        "q is judged at another temperature",
        lambda stack: stack.but(rule=faults.JudgesAnotherTemperature(stack.rule)),
        faults.emitted_at_another_temperature,
        needs_law=True,
    ),
    Control(
        "one noise key is used twice",
        lambda stack: stack.but(rule=faults.OneKeyTwice(stack.rule)),
        faults.emitted_by_one_key,
    ),
    Control(
        "a choice is made after seeing the draw",
        lambda stack: stack.but(drafter=faults.HidesUnlikelyDraws(stack.drafter)),
        faults.emitted_by_hiding,
        needs_law=True,
    ),
    Control(
        "the target's cache is off by one",
        lambda stack: stack.but(target=faults.LosesLastAccepted(stack.target)),
        None,
    ),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """How the tests did on one fault.

    Attributes:
        tokens: that were tested.
        total_variation: mean over these tokens of how far their laws were off, computed.
        detectable: the smallest deviation that the tests would have found when they certified.
        p_value: the smallest, after Holm.
        test: the one that it is of.
        setting: what was not the user's own, in words.
        out_of_time: whether there were tokens left to test.
    """

    tokens: int
    total_variation: float
    detectable: float
    p_value: float
    test: str
    setting: str
    out_of_time: bool

    @property
    def strong(self) -> bool:
        """Whether the fault is as large as a control's must be."""
        return self.total_variation >= TIMES_DETECTABLE * self.detectable


def control_findings(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seconds: float,
    tell: Callable[[float], None],
    *,
    tokens: int,
    detectable: float,
    allowance: float = 0.0,
    false_alarm: float = 1e-3,
) -> list[Finding]:
    """Show every fault to the tests of sampled answers.

    Args:
        stack: the one that is certified.
        prompts: token ids.
        params: the user's options, of a temperature above 0, not coupled.
        seconds: about what all controls together should take, if they need it.
        tell: is told the fraction done.
        tokens: how many the tests were given to certify; here they get no more.
        detectable: total variation that they would have found then.
        allowance: as of the tests that certify.
        false_alarm: likewise.
    """
    prompts = beginnings(prompts)
    settings = settings_of(stack, prompts, params)
    findings = []
    whole = Deadline(PATIENCE * seconds)  # where faults are not found sooner
    for number, control in enumerate(SAMPLED):
        setting = best_setting(control, settings, stack, params)
        # Most faults are found at once and leave their time to the others.
        left = PATIENCE * seconds * (1.0 - whole.fraction - _RESERVE * (len(SAMPLED) - 1 - number))
        limits = Limits(Deadline(left), tokens, detectable, allowance, false_alarm)
        shown = _show(control, setting, stack, prompts, limits)
        findings.append(finding_of(control.name, shown, false_alarm))
        tell((number + 1) / len(SAMPLED))
    return findings


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tests may use, and what they must reach; see `control_findings`."""

    deadline: Deadline
    tokens: int
    detectable: float
    allowance: float
    false_alarm: float


def _show(control: Control, setting: Setting, stack: Stack, prompts: Sequence[Sequence[int]], limits: Limits) -> Shown:
    # Off by one only shows in the laws that were used; these are compared with a healthy target's.
    broken = Broken(control.plant(setting.stack), stack, setting.params, setting.words, control.emitted is None)
    return show_to_tests(broken, lambda scored: _size(control, scored), prompts, limits)


@dataclass(frozen=True, slots=True)
class Broken:
    """A stack with a fault, and where it is shown.

    Attributes:
        stack: with the fault.
        healthy: without it; its target judges.
        params: sampling options.
        words: what is not the user's own; "" if all is.
        records_laws: whether the laws that the rule is given are wanted.
    """

    stack: Stack
    healthy: Stack
    params: SamplingParams
    words: str
    records_laws: bool = False


def show_to_tests(
    broken: Broken, size_of: Callable[[Scored], Tensor], prompts: Sequence[Sequence[int]], limits: Limits
) -> Shown:
    """Let the tests run on a broken stack until they find the fault, or their tokens or the time are used up.

    Args:
        broken: what answers.
        size_of: how far the fault put the laws of an answer's tokens off, `[tokens]`, without a look at the tokens.
        prompts: token ids.
        limits: what the tests may use.
    """
    directions = Directions(broken.healthy.target.vocab_size, batch=1)
    bets = Bets(directions.names, limits.allowance)
    sizes: list[Tensor] = []
    judge = broken.healthy.target
    for answers in scored_answers(
        broken.stack,
        prompts,
        broken.params,
        BATCH,
        judge=judge,
        records_laws=broken.records_laws,
        length=LENGTH,
    ):
        for scored in answers:
            size = size_of(scored)
            counts = size >= ROOM
            sizes.append(size[counts])
            chances, hits = directions.measure(scored)
            bets.add(chances.masked_fill(~counts[:, None], -1.0), hits)
        shown = _so_far(bets, sizes, broken.words, limits)
        if limits.deadline.over or shown.tokens >= limits.tokens or shown.p_value < limits.false_alarm:
            return shown
    raise AssertionError("answers do not run out")


def _size(control: Control, scored: Scored) -> Tensor:
    """How far the laws of tokens were off, `[tokens]`, 0 where they were not."""
    size = torch.zeros(len(scored.tokens))
    if control.emitted is None:
        for place, decision in enumerate(scored.decisions):
            if decision.used is not None:
                size[place] = total_variation(decision.used, scored.laws[place])
        return size
    found = drafted(scored)
    if found is not None:
        p, q, places, _ = found
        size[places] = total_variation(p, control.emitted(p, q)).to(size)
    return size


def _so_far(bets: Bets, sizes: Sequence[Tensor], setting: str, limits: Limits) -> Shown:
    results = bets.results()
    adjusted = holm([result.p_value for result in results])
    best = min(range(len(results)), key=lambda i: (adjusted[i], results[i].p_value))
    tokens = max(result.tokens for result in results)
    size = float(torch.cat(list(sizes)).mean()) if tokens else 0.0
    return Shown(tokens, size, limits.detectable, adjusted[best], results[best].name, setting, tokens < limits.tokens)


def finding_of(name: str, shown: Shown, false_alarm: float) -> Finding:
    """What is said of a control."""
    caught = shown.strong and shown.p_value < false_alarm
    status = Status.HOLDS if caught else Status.FAILS
    said = (
        f"total variation {shown.total_variation:.3f}, {shown.tokens:,} tokens"
        + ", " * bool(shown.setting)
        + shown.setting
    )
    if caught:
        summary = f"found, as it must be: {said}; p-value {shown.p_value:.2g} ({shown.test})"
    elif not shown.strong:
        status = Status.NOT_ENOUGH
        summary = (
            f"too small to count: {said}, less than three times the {shown.detectable:.3f} that the tests would have"
            " found; give more minutes"
        )
    elif shown.out_of_time:
        status = Status.NOT_ENOUGH
        summary = f"not found in the time there was: {said}; p-value {shown.p_value:.2g}; give more minutes"
    else:
        summary = f"NOT found: {said}; smallest p-value {shown.p_value:.2g}. These tests cannot be trusted here"
    facts = {
        "total_variation": shown.total_variation,
        "smallest_detectable_tv": shown.detectable,
        "tokens": shown.tokens,
        "adjusted_p_value": shown.p_value,
        "test": shown.test,
        "setting": shown.setting,
    }
    return Finding(Part.CONTROLS, name, status, summary, facts)
