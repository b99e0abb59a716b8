"""Measure a pair on the held-out files, and write it with its cards into a folder of the package."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch

from recipes.common import say
from recipes.stdlib.sources import PYTHON_VERSION
from truedraft.machine import describe_machine
from truedraft.models.architecture import load_causal_lm
from truedraft.models.loading import load_model
from truedraft.training.drafts import chain_evaluations, record_draft
from truedraft.training.evaluate import evaluate_pair, mean_loss
from truedraft.training.report import Card, pair_facts, training_facts
from truedraft.training.texts.data import read_stream

LOGS = Path(__file__).parent / "logs"
LICENSE_NOTE = f"""
The weights are licensed under Apache-2.0. The training data is the source of the standard library of CPython
{PYTHON_VERSION}, licensed under the PSF License Version 2. The recipe is `recipes/stdlib` of truedraft: the same
command makes the model again, but for the last bits of floating point, which depend on processor and threads.
A model this small continues Python in the style of the standard library; it knows nothing else.
"""
_CARDS = {
    "target": {
        "title": "truedraft embedded target",
        "summary": "A small Llama for Python source: the model whose answers speculation makes faster.",
        "notes": LICENSE_NOTE,
    },
    "draft": {
        "title": "truedraft embedded draft",
        "summary": "A tiny Llama distilled from the embedded target's distributions, to guess its next tokens.",
        "notes": "Steps, tokens and time are those of the last distillation, which goes on from an earlier draft.\n"
        + LICENSE_NOTE,
    },
}
_OF_BOTH = ("held-out tokens", "validation loss (nats per token)")  # which every card has
_SKIPPED = ("checkpoint.pt*", "log.jsonl", "run.json", "progress.json", "work")


def publish(run: Path, target: Path, draft: Path, destination: Path) -> dict[str, float]:
    facts = json.loads((run / "data.json").read_text())
    stream, folders = read_stream(run / "heldout.bin"), {"target": target, "draft": draft}
    models = {name: load_causal_lm(folder, dtype=torch.bfloat16) for name, folder in folders.items()}
    losses = {name: mean_loss(model, stream)[0] for name, model in models.items()}  # nats per token
    bits_per_byte = len(stream) / facts["held_out_bytes"] / math.log(2)  # of one nat per token
    pair = evaluate_pair(models["target"], models["draft"], stream)
    for name, folder in folders.items():
        out = destination / f".{name}.partial"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*_SKIPPED))
        progress = json.loads((folder / "progress.json").read_text())
        rows = training_facts(
            parameters=models[name].num_parameters(),
            data=f"CPython {PYTHON_VERSION} standard library, {facts['train_files']:,} files, "
            f"{facts['train_tokens']:,} tokens",
            steps=progress["step"],
            tokens=progress["tokens"],
            elapsed_s=progress["elapsed_s"],
            machine=progress.get("machine") or describe_machine(),
        )
        rows["finished"] = progress["finished"]
        rows["validation loss (nats per token)"] = f"{losses[name]:.4f}"
        rows["bits per byte"] = f"{losses[name] * bits_per_byte:.4f}"
        rows["held-out data"] = f"{facts['held_out_files']} files, {pair.tokens:,} tokens"
        if name == "draft":
            rows |= {row: value for row, value in pair_facts(pair).items() if row not in _OF_BOTH}
            lines = (run / "heldout_prompts.jsonl").read_text().splitlines()
            engine_target, ours = load_model(target), load_model(draft)
            prompts = [engine_target.tokenizer.encode(json.loads(line)["text"]) for line in lines]
            served = chain_evaluations(engine_target, ours, prompts)
            record_draft(out, "embedded:target", models["target"], pair, served)
        Card(facts=rows, **_CARDS[name]).write(out)
        shutil.rmtree(destination / name, ignore_errors=True)
        out.replace(destination / name)
        for log in (folder / "log.jsonl", folder / "work" / "log.jsonl"):
            if log.exists():
                keep_log(log, name)
                break
    shutil.copy(run / "heldout_prompts.jsonl", destination / "heldout_prompts.jsonl")
    result = {
        "target_validation_loss": losses["target"],
        "target_bits_per_byte": losses["target"] * bits_per_byte,
        "draft_validation_loss": losses["draft"],
        "alpha": pair.alpha,
        "greedy_agreement": pair.greedy_agreement,
    }
    say("published: " + " ".join(f"{key} {value:.4f}" for key, value in result.items()))
    return result


def keep_log(log: Path, name: str) -> None:
    """Keep a training log, thinned to about 500 lines, beside the recipe."""
    LOGS.mkdir(exist_ok=True)
    lines = log.read_text().splitlines(keepends=True)
    (LOGS / f"{name}.jsonl").write_text("".join(lines[:: max(1, len(lines) // 500)]))
