"""All parts of a certificate, one after another, and whether it is issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from truedraft.certify.clock import Deadline
from truedraft.certify.controls import Limits, control_findings
from truedraft.certify.coupled_controls import coupled_control_findings, shared_noise_finding
from truedraft.certify.divergence import divergence_findings
from truedraft.certify.draft_state import draft_state_findings
from truedraft.certify.equality import equality_findings
from truedraft.certify.exact import exact_findings
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.invariance import invariance_findings
from truedraft.certify.rounding import Rounding, measure_rounding
from truedraft.certify.stack import Stack
from truedraft.certify.statistical import statistical_findings
from truedraft.core.sampling import SamplingParams
from truedraft.errors import DrafterError, OptionError

Tell = Callable[[Part, float], None]
"""Is told a part and the fraction of it that is done."""

FALSE_ALARM = 1e-3
"""Probability, at most, that the statistics of a correct stack keep a certificate from being issued."""
_MARGIN = 0.5
"""Where rounding moves laws, so much more than was measured is allowed."""
_SHARES = {"equality": 0.12, "float32": 0.05, "statistical": 0.45, "controls": 0.25, "invariance": 0.08, "draft": 0.05}


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, and what came of it.

    Attributes:
        findings: all checks, part by part.
        lossless: whether the rule promises the target's law; only then can a certificate be issued.
        params: the options that were checked.
        batch: requests in a step.
        seconds: that were to be spent.
    """

    findings: Sequence[Finding]
    lossless: bool
    params: SamplingParams
    batch: int
    seconds: float

    @property
    def failures(self) -> list[Finding]:
        """Checks that failed."""
        return [finding for finding in self.findings if finding.status is Status.FAILS]

    @property
    def undecided(self) -> list[Finding]:
        """Checks that could not see enough in the time there was."""
        return [finding for finding in self.findings if finding.status is Status.NOT_ENOUGH]

    @property
    def issued(self) -> bool:
        """Whether the stack is certified: a lossless rule, nothing failed, controls included, and nothing is open."""
        return self.lossless and not self.failures and not self.undecided

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record."""
        return {
            "certified": self.issued,
            "lossless": self.lossless,
            "failures": [finding.name for finding in self.failures],
            "undecided": [finding.name for finding in self.undecided],
            "findings": [
                {
                    "part": finding.part.value,
                    "name": finding.name,
                    "status": finding.status.value,
                    "summary": finding.summary,
                    **finding.facts,
                }
                for finding in self.findings
            ],
        }


def certify(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    batch: int = 1,
    seconds: float = 300.0,
    tell: Tell = lambda part, done: None,
    in_float32: Callable[[], Stack] | None = None,
) -> Certificate:
    """Check that a stack answers as its target alone would.

    Args:
        stack: target, drafter and rule.
        prompts: token ids, each shorter than the target's context; the more, the better.
        params: sampling options: temperature, top-k, top-p, min-p, coupled. At most `max_tokens` of an answer are
            compared.
        batch: requests in a step.
        seconds: about how long to take. Where little could be seen by then it goes on, up to four times as long;
            what could not be seen even then is told as not enough evidence. Exact sums take their own time.
        tell: is told how far a part is.
        in_float32: makes the same stack in float32, for greedy and coupled answers; None leaves that out.

    Returns:
        The certificate; look at `issued`.

    Raises:
        OptionError: no prompts, an unusable batch or time, or coupled requests with a lossy rule.
        TruedraftError: the target failed.
    """
    _check(stack, prompts, params, batch, seconds)
    params = replace(params, seed=params.seed or 0)
    run = _Run(stack, prompts, params, batch, seconds, tell)
    with _left_as_found(stack):
        findings = [*run.exact()]
        if stack.rule.lossless:
            findings += run.equality(in_float32)
            if not params.greedy:
                findings += _unless_drafting_fails(Part.STATISTICAL, run.statistical)
            findings += _unless_drafting_fails(Part.CONTROLS, lambda: run.controls(findings))
        else:
            findings += _unless_drafting_fails(Part.DIVERGENCE, run.divergence)
        findings += run.invariance()
        findings += run.draft_state()
    return Certificate(findings, stack.rule.lossless, params, batch, seconds)


def _check(stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int, seconds: float) -> None:
    if params.coupled and not stack.rule.lossless:
        raise OptionError(
            f"coupled requests take the target's own tokens whatever the rule, and rule {stack.rule.spec!r} is lossy; "
            "leave one of them out"
        )
    if not prompts:
        raise OptionError("there is nothing to certify with: give at least one prompt")
    if batch < 1:
        raise OptionError(f"batch must be 1 or more, got {batch}")
    if not 0.0 < seconds < float("inf"):
        raise OptionError(f"the time for a certificate must be above 0, got {seconds} seconds")
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < stack.target.context_length - 1:
            raise OptionError(
                f"prompt {number} has {len(prompt)} tokens; give 1 to {stack.target.context_length - 2}, so that the "
                "target has room to answer"
            )


def _unless_drafting_fails(part: Part, checks: Callable[[], list[Finding]]) -> list[Finding]:
    """A drafter that gave up leaves plain decoding, which says nothing of the stack: that is what is found then."""
    try:
        return checks()
    except DrafterError as error:
        return [Finding(part, "drafting", Status.FAILS, str(error))]


@contextmanager
def _left_as_found(stack: Stack) -> Iterator[None]:
    """Drafters follow the target that they were last checked against: leave them with the user's."""
    try:
        yield
    finally:
        stack.drafter.check(stack.target)


@dataclass
class _Run:
    """The parts, with what they share."""

    stack: Stack
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    batch: int
    seconds: float
    tell_of: Tell
    allowance: float = 0.0

    def exact(self) -> list[Finding]:
        """The rule in exact sums."""
        rule = self.stack.rule
        compares = self.params.coupled or (self.params.greedy and rule.lossless)
        return exact_findings(
            rule.greedy_form if self.params.greedy else rule,
            self.stack.drafter.kinds,
            coupled=compares,
            device=self.stack.target.device,
            tell=self._tell(Part.EXACT),
            coupled_rule=self.stack.coupled_rule,
        )

    def equality(self, in_float32: Callable[[], Stack] | None) -> list[Finding]:
        """Greedy and coupled answers against plain ones, in the user's dtype and in float32."""
        label = str(self.stack.target.dtype).removeprefix("torch.")
        findings = equality_findings(
            self.stack,
            self.prompts,
            self.params,
            self.batch,
            self._tell(Part.EQUALITY),
            label=label,
            seconds=self._share("equality"),
        )
        if in_float32 is not None and label != "float32":
            findings += equality_findings(
                in_float32(),
                self.prompts,
                self.params,
                self.batch,
                self._tell(Part.EQUALITY),
                label="float32",
                seconds=self._share("float32"),
            )
        return findings

    def statistical(self) -> list[Finding]:
        """Sampled answers against the target's law."""
        rounding = self._rounding()
        self.allowance = 0.0 if rounding.bitwise else (1.0 + _MARGIN) * rounding.mean_total_variation
        return statistical_findings(
            self.stack,
            self.prompts,
            self.params,
            self.batch,
            self._share("statistical"),
            self._tell(Part.STATISTICAL),
            allowance=self.allowance,
            false_alarm=FALSE_ALARM,
            seed=self.params.seed or 0,
        )

    def _rounding(self) -> Rounding:
        texts = [list(prompt) for prompt in self.prompts if len(prompt) > 1][:4]
        texts = texts or [[*self.prompts[0], *self.prompts[0]]]
        return measure_rounding(
            self.stack.target, texts, self.batch, self.params, self.stack.drafter.limits, seconds=0.02 * self.seconds
        )

    def controls(self, so_far: Sequence[Finding]) -> list[Finding]:
        """Planted faults, which must be found."""
        tell = self._tell(Part.CONTROLS)
        if self.params.greedy:
            return coupled_control_findings(self.stack, self.prompts, self.params, tell)
        sampled = next((f for f in so_far if f.part is Part.STATISTICAL and "tests" in f.facts), None)
        if sampled is None:
            return [Finding(Part.CONTROLS, "planted faults", Status.DOES_NOT_APPLY, "There are no answers to test.")]
        tokens, detectable = sampled.facts["tokens"], sampled.facts["smallest_detectable_tv"]
        if not self.params.coupled:
            return control_findings(
                self.stack,
                self.prompts,
                self.params,
                self._share("controls"),
                tell,
                tokens=tokens,
                detectable=detectable,
                allowance=self.allowance,
                false_alarm=FALSE_ALARM,
            )
        findings = coupled_control_findings(self.stack, self.prompts, self.params, lambda done: tell(done / 2))
        limits = Limits(Deadline(self._share("controls")), tokens, detectable, self.allowance, FALSE_ALARM)
        findings.append(shared_noise_finding(self.stack, self.prompts, self.params, limits))
        tell(1.0)
        return findings

    def divergence(self) -> list[Finding]:
        """How far a lossy rule is off."""
        seconds = self._share("statistical") + self._share("controls")
        tell = self._tell(Part.DIVERGENCE)
        return divergence_findings(self.stack, self.prompts, self.params, self.batch, seconds, tell)

    def invariance(self) -> list[Finding]:
        """One request asked in many ways."""
        return invariance_findings(
            self.stack,
            self.prompts,
            self.params,
            self.batch,
            self._tell(Part.INVARIANCE),
            seconds=self._share("invariance"),
        )

    def draft_state(self) -> list[Finding]:
        """A drafter that lived through an answer against a fresh one."""
        return draft_state_findings(
            self.stack,
            self.prompts,
            self.params,
            self.batch,
            self._tell(Part.DRAFT_STATE),
            seconds=self._share("draft"),
        )

    def _share(self, part: str) -> float:
        return _SHARES[part] * self.seconds

    def _tell(self, part: Part) -> Callable[[float], None]:
        return lambda done: self.tell_of(part, done)
