"""What came of asking an engine, in words, as a page, and as JUnit's XML for those who run it beside their tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from truedraft.certify.certificate import page, plain_value
from truedraft.certify.checks import Finding, Status
from truedraft.certify.engines.evidence import ALARM, CERTAIN
from truedraft.core.params import SamplingParams
from truedraft.peers import PeerFacts

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write, not even by its number."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What was checked of an engine, and what came of it.

    Attributes:
        findings: all checks, part by part.
        engine: what is known of it.
        params: the options that were checked.
        together: requests that were asked at once.
        tokens: of all its answers.
        seconds: that it took.
        dropped: answers that could not be used, by reason.
        unsure: answers whose token ids had to be guessed from their text, by reason.
        more: further facts for the record.
    """

    findings: Sequence[Finding]
    engine: PeerFacts
    params: SamplingParams
    together: int
    tokens: int
    seconds: float
    dropped: Mapping[str, int] = field(default_factory=dict)
    unsure: Mapping[str, int] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[Finding]:
        """Checks that failed: the engine deviates, or does not keep a promise."""
        return [finding for finding in self.findings if finding.status is Status.FAILS]

    @property
    def undecided(self) -> list[Finding]:
        """Checks that could not see enough in the time there was."""
        return [finding for finding in self.findings if finding.status is Status.NOT_ENOUGH]

    @property
    def deviates(self) -> bool:
        """Whether any check failed."""
        return bool(self.failures)

    @property
    def evidence(self) -> float:
        """The largest e-value of its checks of tokens; broken promises have none, they fail by themselves."""
        logs = [finding.facts["log10_evidence"] for finding in self.findings if "log10_evidence" in finding.facts]
        return 10.0 ** min(max(logs, default=0.0), 300.0)

    @property
    def faults(self) -> list[str]:
        """Classes of faults that the evidence names."""
        named = [finding.facts.get("fault") for finding in self.failures]
        return list(dict.fromkeys(name for name in named if name))

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record."""
        return {
            "deviates": self.deviates,
            "undecided": [finding.name for finding in self.undecided],
            "failures": [finding.name for finding in self.failures],
            "evidence": self.evidence,
            "faults": self.faults,
            "engine": {"name": self.engine.name, "version": self.engine.version, "filters": list(self.engine.filters),
                       **self.engine.more},
            "temperature": self.params.temperature, "top_p": self.params.top_p, "top_k": self.params.top_k,
            "min_p": self.params.min_p, "together": self.together, "tokens": self.tokens, "seconds": self.seconds,
            "dropped": dict(self.dropped), "unsure": dict(self.unsure), **self.more,
            "findings": [
                {"part": each.part.value, "name": each.name, "status": each.status.value, "summary": each.summary,
                 **each.facts}
                for each in self.findings
            ],
        }  # fmt: skip


def engine_verdict(report: EngineReport) -> str:
    """The whole in one line."""
    options = _options(report)
    if report.deviates:
        named = f" ({', '.join(report.faults)})" if report.faults else ""
        names = ", ".join(finding.name for finding in report.failures)
        return f"DEVIATES{named}: {names}; {options}"
    if report.undecided:
        names = ", ".join(finding.name for finding in report.undecided)
        return f"NOT ENOUGH EVIDENCE for {names}; give more --minutes or --tokens; {options}"
    return f"NO DEVIATION FOUND: {options}"


def engine_meaning(report: EngineReport) -> list[str]:
    """What the report says and does not say, in sentences."""
    lines = [
        f"A sound engine reaches evidence of {ALARM:g} in any one check with probability {1.0 / ALARM:g} at most, "
        "whenever one looks; what would have been found stands in the lines.",
        "It holds for these options, this version and these prompts, as far as was tested here.",
    ]
    if report.deviates:
        again = "and comes back in another run, with other seeds"
        lines.insert(1, f"Call it a fault where the evidence reaches {CERTAIN:g} {again}.")
    if report.dropped or any(report.unsure.values()):
        lines.append(
            f"{sum(report.dropped.values())} answers were dropped, which evidence paid for, and the token ids of "
            f"{sum(report.unsure.values())} read from their text, by which nothing is called a fault."
        )
    return lines


def _options(report: EngineReport) -> str:
    params = report.params
    words = [f"{report.engine.name} {report.engine.version}".strip(), f"temperature {params.temperature:g}"]
    words += [f"top-p {params.top_p:g}"] * (params.top_p < 1.0)
    words += [f"top-k {params.top_k}"] * (params.top_k > 0)
    words += [f"min-p {params.min_p:g}"] * (params.min_p > 0.0)
    return ", ".join([*words, f"{report.together} together", f"{report.tokens:,} tokens"])


def engine_page(report: EngineReport, circumstances: Mapping[str, Any]) -> str:
    """A page in Markdown; circumstances are shown as they are."""
    title = "Certificate of an engine"
    return page(title, engine_verdict(report), engine_meaning(report), report.findings, circumstances)


def junit(report: EngineReport) -> str:
    """The findings as JUnit's XML: a test case each; failures fail, what saw too little is skipped with its reason."""
    suite = ElementTree.Element(
        "testsuite", name=f"truedraft certify {report.engine.name}", tests=str(len(report.findings)),
        failures=str(len(report.failures)), errors="0", skipped=str(sum(map(_is_skipped, report.findings))),
        time=f"{report.seconds:.1f}",
    )  # fmt: skip
    for finding in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=finding.part.value, name=finding.name, time="0")
        if finding.status is Status.FAILS:
            failure = ElementTree.SubElement(case, "failure", message=finding.summary, type="deviation")
            failure.text = "\n".join(f"{name}: {plain_value(value)}" for name, value in finding.facts.items())
        elif _is_skipped(finding):
            ElementTree.SubElement(case, "skipped", message=f"{finding.status.value}: {finding.summary}")
        else:
            ElementTree.SubElement(case, "system-out").text = finding.summary
    return xml_text(suite)


def xml_text(element: ElementTree.Element) -> str:
    """A document. Characters that no XML can hold, as an engine may have written, are replaced by U+FFFD."""
    text = _FORBIDDEN.sub("\ufffd", ElementTree.tostring(element, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _is_skipped(finding: Finding) -> bool:
    return finding.status in (Status.NOT_ENOUGH, Status.DOES_NOT_APPLY)


def evidence_words(log10: float) -> str:
    """An e-value in words that stay short: 0.4, 250, 10^12."""
    return f"10^{log10:.0f}" if log10 >= 4.0 else f"{10.0**log10:.3g}"
