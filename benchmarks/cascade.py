"""Cascades beside the drafters that they are made of, at several costs of the target: `python benchmarks/cascade.py`.

    python benchmarks/cascade.py [--pad-to own 110M 500M] [--prompts 4] [--tokens 64] [--out FILE]

Each prompt of held-out code is answered by plain decoding and by every drafter in turns, greedily and at temperature
0.8, all by the default controller; a speed-up is over plain decoding of the same prompt, prompt included. `draft_cost`
is a forward of the draft model over one of the target's: the cost ratio. `tokens_per_call` is at fixed length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from truedraft import Engine, SamplingParams, load_model
from truedraft.costs import StepCosts
from truedraft.drafters import from_spec
from truedraft.embedded import heldout_prompts_file
from truedraft.machine import describe_machine
from truedraft.models.base import LanguageModel

OUT = Path(__file__).parent / "results" / "cascade.json"
OWN = "own"
"""The embedded target as it is."""
TEMPERATURES = (0.0, 0.8)
DRAFTERS = (
    "draft,num_speculative_tokens=12",
    "prompt-lookup",
    "self:int4,num_speculative_tokens=8",
    "cascade(prompt-lookup;draft),num_speculative_tokens=12",
    "cascade(draft;self:int4),num_speculative_tokens=12",
    "cascade(prompt-lookup;self:int4),num_speculative_tokens=12",
)


def tokens_per_call(target: LanguageModel, spec: str, prompts: list[str], params: SamplingParams) -> float:
    """With as long drafts as the options allow."""
    engine = Engine(target, from_spec(spec, target), controller="fixed")
    stats = [engine.generate(prompt, params).stats for prompt in prompts]
    return sum(each.emitted_tokens for each in stats) / sum(each.target_calls for each in stats)


def speedups(target: LanguageModel, prompts: list[str], params: SamplingParams) -> dict[str, Any]:
    """Of whole answers, medians over prompts."""
    engines = {"plain": Engine(target)} | {spec: Engine(target, spec) for spec in DRAFTERS}
    for engine in engines.values():
        engine.generate(prompts[0], params)
    ratios: dict[str, list[float]] = {spec: [] for spec in DRAFTERS}
    for prompt in prompts:
        seconds = {}
        for spec, engine in engines.items():
            began = time.perf_counter()
            engine.generate(prompt, params)
            seconds[spec] = time.perf_counter() - began
        for spec, own in ratios.items():
            own.append(seconds["plain"] / seconds[spec])
    return {
        spec: {"speedup": statistics.median(own), "least": min(own), "most": max(own)} for spec, own in ratios.items()
    }


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pad-to", nargs="+", default=[OWN, "110M", "500M"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["text"]) for line in lines[: asked.prompts]]
    draft = StepCosts(load_model("embedded:draft")).forwards()
    found: dict[str, Any] = {"machine": describe_machine("cpu"), "prompts": asked.prompts, "tokens": asked.tokens}
    found["temperatures"] = TEMPERATURES
    for size in asked.pad_to:
        target = load_model("embedded:target", pad_to=None if size == OWN else size)
        own: dict[str, Any] = {"draft_cost": draft(1, [256]) / StepCosts(target).forwards()(1, [256])}
        for temperature in TEMPERATURES:
            params = SamplingParams(max_tokens=asked.tokens, temperature=temperature)
            of_all = speedups(target, prompts, params)
            for spec in DRAFTERS:
                of_all[spec]["tokens_per_call"] = tokens_per_call(target, spec, prompts, params)
            own[f"temperature {temperature:g}"] = of_all
        found[size] = own
        print(json.dumps({size: own}, indent=1), flush=True)
        asked.out.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
