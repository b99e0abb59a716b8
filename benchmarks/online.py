"""What drafters that learn while they serve (`truedraft.training.online`) bring where traffic changes.

    python benchmarks/online.py MODEL KIND:FOLDER[,option=value]... --old FILE --new FILE... --folder DIR

Questions of `--old` come one behind another, and after `--shift` requests those of `--new`; a learner trains the
drafter on a share of the time. Then every version that was served is measured on prompts that were not asked, of both
kinds: tokens for each target call, which hang on no machine's speed. Last, requests are timed with a learner and
without one, in turns, each in a process of its own. A file of questions is of HumanEval, GSM8K or another published
set, or has JSON lines with a "text" each, as of source files, whose beginning is asked to be continued.

What was done is in `--out` and `--folder`; a run that was broken off goes on behind it. The last line is a summary.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from common import RESULTS, Lines, ids_of, note
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.stats import Counters
from truedraft.drafters.specs import from_spec
from truedraft.machine import dtype_name, machine_facts
from truedraft.measure.bench.prompts import is_question_file, read_questions, spread
from truedraft.models.base import LanguageModel
from truedraft.training.online import Learner

_LONGEST = 900
"""Characters of a question."""
_TEMPERATURES = (0.0, 1.0)
_WARM = 4
"""Requests before a turn is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter", help="what learns, with how much it drafts")
    parser.add_argument("--old", type=Path, nargs="+", required=True, help="questions that are asked first")
    parser.add_argument("--new", type=Path, nargs="+", required=True, help="questions behind them, each file in turn")
    parser.add_argument("--folder", type=Path, required=True, help="for versions")
    parser.add_argument("--shift", type=int, default=200, help="requests of the old kind")
    parser.add_argument("--requests", type=int, default=500, help="requests of the new kind")
    parser.add_argument("--held-out", type=int, default=32, help="prompts of each kind that are measured on")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.05, help="of the time, for learning")
    parser.add_argument("--turns", type=int, default=4, help="pairs of timed runs; 0 leaves them out")
    parser.add_argument("--timed", type=int, default=60, help="requests of a timed run")
    parser.add_argument("--out", type=Path, default=RESULTS / "online.jsonl")
    parser.add_argument("--one-turn", choices=("with", "without"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = load_model(options.model)
    kinds = {"old": encoded(target, options.old), "new": encoded(target, options.new)}
    held = {name: spread(prompts, options.held_out) for name, prompts in kinds.items()}
    asked = {name: [each for each in prompts if each not in held[name]] for name, prompts in kinds.items()}
    if options.one_turn:
        print(json.dumps(timed(options, target, asked["new"], options.one_turn == "with")))
        return
    lines = Lines(options.out, model=target.name, drafter=options.drafter, folder=options.folder.name)
    traffic = next((each for each in lines.records if each["what"] == "traffic"), None)
    if traffic is None:
        lines.add(asked_in_turn(options, target, asked))
        traffic = lines.records[-1]
    for version in sorted({0, *traffic["versions"]}):
        if not any(each["what"] == "version" and each["version"] == version for each in lines.records):
            lines.add({"what": "version", "version": version, **measured(options, target, held, version)})
    for turn in range(sum(each["what"] == "turn" for each in lines.records), options.turns):
        order = ("with", "without") if turn % 2 else ("without", "with")
        lines.add({"what": "turn", "turn": turn, **{kind: one_turn(kind) for kind in order}})
    lines.add(summary(lines.records, traffic))
    print(json.dumps(lines.records[-1], indent=1))


def encoded(target: LanguageModel, files: Sequence[Path]) -> list[list[int]]:
    sets = [texts_in(file) for file in files]
    places = range(max(map(len, sets)))
    return ids_of(target, [each[place][:_LONGEST] for place in places for each in sets if place < len(each)])


def texts_in(path: Path) -> list[str]:
    if is_question_file(path) or path.is_dir():
        return [each.text for each in read_questions(path)[1]]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"Continue this file:\n\n{text}" for text in texts if len(text) > _LONGEST]


def asked_in_turn(
    options: argparse.Namespace, target: LanguageModel, asked: dict[str, list[list[int]]]
) -> dict[str, Any]:
    """Serve all requests, one behind another, and keep each version that is served."""
    shutil.rmtree(options.folder, ignore_errors=True)
    learner = Learner(options.folder, share=options.share)
    engine = Engine(target, from_spec(options.drafter, target), controller="fixed", learner=learner, entropy=1)
    prompts = [*islice(cycle(asked["old"]), options.shift), *islice(cycle(asked["new"]), options.requests)]
    versions: list[int] = []
    calls: list[tuple[int, int]] = []
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        stats = engine.generate(prompt, params_of(options, number)).stats
        version = learner.status.version
        if version not in (0, *versions):
            kept = options.folder / engine.drafter.name / "versions" / str(version)
            shutil.copytree(kept, options.folder / "kept" / str(version))
        versions.append(version)
        calls.append((stats.emitted_tokens + stats.stop_tokens, stats.target_calls))
        if number % 20 == 19:
            note(f"{number + 1} requests, version {version}, {learner.status}")
    status = learner.status
    learner.close()
    how = {name: getattr(options, name) for name in ("shift", "requests", "max_tokens", "share")}
    how |= {name: getattr(status, name) for name in ("promotions", "rollbacks", "trials", "time_share", "failures")}
    about = {"machine": machine_facts(), "dtype": dtype_name(target.dtype), "seconds": time.monotonic() - began}
    return {"what": "traffic", **how, **about, "versions": versions, "tokens_and_calls": calls}


def params_of(options: argparse.Namespace, number: int) -> SamplingParams:
    return SamplingParams(options.max_tokens, temperature=_TEMPERATURES[number % len(_TEMPERATURES)])


def measured(
    options: argparse.Namespace, target: LanguageModel, held: dict[str, list[list[int]]], version: int
) -> dict[str, Any]:
    """Tokens for each call of a version on prompts of both kinds."""
    spec = options.drafter
    if version:
        kind, more = re.fullmatch(r"([^:,]*)[^,]*(.*)", spec).groups()
        spec = f"{kind}:{options.folder / 'kept' / str(version)}{more}"
    drafter = from_spec(spec, target)
    found: dict[str, Any] = {}
    for temperature in _TEMPERATURES:
        engine = Engine(target, drafter, controller="fixed", entropy=2)
        for name, prompts in held.items():
            counted = [each.stats for each in engine.generate(prompts, SamplingParams(options.max_tokens, temperature))]
            total = sum(counted, Counters())
            found[f"{name} at {temperature:g}"] = total.mean_acceptance_length
            found[f"{name} at {temperature:g}, each"] = [
                [each.emitted_tokens + each.stop_tokens, each.target_calls] for each in counted
            ]
    note(f"version {version}: { ({name: each for name, each in found.items() if isinstance(each, float)}) }")
    return found


def timed(options: argparse.Namespace, target: LanguageModel, prompts: list[list[int]], learns: bool) -> float:
    learner = Learner(share=options.share) if learns else None
    engine = Engine(target, from_spec(options.drafter, target), controller="fixed", learner=learner, entropy=3)
    tokens, began = 0, 0.0
    for number, prompt in enumerate(islice(cycle(prompts), options.timed + _WARM)):
        if number == _WARM:
            tokens, began = 0, time.perf_counter()
        tokens += len(engine.generate(prompt, params_of(options, number)).token_ids)
    return tokens / (time.perf_counter() - began)


def one_turn(kind: str) -> float:
    """Tokens a second of a process of its own, by this one's arguments."""
    words = [sys.executable, *sys.argv, "--one-turn", kind]
    found = float(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    note(f"{kind} a learner: {found:.1f} tokens a second")
    return found


def summary(records: Sequence[dict[str, Any]], traffic: dict[str, Any]) -> dict[str, Any]:
    by_version = {each["version"]: each for each in records if each["what"] == "version"}
    first, last = by_version[0], by_version[traffic["versions"][-1]]
    names = [name for name, each in first.items() if isinstance(each, float)]
    ratios = {name: gain(first, last, name) for name in names}
    old = [name for name in names if name.startswith("old")]
    least = min(
        (gain(first, each, name) for each in by_version.values() for name in old), key=lambda each: each["value"]
    )
    turns = [each["with"] / each["without"] for each in records if each["what"] == "turn"]
    found = {"last_of_first": ratios, "least_of_old": least, "promotions": traffic["promotions"]}
    return {"what": "summary", **found, "speed_with_learning": geometric_mean(turns) if turns else None, "turns": turns}


def gain(first: dict[str, Any], last: dict[str, Any], name: str) -> dict[str, float]:
    """Tokens per call by one version over those by another, with 95 % over prompts (bootstrap of pairs)."""
    before, after = (np.array(each[f"{name}, each"], dtype=float) for each in (first, last))
    drawn = np.random.default_rng(0).integers(len(before), size=(4000, len(before)))
    (before_tokens, before_calls), (after_tokens, after_calls) = (each[drawn].sum(1).T for each in (before, after))
    low, high = np.quantile(after_tokens / after_calls * before_calls / before_tokens, (0.025, 0.975))
    return {"value": last[name] / first[name], "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
