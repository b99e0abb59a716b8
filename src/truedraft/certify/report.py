"""Results of a certificate, as a page, as a JSON record and as JUnit XML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from truedraft.certify.checks import Finding, Part, Status
from truedraft.certify.e_process import ENOUGH
from truedraft.core.params import SamplingParams

MARKS = {
    Status.HOLDS: "holds",
    Status.FAILS: "FAILS",
    Status.MEASURED: "measured",
    Status.NOT_ENOUGH: "not enough",
    Status.DOES_NOT_APPLY: "-",
}
_COUNTED = (Part.STATISTICAL, Part.SAMPLED, Part.WORLDS)
"""Parts with findings that have a smallest detectable deviation."""
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot represent, not even as references."""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings on a stack, an engine or a sampler, with a verdict.

    Attributes:
        facts: further facts for the record; plain values, lists and dictionaries.
    """

    title: str
    findings: Sequence[Finding]
    options: str  # what was certified, and with which options, in words
    notes: Sequence[str] = ()  # sentences on the scope of the result
    facts: Mapping[str, Any] = field(default_factory=dict)
    lossy: bool = False  # whether the rule declares itself lossy; it is only measured, and no certificate can be issued
    seconds: float = 0.0

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is Status.FAILS]

    @property
    def undecided(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is Status.NOT_ENOUGH]

    @property
    def issued(self) -> bool:
        return not self.lossy and not self.failures and not self.undecided

    @property
    def evidence(self) -> float:
        """The largest e-value of its checks, 1 without any; other failures have none."""
        logs = [finding.facts["log10_evidence"] for finding in self.findings if "log10_evidence" in finding.facts]
        return 10.0 ** min(max(logs, default=0.0), 300.0)

    @property
    def faults(self) -> list[str]:
        named = [finding.facts.get("fault") for finding in self.failures]
        return list(dict.fromkeys(name for name in named if name))

    @property
    def verdict(self) -> str:
        count, parts = len(self.findings), []
        if self.failures:
            named = f" ({', '.join(self.faults)})" if self.faults else ""
            parts.append(f"{len(self.failures)} of {count} checks failed{named}: {_names(self.failures)}")
        if self.undecided:
            names = _names(self.undecided)
            parts.append(f"not enough evidence for {len(self.undecided)} of {count} checks{self._needed()}: {names}")
        if self.lossy:
            words = "; ".join(["no certificate: the rule is lossy; its divergence was measured", *parts])
        else:
            words = f"NO CERTIFICATE: {'; '.join(parts)}" if parts else f"CERTIFIED: {', '.join(self._what_holds())}"
        return f"{words} ({self.options})"

    def _needed(self) -> str:
        """Estimated time for the undecided checks: detectable deviations fall with the square root of the time."""
        seen = [each.facts.get("smallest_detectable_tv", 0.0) for each in self.undecided]
        longer = (max(seen, default=0.0) / ENOUGH) ** 2
        return f", give about --minutes {longer * self.seconds / 60.0:.2g}" if 1.0 < longer < math.inf else ""

    def _what_holds(self) -> list[str]:
        """Only exact sums justify the word lossless."""
        holding = [finding for finding in self.findings if finding.status is Status.HOLDS]
        words = ["the rule is lossless in exact sums"] * any(each.part is Part.EXACT for each in holding)
        words += ["answers are plain decoding's"] * any(each.part is Part.EQUALITY for each in holding)
        seen = [each.facts["smallest_detectable_tv"] for each in holding if each.part in _COUNTED]
        return [*words, f"no deviation found above {max(seen):.3f}"] if seen else words or ["no deviation found"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "certified": self.issued,
            "verdict": self.verdict,
            "failures": [finding.name for finding in self.failures],
            "undecided": [finding.name for finding in self.undecided],
            "evidence": self.evidence,
            "faults": self.faults,
            "seconds": self.seconds,
            **self.facts,
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

    def page(self, circumstances: Mapping[str, Any]) -> str:
        lines = [f"# {self.title}", "", f"**{self.verdict}**", "", *(f"- {note}" for note in self.notes), ""]
        for part, own in by_part(self.findings).items():
            lines += [f"## {part.value.capitalize()}", "", "| check | | |", "|---|---|---|"]
            lines += [f"| {_cell(f.name)} | {MARKS[f.status]} | {_cell(f.summary)} |" for f in own] + [""]
        lines += ["## Circumstances", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(plain_value(value))} |" for name, value in circumstances.items()]
        return "\n".join([*lines, ""])

    def junit(self) -> str:
        """JUnit XML: a test case for each finding; checks with too little evidence are skipped."""
        skipped = (Status.NOT_ENOUGH, Status.DOES_NOT_APPLY)
        count = sum(finding.status in skipped for finding in self.findings)
        suite = ElementTree.Element(
            "testsuite", name=f"truedraft certify: {self.options}", tests=str(len(self.findings)),
            failures=str(len(self.failures)), errors="0", skipped=str(count), time=f"{self.seconds:.1f}",
        )  # fmt: skip
        for finding in self.findings:
            case = ElementTree.SubElement(suite, "testcase", classname=finding.part.value, name=finding.name, time="0")
            if finding.status is Status.FAILS:
                failure = ElementTree.SubElement(case, "failure", message=finding.summary, type="deviation")
                failure.text = "\n".join(f"{name}: {plain_value(value)}" for name, value in finding.facts.items())
            elif finding.status in skipped:
                ElementTree.SubElement(case, "skipped", message=f"{finding.status.value}: {finding.summary}")
            else:
                ElementTree.SubElement(case, "system-out").text = finding.summary
        return xml_text(suite)


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(f"control: {each.name}" if each.part is Part.CONTROLS else each.name for each in findings)


def by_part(findings: Sequence[Finding]) -> dict[Part, list[Finding]]:
    """Findings by part, in the order of the parts."""
    found = {part: [each for each in findings if each.part is part] for part in Part}
    return {part: each for part, each in found.items() if each}


def option_words(params: SamplingParams) -> list[str]:
    """Sampling options, each in words."""
    words = [f"temperature {params.temperature:g}"]
    words += [f"top-p {params.top_p:g}"] * (params.top_p < 1.0)
    words += [f"top-k {params.top_k}"] * (params.top_k > 0)
    return [*words, *[f"min-p {params.min_p:g}"] * (params.min_p > 0.0)]


def evidence_words(log10: float) -> str:
    """A short e-value: 0.4, 250, 10^12."""
    return f"10^{log10:.0f}" if log10 >= 4.0 else f"{10.0**log10:.3g}"


def plain_value(value: Any) -> str:
    """A value of a record, as text for a table."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_value(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_value, value))
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def xml_text(element: ElementTree.Element) -> str:
    """A document. Characters that XML cannot represent are replaced by U+FFFD."""
    text = _FORBIDDEN.sub("\ufffd", ElementTree.tostring(element, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'
