"""What makes Medusa heads better: variants trained alike on one text, a few minutes each.

    python -m recipes.stdlib.heads    # writes the text, among other things
    python -m recipes.stdlib.tried    # reads it, and writes benchmarks/results/medusa_tried.json

Each variant sees the same positions in the same order at the same rate. What is compared is the promise of its tree:
tokens per target call by replay along held-out answers of the target, on which the tree was counted too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from recipes.stdlib.heads import ROOT, TARGET, prompts, settings
from truedraft.models.loading import load_model
from truedraft.training.head_loop import head_loop, new_heads
from truedraft.training.head_trees import count_trees
from truedraft.training.machine import describe_machine
from truedraft.training.medusa_job import WORK, MedusaJob, write_texts
from truedraft.training.stage_one import lm_head_of

VARIANTS: dict[str, dict[str, object]] = {
    "the vector alone, the tokens (the paper's)": {"reads_token": False, "layers": 1, "law_share": 0.0},
    "the vector alone, the laws": {"reads_token": False, "layers": 1},
    "the vector alone, the laws, two blocks": {"reads_token": False, "layers": 2},
    "vector and token, the laws": {"layers": 1},
    "vector and token, the laws, two blocks": {"layers": 2},
    "vector and token, the laws, outputs of their own": {"layers": 1, "tied": False},
}


def main() -> None:
    """Train all variants one after another."""
    options = _parse()
    torch.set_num_threads(options.threads)
    config = replace(settings(), steps=options.steps)
    job = MedusaJob(TARGET, prompts(config), config, lambda what, done, total, remark: None)
    text = write_texts(job, load_model(TARGET), options.text / WORK)
    lm_head = lm_head_of(TARGET, "cpu")
    rows = []
    for name, changes in VARIANTS.items():
        started = time.perf_counter()
        variant = replace(config, **changes)  # type: ignore[arg-type]
        heads = new_heads(variant, lm_head)
        with tempfile.TemporaryDirectory() as folder:
            loop = head_loop(variant, heads, lm_head, text.fingerprint, text.train, text.tree, Path(folder))
            positions = loop.run().tokens
        heads = heads.eval().to(torch.bfloat16)
        trees = {
            kind: counted.as_dict()["promises"] for kind, counted in count_trees(heads, lm_head, text.tree).items()
        }
        rows.append({"variant": name, "positions": positions, "seconds": time.perf_counter() - started, "trees": trees})
        print(json.dumps(rows[-1]), flush=True)
    record = {"command": "medusa_tried", "machine": describe_machine("cpu"), "threads": options.threads, "rows": rows}
    options.out.write_text(json.dumps(record) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=ROOT / "runs" / "stdlib" / "medusa", help="what the target wrote")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "medusa_tried.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
