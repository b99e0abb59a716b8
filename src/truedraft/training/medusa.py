"""`truedraft train medusa`: heads that learn what a target will write after the next token, from its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from truedraft.models.loading import load_model
from truedraft.training.adapters import check_adapters, rank_for
from truedraft.training.head_job import WORK, HeadJob, OnProgress, prompts_for, write_texts
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

    Raises:
        ModelError: the target cannot be loaded, or heads cannot share its LM head.
        DataError: the data cannot be read, or what the target writes is shorter than what the heads reach.
        OptionError: `out` holds a training with another configuration.
        CompositionError: the heads to start from do not fit the target.
        MissingExtraError: stage 2 of a large target needs peft.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    config = config or MedusaTrainingConfig()
    job = HeadJob(str(target), prompts_for(target, data, held_out, config), config, on_progress)
    model = load_model(target, device=config.device)
    rank = config.joint.lora_rank
    if config.stage == 2 and (rank_for(model.parameters) if rank is None else rank):
        check_adapters()  # before the target writes for minutes
    text = write_texts(job, model, out / WORK)
    del model  # training needs the LM head alone
    if config.stage == 2:
        return train_jointly(job, text, out)
    trained, effort = train_heads(job, MedusaKind(config), text, out, out / WORK)
    return MedusaResult(out, trained, effort)
