"""`truedraft train medusa`: heads that learn what a target will write after the next token, from its own answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from truedraft.errors import OptionError
from truedraft.models.loading import load_model
from truedraft.training.adapters import check_adapters, rank_for
from truedraft.training.budget import TimeBudget
from truedraft.training.cards import write_head_card
from truedraft.training.checkpoints import CHECKPOINT, Saved
from truedraft.training.disk import alone_in
from truedraft.training.forecast import forecast
from truedraft.training.head_job import WORK, HeadJob, OnProgress, Told, job_for, write_texts
from truedraft.training.head_training import train_heads
from truedraft.training.medusa_config import MedusaTrainingConfig
from truedraft.training.medusa_kind import MedusaKind
from truedraft.training.medusa_results import MedusaResult
from truedraft.training.prompts import PromptSets
from truedraft.training.stage_two import train_jointly


def train_medusa(
    target: str | Path,
    data: Sequence[Path] | PromptSets,
    out: Path,
    config: MedusaTrainingConfig | None = None,
    *,
    held_out: Sequence[Path] = (),
    on_progress: OnProgress = lambda what, done, total, remark: None,
    on_note: Callable[[str], None] = warnings.warn,
    on_plan: Callable[[str], None] = lambda sentence: None,
    on_checkpoint: Callable[[Saved], None] = lambda saved: None,
    budget: TimeBudget | None = None,
) -> MedusaResult:
    """Train Medusa heads for the target into the folder `out`, on what the target itself writes.

    Called again after an interruption, it goes on: behind the answers on disk, then from the last checkpoint in
    `out/work`. In stage 2 the new target is written to `out/target`, and the heads in `out` are for that.

    Args:
        target: an embedded name, a folder, or a name on the Hugging Face hub.
        data: files of text that prompts are cut from (.jsonl with a "text" field, or plain), or prompts. No files at
            all means, for the embedded target, the standard library of the running interpreter.
        out: the folder to write.
        config: what decides the heads.
        held_out: files whose prompts are kept for choosing trees and for measuring; without them the end of the data.
        on_progress: called as it goes.
        on_note: called with a sentence where something is done otherwise than asked for.
        on_plan: called with a sentence on the disk and the time that it will take.
        on_checkpoint: called after each checkpoint.
        budget: the time for all of it, measuring included; None is as long as it takes.

    Raises:
        ModelError: the target cannot be loaded, or heads cannot share its LM head.
        DataError: the data cannot be read, or what the target writes is shorter than what the heads reach.
        OptionError: `out` holds a training with another configuration, or another process is training there.
        CompositionError: the heads to start from do not fit the target.
        MissingExtraError: stage 2 of a large target needs peft.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    config = config or MedusaTrainingConfig()
    job = job_for(target, data, held_out, config, Told(on_progress, on_note, on_plan, on_checkpoint), budget)
    if config.stage == 2 and job.budget.limited:
        raise OptionError("minutes are a limit for stage 1; stage 2 takes as long as its steps and joint steps do")
    with alone_in(out / WORK):
        result = _train(job, out)
        write_head_card(job, "medusa", result.folder, result.as_dict())
        return result


def _train(job: HeadJob[MedusaTrainingConfig], out: Path) -> MedusaResult:
    config, kind = job.config, MedusaKind(job.config)
    if not (out / WORK / CHECKPOINT).is_file() and (config.stage == 1 or config.start_from is None):
        job = forecast(job, kind, out / WORK)
    model = load_model(job.target, device=config.device)
    rank = config.joint.lora_rank
    if config.stage == 2 and (rank_for(model.parameters) if rank is None else rank):
        check_adapters()  # before the target writes for minutes
    text = write_texts(job, model, out / WORK)
    del model  # training needs the LM head alone
    if config.stage == 2:
        return train_jointly(job, text, out)
    trained, effort = train_heads(job, kind, text, out, out / WORK)
    return MedusaResult(out, trained, effort)
