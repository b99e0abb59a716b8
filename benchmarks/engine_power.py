"""What a certificate of engines finds in how many tokens: each planted fault, and sound engines; counts, and no times.

    python benchmarks/engine_power.py [--only NAME ...] [--seeds 0] [--tokens 3000] [--unnamed] [--out FILE]

The engines of `tests/support/faulty_engines.py`, asked in process: once with the draft model named, once without. A
line of JSON for each run, written as soon as it is done; runs that the file has are passed over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for the engines

from common import RESULTS, Lines  # noqa: E402
from support.faulty_engines import FAULTS, SOUND, Planted, beginnings, embedded_models  # noqa: E402
from support.faulty_peer import FaultyPeer  # noqa: E402
from truedraft.certify import Report  # noqa: E402
from truedraft.certify.engines import certify_engine  # noqa: E402

OUT = RESULTS / "engine_power.jsonl"
_NO_TIME_LIMIT_S = 7200.0


def certified(planted: Planted, seed: int, tokens: int, *, knows_draft: bool) -> Report:
    """The certificate of one engine."""
    models = embedded_models()
    return certify_engine(
        FaultyPeer(planted, models),
        models.target,
        [list(prompt) for prompt in beginnings()],
        replace(planted.params, seed=seed, stop=(), max_tokens=128),
        rounded=embedded_models("bfloat16").target,
        drafts={"the draft model": planted.draft(models)} if knows_draft else None,
        tokens=tokens,
        seconds=_NO_TIME_LIMIT_S,
    )


def line_of(report: Report) -> dict[str, Any]:
    """What is recorded of a run: each check's evidence, when it was reached, and what was named."""
    found: dict[str, Any] = {
        "deviates": bool(report.failures),
        "faults": report.faults,
        "tokens_asked": report.facts["tokens"],
    }
    for finding in report.findings:
        if "tokens_until" in finding.facts:
            facts = finding.facts
            found[finding.part.value] = {
                "tokens": facts["tokens"],
                "log10_evidence": round(facts["log10_evidence"], 2),
                "until_1000": facts["tokens_until"]["1000"],
                "until_1000000": facts["tokens_until"]["1e+06"],
                "fault": facts["fault"],
                "parts": {name: round(value, 2) for name, value in facts["log10_of_parts"].items()},
                "best": facts["bets"][:2],
                "smallest_detectable_tv": round(facts["smallest_detectable_tv"], 3),
            }
    return found | {"failures": [finding.name for finding in report.failures], "allowance": report.facts["allowance"]}


def main() -> int:
    """Run all that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[each.name for each in (*FAULTS, *SOUND)])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--unnamed", action="store_true", help="only without the draft model named")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    kept = Lines(asked.out)
    done = {(line["engine"], line["seed"], line["knows_draft"], line["most_tokens"]) for line in kept.records}
    engines = [planted for planted in (*FAULTS, *SOUND) if planted.name in asked.only]
    for knows_draft, seed, planted in itertools.product((True, False)[asked.unnamed :], asked.seeds, engines):
        if (planted.name, seed, knows_draft, asked.tokens) in done:
            continue
        report = certified(planted, seed, asked.tokens, knows_draft=knows_draft)
        own = {"engine": planted.name, "sound": planted in SOUND, "seed": seed, "knows_draft": knows_draft}
        kept.add(own | {"most_tokens": asked.tokens, "took_s": round(report.seconds, 1)} | line_of(report))
        print(json.dumps(kept.records[-1]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
