"""Judge the embedded heads anew, without training: `python -m recipes.stdlib.calibrate`, from the root.

What is fitted to held-out answers (trees, survival, promises) and measured is written into the package; the weights
stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from recipes.common import ROOT
from recipes.stdlib import heads, redrafter
from recipes.stdlib.head_recipe import TARGET, HeadRecipe, Show, prompts
from recipes.stdlib.publish_heads import card_of
from truedraft.embedded import embedded_heads
from truedraft.heads import HeadRecord
from truedraft.models.loading import load_model
from truedraft.training.heads import TREE_TEXT, HeadJob, judge, lm_head_of, starting_head, write_tree_text
from truedraft.training.loop import Callbacks
from truedraft.training.report import Effort
from truedraft.training.workspace import WORK

_RUNS, _RESULTS = ROOT / "runs" / "stdlib", ROOT / "benchmarks" / "results"


def publish_judged(recipe: HeadRecipe) -> None:
    """Judge one kind of heads and publish what was found."""
    config = recipe.settings("cpu")
    destination, out, results = embedded_heads(recipe.name), _RUNS / f"{recipe.name}-judged", _results(recipe)
    before = json.loads(results.read_text(encoding="utf-8"))
    job = HeadJob(TARGET, prompts(config), replace(config, start_from=destination), Callbacks(Show()))
    model = load_model(TARGET, device=config.device)
    (_RUNS / "medusa" / WORK).mkdir(parents=True, exist_ok=True)
    held_out = write_tree_text(job, model, _RUNS / "medusa" / WORK, TREE_TEXT)
    lm_head = lm_head_of(TARGET, config.device)
    head = starting_head(job, lm_head, model.fingerprint)
    effort = Effort(*(before[name] for name in ("written_tokens", "steps", "positions", "elapsed_s")))
    judge(job, head, lm_head, HeadRecord(TARGET, model.fingerprint), held_out, out, effort)
    found = recipe.published(out)
    for name in found.files:
        if name.endswith(".json"):
            shutil.copy(out / name, destination / name)
    card_of(found, before["total_s"], config.device).write(destination)
    results.write_text(json.dumps(before | dict(found.facts)) + "\n", encoding="utf-8")


def _results(recipe: HeadRecipe) -> Path:
    return _RESULTS / f"{recipe.name}_heads.json"


def main() -> None:
    """Both kinds of heads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    for recipe in (heads.RECIPE, redrafter.RECIPE):
        publish_judged(recipe)


if __name__ == "__main__":
    main()
