"""How large the planted faults of `tests/support/faulty_engines.py` are, computed from the known stack; no times.

Each engine answers the beginnings of the held-out files, and the distribution that each of its tokens was emitted from
is held against the target's. Where no distribution is at fault but stop texts, it is the share of answers that end in
another place than they should. Writes one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for the engines

from support.faulty_engines import FAULTS, Planted, Size, beginnings, embedded_models, named  # noqa: E402
from support.faulty_peer import FaultyPeer  # noqa: E402
from truedraft.peers.asking import Question, Reply  # noqa: E402

_ROUNDS = 2
_DIGITS = 4


def of_tokens(fault: Planted) -> dict[str, Any]:
    """The size of a fault of distributions: mean total variation of tokens that it can touch, and of all."""
    seen = fault.seen(embedded_models(), rounds=_ROUNDS)
    assert fault.law is not None
    size = Size.of(fault, seen, fault.law(seen, fault.params))
    return {
        "tokens": size.tokens,
        "share_touched": round(size.touched, _DIGITS),
        "total_variation_touched": round(size.over_touched, _DIGITS),
        "total_variation": round(size.over_all, _DIGITS),
    }


def of_ends(fault: Planted) -> dict[str, Any]:
    """The share of answers that end elsewhere than a sound engine's of the same seeds."""
    params = [replace(fault.params, seed=seed) for seed in range(len(beginnings()))]
    questions = [Question(*each) for each in zip(beginnings(), params, strict=True)]
    right, wrong = (FaultyPeer(engine).ask(questions) for engine in (named("draft"), fault))
    pairs = [(a, b) for a, b in zip(right, wrong, strict=True) if isinstance(a, Reply) and isinstance(b, Reply)]
    differing = sum((a.token_ids, a.text) != (b.token_ids, b.text) for a, b in pairs)
    return {"answers": len(pairs), "total_variation": round(differing / len(pairs), _DIGITS)}


def main() -> None:
    """Measure all of them and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planted_faults.jsonl")
    out: Path = parser.parse_args().out
    lines = []
    for fault in FAULTS:
        options = {"temperature": fault.params.temperature, "top_p": fault.params.top_p}
        options |= {"stop": list(fault.params.stop)} if fault.params.stop else {}
        found = of_ends(fault) if fault.law is None else of_tokens(fault)
        lines.append(json.dumps({"fault": fault.name, **options, **found}))
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
