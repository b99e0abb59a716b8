"""`truedraft train redrafter`: a recurrent head that learns what a target will write, from its own answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from truedraft.models.loading import load_model
from truedraft.training.budget import TimeBudget
from truedraft.training.cards import write_head_card
from truedraft.training.checkpoints import CHECKPOINT, Saved
from truedraft.training.disk import alone_in
from truedraft.training.forecast import forecast
from truedraft.training.head_job import WORK, HeadJob, OnProgress, Told, job_for, write_texts
from truedraft.training.head_training import train_heads
from truedraft.training.prompts import PromptSets
from truedraft.training.redrafter_config import RedrafterTrainingConfig
from truedraft.training.redrafter_kind import RedrafterKind
from truedraft.training.redrafter_results import RedrafterResult


def train_redrafter(
    target: str | Path,
    data: Sequence[Path] | PromptSets,
    out: Path,
    config: RedrafterTrainingConfig | None = None,
    *,
    held_out: Sequence[Path] = (),
    on_progress: OnProgress = lambda what, done, total, remark: None,
    on_note: Callable[[str], None] = warnings.warn,
    on_plan: Callable[[str], None] = lambda sentence: None,
    on_checkpoint: Callable[[Saved], None] = lambda saved: None,
    budget: TimeBudget | None = None,
) -> RedrafterResult:
    """Train a recurrent head for the target into the folder `out`, on what the target itself writes.

    Called again after an interruption, it goes on: behind the answers on disk, then from the last checkpoint in
    `out/work`.

    Args:
        target: an embedded name, a folder, or a name on the Hugging Face hub.
        data: files of text that prompts are cut from (.jsonl with a "text" field, or plain), or prompts. No files at
            all means, for the embedded target, the standard library of the running interpreter.
        out: the folder to write.
        config: what decides the head.
        held_out: files whose prompts are kept for measuring; without them the end of the data.
        on_progress: called as it goes.
        on_note: called with a sentence where something is done otherwise than asked for.
        on_plan: called with a sentence on the disk and the time that it will take.
        on_checkpoint: called after each checkpoint.
        budget: the time for all of it, measuring included; None is as long as it takes.

    Raises:
        ModelError: the target cannot be loaded, or heads cannot share its LM head or its embedding.
        DataError: the data cannot be read, or what the target writes is shorter than what the head reaches.
        OptionError: `out` holds a training with another configuration, another process is training there, or the sizes
            make no head for the target.
        CompositionError: the head to start from does not fit the target.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    config = config or RedrafterTrainingConfig()
    job = job_for(target, data, held_out, config, Told(on_progress, on_note, on_plan, on_checkpoint), budget)
    with alone_in(out / WORK):
        result = _train(job, out)
        write_head_card(job, "redrafter", result.folder, result.as_dict())
        return result


def _train(job: HeadJob[RedrafterTrainingConfig], out: Path) -> RedrafterResult:
    config, kind = job.config, RedrafterKind(job.config)
    if not (out / WORK / CHECKPOINT).is_file():
        job = forecast(job, kind, out / WORK)
    model = load_model(job.target, device=config.device)
    # Refused before the target writes for minutes.
    config.sizes(model.head_width, model.vocab_size)
    model.embed(torch.zeros(1, dtype=torch.int64, device=model.device))
    text = write_texts(job, model, out / WORK)
    del model  # training needs the LM head alone
    trained, effort = train_heads(job, kind, text, out, out / WORK)
    return RedrafterResult(out, trained, effort)
