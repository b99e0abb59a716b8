"""A certificate in words: for a terminal, as Markdown, and as a record for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from truedraft.certify.certificate import FALSE_ALARM, Certificate
from truedraft.certify.findings import Finding, Part, Status

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
    told = _told(certificate)
    if not certificate.lossless:
        return f"no certificate: the rule is lossy; its divergence was measured ({options}){told and '; '}{told}"
    return f"NO CERTIFICATE: {told} ({options})"


def _told(certificate: Certificate) -> str:
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
    words += ["coupled"] * (params.coupled and not params.greedy)
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


def by_part(certificate: Certificate) -> dict[Part, list[Finding]]:
    """The findings under their headings, in the order of the parts."""
    found = {part: [each for each in certificate.findings if each.part is part] for part in Part}
    return {part: each for part, each in found.items() if each}


def markdown(certificate: Certificate, circumstances: Mapping[str, Any]) -> str:
    """A page.

    Args:
        certificate: what came out.
        circumstances: model, drafter, rule, dtype, device, machine and the like; shown as they are.
    """
    lines = ["# Certificate", "", f"**{verdict(certificate)}**", ""]
    lines += [f"- {line}" for line in meaning(certificate)] + [""]
    for part, findings in by_part(certificate).items():
        lines += [f"## {part.value.capitalize()}", "", "| check | | |", "|---|---|---|"]
        lines += [f"| {_cell(f.name)} | {MARKS[f.status]} | {_cell(f.summary)} |" for f in findings] + [""]
    lines += ["## Circumstances", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(_plain(value))} |" for name, value in circumstances.items()]
    return "\n".join([*lines, ""])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(value)


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return text.replace("|", "\\|").replace("\n", " ")
