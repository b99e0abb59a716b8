"""Certificates for other engines over the embedded target: `make certify-peers`.

    python benchmarks/certify_peers.py [--engines vllm ...] [--minutes 5] [--out FILE]
    python benchmarks/certify_peers.py --cell "vllm | draft model | 0.8 | 1 | batch 1" --again
    python benchmarks/certify_peers.py --report

Every engine, way of drafting, temperature, top-p and number of requests at once is a cell: one line of JSON, written as
soon as it is done; a rerun goes on behind them. Cells whose engine failed are tried again, and those that had less time
and saw too little. Where the evidence against an engine is large a cell is repeated with other seeds, and called a
deviation only if both reach 10^6.
Exit status 0 if no engine deviates, 1 if one does, 3 if a cell could not be finished.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines, heldout_ids, note
from peers_engines import EngineWay, Running, engine_ways, model_folder
from truedraft import SamplingParams, load_model
from truedraft.certify.engines import CERTAIN, certify_engine
from truedraft.errors import TruedraftError
from truedraft.machine import machine_facts
from truedraft.models.base import LanguageModel

SAMPLING = ((0.0, 1.0), (0.8, 1.0), (1.0, 1.0), (0.8, 0.9))
"""Temperatures, each with a top-p."""
PROMPT_TOKENS = 48
ANSWER_TOKENS = 24
OTHER_SEEDS = 1_000_000
NOT_ENOUGH = "not enough evidence"
TOKENS = 8000
"""So many are needed to see what the certificate wants to be seen, where logits are rounded to bfloat16."""


@dataclass(frozen=True)
class Cell:
    engine: str
    way: str
    temperature: float
    top_p: float
    batch: int

    @property
    def key(self) -> str:
        return f"{self.engine} | {self.way} | {self.temperature:g} | {self.top_p:g} | batch {self.batch}"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=ANSWER_TOKENS, temperature=self.temperature, top_p=self.top_p)


def cells(way: EngineWay) -> Iterator[Cell]:
    for batch, (temperature, top_p) in itertools.product(way.batches, SAMPLING):
        yield Cell(way.engine, way.way, temperature, top_p, batch)


@dataclass(frozen=True)
class Effort:
    minutes: float
    tokens: int
    seed: int


def main() -> int:
    asked = _asked()
    torch.set_num_threads(asked.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    kept = Lines(asked.out)
    ways = [way for way in engine_ways() if way.engine in asked.engines]
    todo = [(way, [cell for cell in cells(way) if _wanted(cell, asked, kept.cells.get(cell.key))]) for way in ways]
    left = [cell.key for _, several in todo for cell in several]
    if asked.cell is not None and not left:
        note(f"there is no cell {asked.cell!r} left; --list shows all, --again repeats one")
        return 2
    if asked.report or asked.list:
        print("\n".join(table(list(kept.cells.values())) if asked.report else left))
        return 0
    bench, effort = Bench.load(), Effort(asked.minutes, asked.tokens, asked.seed)
    for way, several in todo:
        for line in certified(way, several, bench, effort):
            kept.add(line)
            note(f"{line['cell']}: {line['verdict']}")
    made = [kept.cells[key] for key in left if key in kept.cells]
    if any(line["verdict"] == "deviates" for line in made):
        return 1
    return 3 if any("error" in line for line in made) else 0


def _wanted(cell: Cell, asked: argparse.Namespace, line: Mapping[str, Any] | None) -> bool:
    """Whether a cell has no verdict; or "not enough evidence", of less time than now."""
    if asked.cell not in (None, cell.key):
        return False
    if asked.again or line is None or "error" in line:
        return True
    return bool(line["verdict"] == NOT_ENOUGH and line["minutes"] < asked.minutes)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(way.engine for way in engine_ways()))
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--cell", help="only this one")
    parser.add_argument("--again", action="store_true", help="cells that have a verdict too")
    parser.add_argument("--list", action="store_true", help="name the cells that are left")
    parser.add_argument("--report", action="store_true", help="print what the file has as a table in Markdown")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each run of a cell")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run of a cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "certify_peers.jsonl")
    return parser.parse_args()


@dataclass(frozen=True)
class Bench:
    """What engines are judged by."""

    target: LanguageModel  # the exported target's own weights, computed in float32
    rounded: LanguageModel  # the same in bfloat16, as engines hold them
    drafts: Mapping[str, LanguageModel]  # draft models that they have, by what they are called
    prompts: Sequence[Sequence[int]]  # token ids

    @classmethod
    def load(cls) -> Bench:
        target, rounded = (load_model(model_folder("target"), dtype=dtype) for dtype in ("float32", "bfloat16"))
        draft = load_model(model_folder("draft"), dtype="float32")
        return cls(target, rounded, {"the draft model": draft}, heldout_ids(target, PROMPT_TOKENS))


def certified(way: EngineWay, several: Iterable[Cell], bench: Bench, effort: Effort) -> Iterator[dict[str, Any]]:
    """Certify cells of one way of answering; an engine that died is started again for the next cell."""
    left = list(several)
    while left:
        running = None
        try:
            with way.open(bench.target) as running:
                while left:
                    line = certificate(left.pop(0), running, bench, effort)
                    yield line
                    if "error" in line:
                        running.check()
        except TruedraftError as error:
            note(str(error))
            if running is None:
                yield from (record(cell, "could not be started", error=str(error)) for cell in left)
                return


def certificate(cell: Cell, running: Running, bench: Bench, effort: Effort) -> dict[str, Any]:
    """One certificate, made twice where the first run speaks against the engine."""
    runs: list[dict[str, Any]] = []
    began = time.perf_counter()
    try:
        for seed in (effort.seed, effort.seed + OTHER_SEEDS):
            peer = running.peer(cell.batch, seed)
            params = replace(cell.params, seed=seed if "seed" in peer.facts.takes else None)
            report = certify_engine(
                peer, bench.target, bench.prompts, params, rounded=bench.rounded,
                drafts=bench.drafts, together=cell.batch, seconds=60.0 * effort.minutes, tokens=effort.tokens,
            )  # fmt: skip
            runs.append({"seed": seed, **report.as_dict()})
            note(f"{cell.key}, seed {seed}: {report.verdict}")
            if not report.failures:
                break
    except TruedraftError as error:
        return record(cell, "failed", error=str(error), command=running.command, runs=runs)
    last = runs[-1]
    found = [each["smallest_detectable_tv"] for each in last["findings"] if "smallest_detectable_tv" in each]
    return record(
        cell, verdict(runs), version=peer.facts.version, filters=list(peer.facts.filters), command=running.command,
        evidence=[run["evidence"] for run in runs], faults=last["faults"], failures=last["failures"],
        tokens=[run["tokens"] for run in runs], allowance=last["allowance"], minutes=effort.minutes,
        took_s=round(time.perf_counter() - began, 1), runs=runs, machine=machine_facts(),
        **({"smallest_detectable_tv": found[0]} if found else {}),
    )  # fmt: skip


def verdict(runs: Sequence[dict[str, Any]]) -> str:
    """A deviation is one that is certain and repeats."""
    if all(run["evidence"] >= CERTAIN for run in runs):
        return "deviates"
    if any(run["failures"] for run in runs):
        return "suspicious: not certain twice"
    return NOT_ENOUGH if runs[-1]["undecided"] else "no deviation found"


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = [f"T {heat:g}" + (f", top-p {top_p:g}" if top_p < 1.0 else "") for heat, top_p in SAMPLING]
    yield f"| engine | | batch | {' | '.join(heads)} |"
    yield "|---|---|---|" + "---|" * len(heads)
    found = {(line["engine"], line["way"], line["batch"], line["temperature"], line["top_p"]): line for line in lines}
    for engine, way, batch in dict.fromkeys(key[:3] for key in found):
        own = [found.get((engine, way, batch, *sampling)) for sampling in SAMPLING]
        version = next((line["version"] for line in own if line and line.get("version")), "")
        yield f"| {engine} {version} | {way} | {batch} | " + " | ".join(map(in_short, own)) + " |"


def in_short(line: dict[str, Any] | None) -> str:
    """A cell of the table: a deviation with the evidence of both runs, else what would have been found."""
    if line is None:
        return ""
    if "error" in line:
        return "failed"
    if line["verdict"] == "deviates":
        return "**deviates**, " + ", ".join(f"10^{math.log10(each):.0f}" for each in line["evidence"])
    if line["verdict"].startswith("suspicious"):
        return f"suspicious: {', '.join(line['failures'])}"
    if not line["temperature"]:
        return "none found"
    return f"none found, {line['smallest_detectable_tv']:.3f}"


def record(cell: Cell, words: str, **more: Any) -> dict[str, Any]:
    again = f"python benchmarks/certify_peers.py --cell {shlex.quote(cell.key)} --again"
    return {"cell": cell.key, **asdict(cell), "verdict": words, "reproduce": again, **more}


if __name__ == "__main__":
    sys.exit(main())
