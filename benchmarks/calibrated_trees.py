"""What calibrated survival brings: tokens per target call of several ways to draft, in the engine, on held-out prompts.

`python -m benchmarks.calibrated_trees --out FILE` measures the embedded heads, on the shipped prompts. With `--english
RUN` also those of `recipes.english`, on prompts of its held-out text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Drafter, Medusa, Redrafter
from truedraft.drafters.heads.calibration import FACT
from truedraft.drafters.heads.guess_trees import FixedTrees, LikeliestTrees
from truedraft.embedded import embedded_heads
from truedraft.heads import MedusaHeads, RedrafterHead
from truedraft.machine import describe_machine
from truedraft.models.loading import load_model
from truedraft.training.evaluate import count_answers
from truedraft.training.medusa import MedusaTrainingConfig
from truedraft.training.texts.data import read_texts
from truedraft.training.texts.prompts import shipped_prompts, split_prompts
from truedraft.training.texts.tokenizer import load_tokenizer

BUDGETS, TEMPERATURES = (8, 32), (0.0, 1.0)


def ways(medusa: Path, redrafter: Path, nodes: int) -> Iterator[tuple[str, str, Drafter]]:
    """Kind of heads, way to draft, drafter."""
    kept = MedusaHeads.load(medusa)
    count = kept.config.heads
    chain = RankTree(tuple((0,) * depth for depth in range(1, count + 1)))
    yield "medusa", "calibrated", Medusa(kept, nodes=nodes)
    yield "medusa", "raw", Medusa(kept, LikeliestTrees(count), nodes=nodes)
    yield "medusa", "counted", Medusa(kept, FixedTrees(kept.record.trees), nodes=nodes)
    yield "medusa", "chain", Medusa(kept, {"greedy": chain}, nodes=count)
    found = RedrafterHead.load(redrafter)
    raw: Mapping[str, Any] = {name: fact for name, fact in found.record.facts.items() if name != FACT}
    for way, facts, beams in (("calibrated", found.record.facts, nodes), ("raw", raw, nodes), ("chain", raw, 1)):
        yield (
            "redrafter",
            way,
            Redrafter(found.with_record(replace(found.record, facts=facts)), beams=beams, nodes=nodes, sampled=False),
        )


def measure(name: str, target: str, prompts: list[list[int]], heads: tuple[Path, Path]) -> Iterator[dict[str, Any]]:
    """A record for each way, number of nodes and temperature."""
    model = load_model(target)
    for temperature in TEMPERATURES:
        for nodes in BUDGETS:
            for kind, way, drafter in ways(*heads, nodes):
                stats = count_answers(model, drafter, prompts, temperature)
                found = {"target": name, "heads": kind, "way": way, "nodes": nodes, "temperature": temperature}
                found |= {"tokens_per_call": stats.mean_acceptance_length, "target_calls": stats.target_calls}
                print(found, flush=True)
                yield found


def main() -> None:
    """Measure, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--english", type=Path, help="the run of recipes.english, with medusa/ and redrafter/")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer("embedded:target")
    shipped = [tokenizer.encode(str(record["text"]), add_special_tokens=False) for record in shipped_prompts()]
    embedded = embedded_heads("medusa"), embedded_heads("redrafter")
    rows = list(measure("embedded", "embedded:target", shipped, embedded))
    if options.english is not None:
        run, config = options.english, MedusaTrainingConfig()
        held_out = read_texts([run / "heldout.txt"])
        english = split_prompts(
            held_out, held_out, load_tokenizer(run / "target"), config.prompts, config.prompt_tokens
        )
        prompts = [list(prompt) for prompt in english.test]
        rows += measure("english", str(run / "target"), prompts, (run / "medusa", run / "redrafter"))
    record = {"measured": time.strftime("%Y-%m-%d"), "machine": describe_machine("cpu"), "rows": rows}
    options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
