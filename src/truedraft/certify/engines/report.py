"""The report on an engine that was asked: with which options, what of its answers could be used, what it all means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from truedraft.certify.checks import Finding, Status
from truedraft.certify.e_process import ALARM, CERTAIN
from truedraft.certify.engines.asked import AskedEngine
from truedraft.certify.report import Report, option_words
from truedraft.core.params import SamplingParams
from truedraft.peers import PeerFacts


def engine_report(
    findings: Sequence[Finding], asked: Sequence[AskedEngine], params: SamplingParams, seconds: float, **more: Any
) -> Report:
    """What came of an engine.

    Args:
        findings: all checks, part by part.
        asked: the engine, asked; then what it was compared with.
        params: the options that were checked.
        seconds: that it took.
        more: further facts for the record.
    """
    engine, together = asked[0].peer.facts, asked[0].together
    tokens = sum(each.tokens for each in asked)
    dropped, unsure = (sum((getattr(each, name) for each in asked), Counter[str]()) for name in ("dropped", "unsure"))
    options = [f"{engine.name} {engine.version}".strip(), *option_words(params)]
    facts = {
        "engine": facts_of(engine) | {"filters": list(engine.filters)},
        "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
        "together": together, "tokens": tokens, "dropped": dict(dropped), "unsure": dict(+unsure), **more,
    }  # fmt: skip
    return Report(
        "Certificate of an engine",
        findings,
        ", ".join([*options, f"{together} together", f"{tokens:,} tokens"]),
        _notes(findings, dropped.total(), unsure.total()),
        facts,
        seconds=seconds,
    )


def facts_of(engine: PeerFacts) -> dict[str, Any]:
    """What is known of an engine, for the record."""
    return {"name": engine.name, "version": engine.version, **engine.more}


def _notes(findings: Sequence[Finding], dropped: int, unsure: int) -> list[str]:
    notes = [
        f"A sound engine reaches evidence of {ALARM:g} in any one check with probability {1.0 / ALARM:g} at most, "
        "whenever one looks; what would have been found stands in the lines.",
        "It holds for these options, this version and these prompts, as far as was tested here.",
    ]
    if any(finding.status is Status.FAILS for finding in findings):
        again = "and comes back in another run, with other seeds"
        notes.insert(1, f"Call it a fault where the evidence reaches {CERTAIN:g} {again}.")
    if any(finding.status is Status.NOT_ENOUGH for finding in findings):
        notes.append("Where the evidence is not enough, give more --minutes or --tokens.")
    if dropped or unsure:
        notes.append(
            f"{dropped} answers were dropped, which evidence paid for, and the token ids of {unsure} read from their "
            "text, by which nothing is called a fault."
        )
    return notes
