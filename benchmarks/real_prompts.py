"""What drafters bring over plain decoding on four sets of questions: `truedraft bench`, a set and a temperature a line.

Behind the sets of a temperature comes a line with the geometric mean of their speed-ups and the least of them, of the
first drafter, and the means of all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from common import RESULTS, Lines, note

SETS = ("mt_bench", "humaneval", "gsm8k", "spec_bench")
TEMPERATURES = (0.0, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", nargs="+", default=["auto"])
    parser.add_argument("--raw", action="store_true", help="questions as they are, for a model without a chat template")
    parser.add_argument("--prompts", type=Path, required=True, help="a folder with a folder for each set")
    parser.add_argument("--limit", type=int, default=6, help="prompts of a set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "real_prompts.jsonl")
    options = parser.parse_args()
    lines = Lines(options.out)
    for temperature in TEMPERATURES:
        found = [measured(options, name, temperature) for name in SETS]
        for record in (*found, summary(found)):
            lines.add(record)


def measured(options: argparse.Namespace, name: str, temperature: float) -> dict[str, Any]:
    """The record of a set, without the list of decisions, which is most of it."""
    words = ["bench", "--model", options.model, "--prompts", str(options.prompts / name), "--json"]
    words += [*([] if options.raw else ["--chat"]), *(word for each in options.drafter for word in ("--drafter", each))]
    words += ["--limit", str(options.limit), "--max-tokens", str(options.max_tokens), "--temperature", str(temperature)]
    done = subprocess.run([sys.executable, "-m", "truedraft", *words], stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for system in record["systems"]:
        del system["decisions"]
    note(f"{name}, temperature {temperature:g}: {record['speedup']:.2f} times plain")
    return record


def summary(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found = list(records)
    ratios = [record["speedup"] for record in found]
    every = [{system["name"]: system["speedup"] for system in record["systems"]} for record in found]
    return {
        "model": found[0]["model"],
        "temperature": found[0]["sampling"]["temperature"],
        "sets": len(found),
        "geometric_mean_of_speedups": geometric_mean(ratios),
        "least": min(ratios),
        "by_system": {name: geometric_mean(each[name] for each in every) for name in every[0]},
    }


if __name__ == "__main__":
    main()
