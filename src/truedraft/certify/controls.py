"""Negative controls: the certificate's own tests must detect planted faults of known size.

A test that never fails proves nothing. Each control plants one fault in the user's own stack and runs the certificate's
checks on the result.

Faults of sampled answers: the total variation that the fault causes at each token is computed. The tests must find the
fault within as many tokens as they had to certify, and it must be at least three times as large as the smallest
deviation that they would have found there, so that finding it was no luck. Only tokens with a noticeably changed
distribution count; the size of the change is known before the token is. If the user's own drafter leaves a fault little
room, a stand-in drafts: the target itself, sharpened or as it is, possibly at a higher temperature.

Faults of greedy and seeded answers are given to the comparison with plain decoding. Given text and noise, a
distribution is one-hot here, so a fault's total variation is the share of tokens that are not the target's choice at
their own prefix. Noise used twice is no such fault, because plain decoding would use it twice as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.checks import Check, Context, Deadline, Finding, Part, Stack, Status, numbered, open_ended
from truedraft.certify.e_process import POWER, TokenTests
from truedraft.certify.equality import Comparison, chooser
from truedraft.certify.faults import Fault
from truedraft.certify.sampling import Scored, plain_logits, scored_answers
from truedraft.certify.statistics import sampled_finding
from truedraft.core.budget import Budget
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits, total_variation
from truedraft.drafters import Drafter, DraftModel
from truedraft.engine.policy import FixedBudget
from truedraft.models.base import LanguageModel
from truedraft.testing import scaled

TIMES_DETECTABLE = 3.0  # minimum ratio of a control's fault to the smallest deviation that its tests would find
ROOM = 0.15  # tokens with a smaller total variation do not count
_RESERVE = 0.08  # share of the time for all controls that is reserved for each later one
_NO_TIME = "no time was left to show it; give more minutes"
_BATCH = 16
_LENGTH = 40  # tokens of an answer. A fault is found soon, and then no more text is needed.
_BEGINNING = 8
_OWN_IS_BETTER = 1.2  # the user's own drafter is used unless a stand-in shows a fault in far fewer tokens
_SHARPER = 3.0
_SHARE = 0.6  # approximate share in chains of one token: each step verifies one, and emits one or two
_WARM = 1.2
_ENTRIES = 1 << 22
_LOOKED_AT = 1 << 20  # number of probabilities that settings are compared by
_PROMPTS = 4


SAMPLED = (
    faults.KEEPS_ALL,
    faults.RESIDUAL_IS_P,
    faults.draft_judged_at(2.0),
    faults.ONE_NUMBER,
    faults.dropped_below(0.3),
    faults.LOST_BY_FAILURES,
    faults.CACHE_OFF_BY_ONE,
)


def drafting_one(stack: Stack, drafter: Drafter) -> Stack:
    """A stack that drafts one token a step, where the effect of a planted fault has a closed form."""
    return stack.but(drafter=drafter, controller=FixedBudget(Budget(1, 1, 1)))


def _shown_by(fault: Fault, drafter: Callable[[Stack], Drafter], words: str) -> Fault:
    """A fault with a drafter that shows it, by right or wrong guesses as needed; `words` describe the drafter."""
    return replace(fault, detail=words, plant=lambda stack: fault.planted(drafting_one(stack, drafter(stack))))


COMPARED = (
    _shown_by(
        faults.KEEPS_ALL, lambda stack: faults.next_id(stack.target.vocab_size), "drafts that are hardly ever right"
    ),
    _shown_by(
        faults.CACHE_OFF_BY_ONE,
        lambda stack: DraftModel(stack.target, num_speculative_tokens=1),
        "drafted by the target itself",
    ),
)


@dataclass(eq=False)
class SampledControls(Check):
    """Runs the tests of sampled answers on every fault, with no more tokens than they had to certify."""

    part = Part.CONTROLS
    controls: Sequence[Fault] = SAMPLED
    share: float = 0.25

    def run(self, context: Context) -> list[Finding]:
        sampled = sampled_finding(context.earlier)
        if sampled is None:
            said = "There are no answers to test."
            return [Finding(Part.CONTROLS, "planted faults", Status.DOES_NOT_APPLY, said)]
        stack = context.stack
        prompts = [list(prompt)[:_BEGINNING] for prompt in context.prompts]  # a prefill shows nothing of a fault
        formed = any(control.form is not None for control in self.controls)
        settings = _settings_of(stack, prompts, context.params) if formed else []
        findings = []
        count = len(self.controls)
        whole = context.patience()  # if faults are not found sooner
        for number, control in enumerate(self.controls):
            if context.over:
                findings.append(Finding(Part.CONTROLS, control.name, Status.NOT_ENOUGH, _NO_TIME))
                continue
            setting = _best_setting(control, settings, stack, context.params)
            # Most faults are found at once and leave their time to the others.
            own = Deadline(whole.seconds * (1.0 - whole.fraction - _RESERVE * (count - 1 - number)))
            shown = setting.shown(control, stack.target, prompts, sampled.facts, own)
            findings.append(shown.finding(control.name))
            context.tell((number + 1) / count)
        return findings


@dataclass(eq=False)
class ComparedControls(Check):
    """Runs the comparison of greedy or seeded answers with plain decoding on faults, in at most `rounds` of answers."""

    part = Part.CONTROLS
    controls: Sequence[Fault] = COMPARED
    share: float = 0.25
    rounds: int = 8
    tokens: int = 32

    def run(self, context: Context) -> list[Finding]:
        findings = []
        for number, control in enumerate(self.controls):
            findings.append(self._show(control, context))
            context.tell((number + 1) / len(self.controls))
        return findings

    def _show(self, control: Fault, context: Context) -> Finding:
        stack, params = context.stack, context.params
        broken = control.planted(stack)
        prompts = [list(prompt) for prompt in context.prompts[:_PROMPTS]]
        counted = _Counted()
        for number in range(self.rounds):
            # Later rounds begin after more of each prompt's plain answer, so that greedy texts are new, too.
            self._compare(counted, broken, stack, prompts, numbered(params, number * len(prompts)))
            if counted.strong and counted.comparison.untraced:
                break
            if context.over:
                counted.out_of_time = True
                break
            prompts = [self._longer(stack, prompt) for prompt in prompts]
        return counted.finding(control)

    def _longer(self, stack: Stack, prompt: list[int]) -> list[int]:
        if len(prompt) + 2 * self.tokens >= stack.target.context_length:
            return prompt
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        return [*prompt, *stack.plain(1).generate(prompt, params).token_ids]

    def _compare(
        self, counted: _Counted, broken: Stack, stack: Stack, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        room = stack.target.context_length
        options = [
            open_ended(numbered(params, number), min(self.tokens, room - len(prompt)))
            for number, prompt in enumerate(prompts)
        ]
        wrong = broken.engine(len(prompts)).generate(prompts, options)
        right = stack.plain(len(prompts)).generate(prompts, options)
        for number, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
            context = Context(stack, [prompt], own, len(prompts))
            counted.comparison.add(right[number], wrong[number], context, number, has_margins=False)
            tokens = wrong[number].token_ids
            (logits,) = plain_logits(stack.target, [(prompt, tokens)])
            choices = [chooser(own, place, row)(row) for place, row in enumerate(logits, len(prompt))]
            counted.others += sum(mine != theirs for mine, theirs in zip(tokens, choices, strict=True))


@dataclass(frozen=True, slots=True)
class Shown:
    """Result of the tests on one fault."""

    tokens: int
    total_variation: float  # computed; the mean over the tested tokens
    p_value: float  # the smallest, after Holm's correction
    test: str
    setting: str  # what was not the user's own, in words
    certified: Mapping[str, Any]  # facts of the tests when they certified; here they get no more tokens

    @property
    def strong(self) -> bool:
        return self.total_variation >= TIMES_DETECTABLE * self.certified["smallest_detectable_tv"]

    @property
    def found(self) -> bool:
        return self.p_value < self.certified["false_alarm"]

    def finding(self, name: str) -> Finding:
        caught, detectable = self.strong and self.found, self.certified["smallest_detectable_tv"]
        said = f"total variation {self.total_variation:.3f}, {self.tokens:,} tokens"
        said += f", {self.setting}" * bool(self.setting)
        seen = f"{said}; p-value {self.p_value:.2g}"
        if caught:
            status, summary = Status.HOLDS, f"found, as it must be: {seen} ({self.test})"
        elif not self.strong:
            less = f"less than three times the {detectable:.3f} that the tests would have found"
            status, summary = Status.NOT_ENOUGH, f"too small to count: {said}, {less}; give more minutes"
        elif self.tokens < self.certified["tokens"]:
            status, summary = Status.NOT_ENOUGH, f"not found in the time there was: {seen}; give more minutes"
        else:
            summary = f"NOT found: {said}; smallest p-value {self.p_value:.2g}. These tests cannot be trusted here"
            status = Status.FAILS
        facts = {
            "total_variation": self.total_variation,
            "smallest_detectable_tv": detectable,
            "tokens": self.tokens,
            "adjusted_p_value": self.p_value,
            "test": self.test,
            "setting": self.setting,
        }
        return Finding(Part.CONTROLS, name, status, summary, facts)


def _sizes(fault: Fault, scored: Scored) -> Tensor:
    """Total variation `[tokens]` that a fault causes at each token, from its form or from what the rule received."""
    size = torch.zeros(len(scored.tokens))
    if fault.form is None:
        for place, decision in enumerate(scored.decisions):
            p = scored.probs[place].double()
            if fault.following is not None and decision.depth == 1:
                size[place] = total_variation(fault.following(scored.probs[place - 1], scored.tokens[place - 1], p), p)
            elif fault.following is None and decision.used is not None:
                size[place] = total_variation(decision.used, scored.probs[place])
        return size
    found = drafted(scored)
    if found is not None:
        p, q, places, _ = found
        size[places] = total_variation(p, fault.emitted(p, q)).to(size)
    return size


@dataclass(frozen=True, slots=True)
class _Setting:
    """Where a fault is shown: the user's own drafter, or a stand-in that leaves it more room."""

    stack: Stack
    params: SamplingParams
    words: str  # what is not the user's own; "" if all is
    rooms: Sequence[tuple[Tensor, Tensor, bool]]  # p and q [tokens, vocab], and whether drafts are drawn
    share: float  # of tokens with a verified draft
    own: bool = False  # one of the user's drafters drafts

    def evidence(self, control: Fault) -> float:
        """Evidence per token about a fault: the mean square of the total variation where it counts."""
        rooms = [(p, q) for p, q, drawn in self.rooms if drawn or not control.needs_draw]
        sizes = [total_variation(p, control.emitted(p, q)) for p, q in rooms]
        sizes = [torch.where(size >= ROOM, size, 0.0) for size in sizes]
        return self.share * float(torch.cat(sizes).square().mean()) if sizes else 0.0

    def shown(
        self,
        fault: Fault,
        healthy: LanguageModel,
        prompts: Sequence[Sequence[int]],
        certified: Mapping[str, Any],
        deadline: Deadline,
    ) -> Shown:
        """Run the tests until they find a fault, or their tokens or time are used up; the `healthy` target judges."""
        tests = TokenTests(healthy.vocab_size, allowance=certified["rounding_allowed_tv"])
        sizes: list[Tensor] = []
        for answers in scored_answers(
            fault.planted(self.stack),
            prompts,
            self.params,
            _BATCH,
            judge=healthy,
            records_probs=fault.form is None,  # off by one only shows in what was used
            length=_LENGTH,
        ):
            for scored in answers:
                size = _sizes(fault, scored)
                counts = size >= ROOM
                sizes.append(size[counts])
                tests.add(scored, counts)
            results = tests.results()
            best = min(results, key=lambda result: result.p_value)
            adjusted = min(1.0, len(results) * best.p_value)
            off = float(torch.cat(sizes).mean()) if tests.tokens else 0.0
            shown = Shown(tests.tokens, off, adjusted, best.name, self.words, certified)
            if shown.found or shown.tokens >= certified["tokens"] or deadline.over:
                return shown
        raise AssertionError("answers do not run out")


def _settings_of(stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[_Setting]:
    settings = []
    members = stack.drafter.members
    for name, member in members.items():
        own = drafting_one(stack, member)
        answers = next(scored_answers(own, prompts, params, _BATCH, length=_LENGTH))
        rooms = [found for scored in answers if (found := drafted(scored)) is not None]
        some = max(1, _LOOKED_AT // stack.target.vocab_size // max(1, len(rooms)))
        share = sum(len(places) for _, _, places, _ in rooms) / sum(len(scored.tokens) for scored in answers)
        looked_at = [(p[:some].clone(), q[:some].clone(), drawn) for p, q, _, drawn in rooms]
        words = "" if len(members) == 1 else f"drafted by {name!r} alone"
        settings.append(_Setting(own, params, words, looked_at, share, own=True))
    texts = [(scored.before, scored.tokens) for scored in answers]
    logits = torch.cat(plain_logits(stack.target, texts))[: max(1, _LOOKED_AT // stack.target.vocab_size)].float()
    warm = [replace(params, temperature=_WARM)] if params.temperature < 1.0 else []
    for options in (params, *warm):
        for factor, words in ((_SHARPER, "the target itself, sharpened"), (1.0, "the target itself")):
            stand_in = drafting_one(stack, DraftModel(scaled(stack.target, factor), num_speculative_tokens=1))
            p, q = probs_from_logits(logits, options), probs_from_logits(logits * factor, options)
            at = "" if options is params else f" at temperature {options.temperature:g}"
            settings.append(_Setting(stand_in, options, f"drafted by {words}{at}", [(p, q, True)], _SHARE))
    return settings


def _best_setting(control: Fault, settings: Sequence[_Setting], stack: Stack, params: SamplingParams) -> _Setting:
    if control.form is None:
        itself = drafting_one(stack, DraftModel(stack.target, num_speculative_tokens=1))
        return _Setting(itself, params, "drafted by the target itself", (), _SHARE)
    own, best = (
        max((each for each in settings if each.own is is_own), key=lambda setting: setting.evidence(control))
        for is_own in (True, False)
    )
    return own if _OWN_IS_BETTER * own.evidence(control) >= best.evidence(control) else best


def drafted(scored: Scored) -> tuple[Tensor, Tensor, list[int], bool] | None:
    """p and q `[tokens, vocab]` at nodes with a draft, the first tokens' places, and whether they were drawn from q."""
    places = [i for i, one in enumerate(scored.decisions) if one.q is not None or one.candidates]
    places = places[: max(1, _ENTRIES // scored.probs.shape[-1])]
    if not places:
        return None
    p = scored.probs[places]
    rows = []
    for row, place in zip(p, places, strict=True):
        decision = scored.decisions[place]
        if decision.q is not None:
            rows.append(decision.q.to(p))
        else:
            rows.append(torch.zeros_like(row))
            rows[-1][decision.candidates[0]] = 1.0
    return p, torch.stack(rows), places, scored.decisions[places[0]].q is not None


@dataclass(slots=True)
class _Counted:
    comparison: Comparison = field(default_factory=Comparison)
    others: int = 0
    out_of_time: bool = False

    @property
    def size(self) -> float:
        return self.others / max(1, self.comparison.compared)

    @property
    def detectable(self) -> float:
        """Share of wrong tokens at which one of them would have occurred with probability `POWER`."""
        return min(1.0, -math.log(1.0 - POWER) / max(1, self.comparison.compared))

    @property
    def strong(self) -> bool:
        return self.size >= TIMES_DETECTABLE * self.detectable

    def finding(self, control: Fault) -> Finding:
        caught = self.strong and self.comparison.untraced > 0
        said = f"{self.size:.1%} of {self.comparison.compared} tokens are not the target's choice, {control.detail}"
        if caught:
            status = Status.HOLDS
            verdict = f"found, as it must be: {self.comparison.untraced} of {self.comparison.answers} answers differ"
        elif self.comparison.untraced:
            status, verdict = Status.NOT_ENOUGH, "found, but too small to count: give more prompts"
        elif self.out_of_time:
            status, verdict = Status.NOT_ENOUGH, "not found in time: give more minutes"
        else:
            status, verdict = Status.FAILS, "NOT found: this comparison cannot be trusted here"
        facts = {
            "total_variation": self.size,
            "smallest_detectable_tv": self.detectable,
            "tokens": self.comparison.compared,
            "answers": self.comparison.answers,
            "differing_answers": self.comparison.untraced,
            "setting": control.detail,
        }
        return Finding(Part.CONTROLS, control.name, status, f"{verdict}; {said}", facts)
