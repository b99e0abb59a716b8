"""`truedraft train medusa`: heads that learn what a target will write after the next token, from its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from truedraft.errors import DataError
from truedraft.models.loading import load_model
from truedraft.training.adapters import check_adapters, rank_for
from truedraft.training.medusa_config import MedusaTrainingConfig
from truedraft.training.medusa_job import WORK, MedusaJob, OnProgress, write_texts
from truedraft.training.medusa_results import MedusaResult
from truedraft.training.prompts import PromptSets, split_prompts
from truedraft.training.stage_one import train_heads
from truedraft.training.stage_two import train_jointly
from truedraft.training.standard_library import standard_library_prompts
from truedraft.training.texts import read_texts
from truedraft.training.tokenizer import load_tokenizer

_EMBEDDED_TARGET = "embedded:target"


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
    prompts = data if isinstance(data, PromptSets) else prompts_for(target, data, held_out, config)
    job = MedusaJob(str(target), prompts, config, on_progress)
    model = load_model(target, device=config.device)
    rank = config.joint.lora_rank
    if config.stage == 2 and (rank_for(model.parameters) if rank is None else rank):
        check_adapters()  # before the target writes for minutes
    text = write_texts(job, model, out / WORK)
    del model  # training needs the LM head alone
    if config.stage == 2:
        return train_jointly(job, text, out)
    return train_heads(job, text, out, out / WORK)


def prompts_for(
    target: str | Path, data: Sequence[Path], held_out: Sequence[Path], config: MedusaTrainingConfig
) -> PromptSets:
    """Prompts cut from files, or without any, for the embedded target, from the standard library.

    Raises:
        DataError: there are no files and the target is another, or they cannot be used.
        ModelError: the target has no tokenizer.
    """
    if not data and str(target) != _EMBEDDED_TARGET:
        raise DataError(
            f"there is no text to cut prompts for {str(target)!r} from; name at least one file like what it will be "
            "used for with --data FILE"
        )
    tokenizer = load_tokenizer(target)
    if not data:
        return standard_library_prompts(tokenizer, config.prompts, config.prompt_tokens)
    others = read_texts(held_out) if held_out else ()
    return split_prompts(read_texts(data), others, tokenizer, config.prompts, config.prompt_tokens)
