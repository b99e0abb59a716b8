"""A certificate: its checks, run one after another, whether it is issued, and what it says in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from truedraft.certify.checks import Check, Context, Finding, Part, Stack, Status, share_of
from truedraft.certify.controls import ComparedControls, SampledControls, SeededControls
from truedraft.certify.draft_state import DraftState
from truedraft.certify.equality import Equality, EqualityInFloat32
from truedraft.certify.exact import Exact
from truedraft.certify.invariance import Invariance
from truedraft.certify.lossy import LossyDivergence
from truedraft.certify.statistics import FALSE_ALARM, Statistics
from truedraft.core.params import SamplingParams
from truedraft.errors import DrafterError, OptionError


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, and what came of it.

    Attributes:
        findings: all checks, part by part.
        lossless: whether the rule promises the target's distribution; only then can a certificate be issued.
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
    entropy: int = 0,
    tell: Callable[[Part, float], None] = lambda part, done: None,
    in_float32: Callable[[], Stack] | None = None,
) -> Certificate:
    """Check that a stack answers as its target alone would.

    Args:
        stack: target, drafter and rule.
        prompts: token ids, each shorter than the target's context; the more, the better.
        params: sampling options: temperature, top-k, top-p, min-p. With a seed requests are certified that have
            seeds, which count up from it. At most `max_tokens` of an answer are compared.
        batch: requests in a step.
        seconds: about how long to take. Where little could be seen by then it goes on, up to four times as long;
            what could not be seen even then is told as not enough evidence. Exact sums take their own time.
        entropy: fixes the noise of requests without a seed, so that a certificate can be repeated.
        tell: is told a part and the fraction of it that is done.
        in_float32: makes the same stack in float32, for greedy and seeded answers; None leaves that out.

    Returns:
        The certificate; look at `issued`.

    Raises:
        OptionError: no prompts, an unusable batch or time, options that shape logits, or a seed with a lossy rule.
        TruedraftError: the target failed.
    """
    _refuse_unusable(stack, prompts, params, batch, seconds)
    stack = stack.but(entropy=entropy)
    checks = checks_of(stack, params, in_float32)
    findings: list[Finding] = []
    with _left_as_found(stack):
        for check in checks:
            own = [each for each in checks if each.part is check.part]
            context = Context(
                stack,
                prompts,
                params,
                batch,
                check.share * seconds,
                share_of(partial(tell, check.part), own.index(check), len(own)),
                tuple(findings),
            )
            try:
                findings += check.run(context)
            except DrafterError as error:
                findings.append(Finding(check.part, "drafting", Status.FAILS, str(error)))
    return Certificate(findings, stack.rule.lossless, params, batch, seconds)


def checks_of(stack: Stack, params: SamplingParams, in_float32: Callable[[], Stack] | None = None) -> list[Check]:
    """The checks that make a certificate for a stack and options, in their order."""
    if not stack.rule.lossless:
        return [Exact(), LossyDivergence(), Invariance(), DraftState()]
    equality: list[Check] = [Equality(), *([] if in_float32 is None else [EqualityInFloat32(in_float32)])]
    if params.greedy:
        tests: list[Check] = [ComparedControls()]
    else:
        tests = [Statistics(), SampledControls() if params.seed is None else SeededControls()]
    return [Exact(), *equality, *tests, Invariance(), DraftState()]


def _refuse_unusable(
    stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int, seconds: float
) -> None:
    if params.seeded:
        stack.rule.check_seed()
    if params.shapes_logits:
        raise OptionError(
            "a certificate compares distributions by temperature, top-k, top-p and min-p; leave out penalties, biases, "
            "banned tokens, min_tokens and structured, whose exactness docs/options.md shows"
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


@contextmanager
def _left_as_found(stack: Stack) -> Iterator[None]:
    """Drafters follow the target that they were last checked against: leave them with the user's."""
    try:
        yield
    finally:
        stack.drafter.check(stack.target)


# ---------------------------------------------------------------------------------------- in words

MARKS = {
    Status.HOLDS: "holds",
    Status.FAILS: "FAILS",
    Status.MEASURED: "measured",
    Status.NOT_ENOUGH: "not enough",
    Status.DOES_NOT_APPLY: "-",
}


def verdict(certificate: Certificate) -> str:
    """The whole in one line."""
    options = _options(certificate)
    if certificate.issued:
        return f"CERTIFIED lossless: {options}"
    told = _what_is_missing(certificate)
    if not certificate.lossless:
        return f"no certificate: the rule is lossy; its divergence was measured ({options}){told and '; '}{told}"
    return f"NO CERTIFICATE: {told} ({options})"


def _what_is_missing(certificate: Certificate) -> str:
    """What keeps a certificate from being issued, apart from a lossy rule."""
    count, told = len(certificate.findings), []
    if certificate.failures:
        told.append(f"{len(certificate.failures)} of {count} checks failed: {_names(certificate.failures)}")
    if certificate.undecided:
        names = _names(certificate.undecided)
        told.append(f"not enough evidence for {len(certificate.undecided)} of {count} checks: {names}")
    return "; ".join(told)


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(map(_named, findings))


def _named(finding: Finding) -> str:
    """A control that was not found is no fault of the stack, but of what the tests could find."""
    return f"control: {finding.name}" if finding.part is Part.CONTROLS else finding.name


def _options(certificate: Certificate) -> str:
    params = certificate.params
    words = [f"temperature {params.temperature:g}"]
    words += [f"top-p {params.top_p:g}"] * (params.top_p < 1.0)
    words += [f"top-k {params.top_k}"] * (params.top_k > 0)
    words += [f"min-p {params.min_p:g}"] * (params.min_p > 0.0)
    words += ["seeded"] * params.seeded
    return ", ".join([*words, f"batch {certificate.batch}"])


def meaning(certificate: Certificate) -> list[str]:
    """What the certificate says and does not say, in sentences."""
    lines = []
    if any(finding.part is Part.STATISTICAL for finding in certificate.findings):
        lines.append(
            f"A correct stack fails the statistical checks with probability {FALSE_ALARM:g} at most; what they would "
            "have found with probability 0.99 stands in their lines."
        )
    if any(finding.part is Part.CONTROLS for finding in certificate.findings):
        lines.append("Each negative control plants a fault that the same tests must find, or they are not trusted.")
    if certificate.issued:
        lines.append(
            "It holds for this target, drafter, rule, dtype, device and these options, as far as was tested here."
        )
    return lines


def by_part(findings: Sequence[Finding]) -> dict[Part, list[Finding]]:
    """Findings under their headings, in the order of the parts."""
    found = {part: [each for each in findings if each.part is part] for part in Part}
    return {part: each for part, each in found.items() if each}


def markdown(certificate: Certificate, circumstances: Mapping[str, Any]) -> str:
    """A page.

    Args:
        certificate: what came out.
        circumstances: model, drafter, rule, dtype, device, machine and the like; shown as they are.
    """
    return page("Certificate", verdict(certificate), meaning(certificate), certificate.findings, circumstances)


def page(
    title: str, bold: str, lines: Sequence[str], findings: Sequence[Finding], circumstances: Mapping[str, Any]
) -> str:
    """A page of findings in Markdown: what it all comes to, sentences about it, the findings, the circumstances."""
    found = [f"# {title}", "", f"**{bold}**", "", *(f"- {line}" for line in lines), ""]
    for part, own in by_part(findings).items():
        found += [f"## {part.value.capitalize()}", "", "| check | | |", "|---|---|---|"]
        found += [f"| {_cell(f.name)} | {MARKS[f.status]} | {_cell(f.summary)} |" for f in own] + [""]
    found += ["## Circumstances", "", "| | |", "|---|---|"]
    found += [f"| {_cell(name)} | {_cell(plain_value(value))} |" for name, value in circumstances.items()]
    return "\n".join([*found, ""])


def plain_value(value: Any) -> str:
    """A value of a record, in a table."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_value(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_value, value))
    return str(value)


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return text.replace("|", "\\|").replace("\n", " ")
