"""Drafting while the target verifies, against the same draft in turn with it: `python benchmarks/parallel_draft.py`.

    python benchmarks/parallel_draft.py [--sizes own 110M 500M] [--prompts 6] [--rounds 3]
                                        [--draft embedded:draft] [--out FILE]

For each cost of the target (its own, and padded to larger models: three ratios of draft to target) and for greedy,
sampled and seeded requests: `draft` and `draft,async=1` answer each prompt in turns, four tokens drafted at every
step. Both give the same tokens, which is checked; so the ratio of their times is what async brings. Beside it: the
share of proposals that had been drafted ahead, what a forward of the target takes (which the other process slows
down, for it takes a core), what drafting takes, and the processor time of the other process. `--draft` names a dearer
draft, such as `embedded:target` for a padded one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.stats import StepRecord
from truedraft.embedded import heldout_prompts_file
from truedraft.machine import describe_machine
from truedraft.models.base import LanguageModel

OUT = Path(__file__).parent / "results" / "parallel_draft.json"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, seeded": {"temperature": 0.8, "seed": 1},
}


class Timed:
    """An engine, what its answers took, and the parts of their steps.

    Args:
        target: that answers.
        drafter: by its words; None is plain decoding.
    """

    def __init__(self, target: LanguageModel, drafter: str | None) -> None:
        self.engine = Engine(target, drafter, controller="fixed", entropy=1)
        self.steps: list[StepRecord] = []
        self.engine.listeners.append(self.steps.append)
        self.seconds: list[float] = []

    def answer(self, prompt: str, params: SamplingParams) -> list[int]:
        """Answer a prompt; returns the tokens."""
        began = time.perf_counter()
        tokens = self.engine.generate(prompt, params).token_ids
        self.seconds.append(time.perf_counter() - began)
        return tokens

    def forget(self) -> None:
        """What was answered so far was a warm-up."""
        self.steps.clear()
        self.seconds.clear()

    def ms(self, part: str) -> float:
        """Of a part of a step, `draft_s` or `target_s`: the median over those that judged a chain."""
        return 1e3 * statistics.median(getattr(step, part) for step in self.steps if not step.prefill and step.nodes)


def compared(target: LanguageModel, draft: str, prompts: list[str], rounds: int, way: str) -> dict[str, Any]:
    """One row: both ways to draft, and plain decoding, in turns over prompts.

    Args:
        target: that answers.
        draft: the word of the draft, with async=1.
        prompts: to answer.
        rounds: how often each is answered.
        way: one of `WAYS`.
    """
    params = SamplingParams(max_tokens=64, **WAYS[way])
    plain = Timed(target, None)
    turns = Timed(target, draft.partition(",")[0])
    ahead = Timed(target, draft)
    for each in (plain, turns, ahead):
        each.answer(prompts[0], params)
        each.forget()
    before = dict(ahead.engine.drafter.report)
    for number in range(rounds):
        for prompt in prompts:
            plain.answer(prompt, params)
            pair = (turns, ahead) if number % 2 == 0 else (ahead, turns)
            if pair[0].answer(prompt, params) != pair[1].answer(prompt, params):
                raise SystemExit(f"async changed an answer: {way}, prompt {prompt[:40]!r}")
    report = ahead.engine.drafter.report
    ratios = [a / b for a, b in zip(turns.seconds, ahead.seconds, strict=True)]
    return {
        "way": way,
        "speedup_of_async": statistics.geometric_mean(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "draft_over_plain": sum(plain.seconds) / sum(turns.seconds),
        "async_over_plain": sum(plain.seconds) / sum(ahead.seconds),
        "ahead_hit_rate": report["ahead_hit_rate"],
        "target_ms": turns.ms("target_s"),
        "target_ms_async": ahead.ms("target_s"),
        "draft_ms": turns.ms("draft_s"),
        "draft_ms_async": ahead.ms("draft_s"),
        "process_cpu_share": (report["process_cpu_s"] - before["process_cpu_s"]) / sum(ahead.seconds),
        "ahead_cpu_share": (report["ahead_cpu_s"] - before["ahead_cpu_s"]) / sum(ahead.seconds),
    }


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["own", "110M", "500M"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="embedded:draft")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["text"]) for line in lines[: asked.prompts]]
    draft = f"draft:{asked.draft},async=1"
    rows = []
    for size in asked.sizes:
        target = load_model("embedded:target", pad_to=None if size == "own" else size)
        for way in asked.ways:
            rows.append({"size": size} | compared(target, draft, prompts, asked.rounds, way))
            print(json.dumps(rows[-1]), flush=True)
        del target
    found = {"machine": describe_machine("cpu"), "draft": draft, "prompts": asked.prompts, "rows": rows}
    asked.out.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
