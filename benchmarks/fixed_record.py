"""A fixed record of what the embedded models answer: tokens and counts for every drafter, rule and way to sample.

A change that promises the same behaviour writes the record before and is compared with it afterwards:

    python benchmarks/fixed_record.py --write FILE
    python benchmarks/fixed_record.py --against FILE [--only WORD]

Tokens are kept as hashes. Greedy and coupled answers, those to requests with a seed, are functions of model, prompt and
seed alone; those of other sampled requests also of the keys of the noise, which are fixed here. All depend on the
processor's kernels, so a record is for one kind of machine, and says for which. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from truedraft import Engine, SamplingParams, load_model
from truedraft.engine.answer import Answer
from truedraft.engine.policy import FixedBudget
from truedraft.errors import IncompatibleRuleError, OptionError

DRAFTERS = (
    "none",
    "prompt-lookup",
    "draft",
    "draft,num_speculative_tokens=4",
    "draft,branching=2-2-1",
    "medusa",
    "medusa,nodes=8",
    "redrafter",
    "redrafter,beams=4,length=4,nodes=8",
    "redrafter,beams=4,length=4,nodes=8,sampled=true",
)
RULES = ("speculative", "block", "speculative,lenience=0.5", "typical")
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9, "coupled": True},
    {"temperature": 1.0, "coupled": True},
)
PROMPTS = (
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "class Stack:\n    def push(self, item):",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "from collections import deque\n\n# A queue of jobs\n",
    "for name in sorted(names):\n    print(name, names[name])\nfor name in",
    '"""Read a file line by line."""\n\nimport io\n\nwith open(path) as file:\n',
    "def test_addition(self):\n    self.assertEqual(1 + 1, 2)\n\ndef test_",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9]\ny = [",
)
_TOKENS = 40
COUNTS = (
    "target_calls",
    "prefill_calls",
    "draft_tokens",
    "accepted_tokens",
    "emitted_tokens",
    "prefill_tokens",
    "accepted_per_position",
    "tried_per_position",
    "recoveries",
    "stop_tokens",
)


def answers_of(engine: Engine, options: dict[str, Any], batch: int) -> list[Answer]:
    """Answers to the prompts, so many asked together, their noise keyed by the prompt's number."""
    others, asked = {name: value for name, value in options.items() if name != "coupled"}, list(enumerate(PROMPTS, 100))
    answers = []
    for first in range(0, len(asked), batch):
        requests = []
        for key, prompt in asked[first : first + batch]:
            seed = key if options.get("coupled") else None
            requests.append(engine.prepare(prompt, SamplingParams(max_tokens=_TOKENS, seed=seed, **others)))
            requests[-1].noise_seed = key
            engine.enqueue(requests[-1])
        while engine.step():
            pass
        answers += [request.pieces[-1].answer for request in requests]
    return answers


def facts(answers: Sequence[Answer]) -> dict[str, Any]:
    stats = sum((answer.stats for answer in answers[1:]), answers[0].stats)
    divergence = (stats.mean_total_variation, stats.mean_kl)
    return {
        "tokens": [hashlib.sha256(repr(answer.token_ids).encode()).hexdigest()[:12] for answer in answers],
        "reasons": "".join(answer.finish_reason[0] for answer in answers),
        "stats": {name: getattr(stats, name) for name in COUNTS},
        "divergence": [None if each is None else round(each, 6) for each in divergence],
        "warnings": sorted({warning for answer in answers for warning in answer.warnings}),
    }


def record(only: str) -> Iterator[tuple[str, Any]]:
    target = load_model("embedded:target", dtype="float32")
    for drafter, rule in itertools.product(DRAFTERS, RULES):
        try:
            engine = Engine(target, drafter, rule, controller=FixedBudget())
        except IncompatibleRuleError as error:
            if only in f"{drafter} | {rule}":
                yield f"{drafter} | {rule}", f"refused: {type(error).__name__}"
            continue
        for options, batch in itertools.product(SAMPLING, (1, 8)):
            words = " ".join(f"{name}={value}" for name, value in options.items())
            case = f"{drafter} | {rule} | {words} | batch {batch}"
            if only not in case:
                continue
            try:
                yield case, facts(answers_of(engine, options, batch))
            except OptionError as error:  # a seed promises what a lossy rule does not keep
                yield case, f"refused: {type(error).__name__}"


def differences(before: Any, what: Any) -> str:
    if not isinstance(before, dict) or not isinstance(what, dict):
        return f"{before} before, {what} now"
    return ", ".join(name for name in what if before[name] != what[name])


def machine() -> str:
    """What the numbers depend on beside the code."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    asked = parser.parse_args()
    if (asked.write is None) == (asked.against is None):
        parser.error("give --write FILE or --against FILE")
    if asked.write:
        cases = dict(record(asked.only))
        lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(what)}" for case, what in cases.items())
        asked.write.write_text(f'{{"machine": {json.dumps(machine())}, "cases": {{\n{lines}\n}}}}\n')
        print(f"{len(cases)} cases written to {asked.write}")
        return 0
    kept = json.loads(asked.against.read_text())
    if kept["machine"] != machine():
        print(f"the record is from {kept['machine']}, this is {machine()}: sampled answers may differ by rounding")
    wanted = {case: what for case, what in kept["cases"].items() if asked.only in case}
    found, different = 0, 0
    for case, what in record(asked.only):
        found += 1
        if (before := wanted.get(case)) != what:
            different += 1
            print(f"DIFFERENT {case}: {differences(before, what)}")
    missing = len(wanted) - found
    print(f"{found} cases compared, {different} different" + (f", {missing} missing" if missing else ""))
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main())
