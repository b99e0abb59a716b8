"""Stage 2 from end to end: warm heads, joint training, the new target's folder, and what became of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.models.loading import load_model
from truedraft.training.checkpoints import tensor_bytes
from truedraft.training.disk import in_bytes, writing
from truedraft.training.evaluate import mean_loss
from truedraft.training.head_job import TREE_TEXT, WORK, HeadJob, TargetText, write_tree_text
from truedraft.training.head_kind import Trained
from truedraft.training.head_training import Follower, lm_head_of, starting_heads, train_heads
from truedraft.training.joint import Backbone, joint_loop, joint_stream
from truedraft.training.medusa_config import MedusaTrainingConfig
from truedraft.training.medusa_kind import MedusaKind
from truedraft.training.medusa_results import Effort, JointReport, MedusaResult, TrainedHeads
from truedraft.training.medusa_trainee import MedusaTrainee
from truedraft.training.tokenizer import copy_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from truedraft.heads.medusa import MedusaHeads
    from truedraft.training.self_text import SelfText

_Job: TypeAlias = HeadJob[MedusaTrainingConfig]

_STAGE_1, _TARGET, _JOINT = "stage-1", "target", "joint"
_EVALUATED_TOKENS = 65_536
_LONGEST = 2048  # tokens of a sequence on which the loss is measured
_SHARD = "5GB"
_CHECKPOINTS = 2 * 3  # an old one beside a new one, each with the weights and at most two numbers for each of them


def train_jointly(job: _Job, text: TargetText, out: Path) -> MedusaResult:
    """Warm the heads up, train them with the target, and write both: `out/target`, and heads for it in `out`.

    Args:
        job: what is trained from; with `start_from` those heads are warm already.
        text: what the target wrote.
        out: the folder to write.

    Raises:
        MissingExtraError: adapters are needed, and peft is not installed.
        TruedraftError: as `train_heads` and `train_medusa`.
    """
    warm, before = _warm_heads(job, text, out)
    target = str(out / _TARGET)
    job_of_both = replace(job, config=replace(job.config, start_from=warm))
    rank, heads, effort = _train(job_of_both, text, out)
    model = load_model(target, device=job.config.device)
    fingerprint = model.fingerprint
    tree_text = write_tree_text(job, model, out / WORK, f"{TREE_TEXT}-{fingerprint[:8]}")
    del model
    lm_head = lm_head_of(target, job.config.device)
    trained = _judged(job, MedusaTrainee(heads, lm_head), target, fingerprint, tree_text, out, effort)
    loss_before, tokens = _loss(job, job.target)
    loss_after, _ = _loss(job, target)
    return MedusaResult(out, trained, effort, JointReport(out / _TARGET, rank, loss_before, loss_after, tokens, before))


def _warm_heads(job: _Job, text: TargetText, out: Path) -> tuple[Path, TrainedHeads]:
    """The folder with the heads to begin with, and what they are worth: given ones, or those of a first stage."""
    folder, kind = out / _STAGE_1, MedusaKind(job.config)
    if job.config.start_from is None:
        trained, _ = train_heads(job, kind, text, folder, folder / WORK)
        return folder, trained
    trainee = starting_heads(job, kind, lm_head_of(job.target, job.config.device), text.fingerprint)
    effort = Effort(0, 0, 0, 0.0)
    return folder, _judged(job, trainee, job.target, text.fingerprint, text.tree, folder, effort)


def _judged(
    job: _Job,
    trainee: MedusaTrainee,
    target: str,
    fingerprint: str,
    held_out: SelfText,
    out: Path,
    effort: Effort,
) -> TrainedHeads:
    """What heads are worth, as they are saved and served."""
    trainee.module.eval().to(torch.bfloat16)
    return MedusaKind(job.config).judge(trainee, Trained(job, target, fingerprint, held_out, out, effort))


def _train(job: _Job, text: TargetText, out: Path) -> tuple[int, MedusaHeads, Effort]:
    """Train both, and write the new target; gives the rank of its adapters, the heads, and what it took."""
    config = job.config
    backbone = Backbone(job.target, config.joint.lora_rank, config.device)
    trainee = starting_heads(job, MedusaKind(config), backbone.lm_head, text.fingerprint)
    stream = joint_stream(text.train, load_tokenizer(job.target).eos_token_id)
    length = min(config.joint.length, _context(backbone.model), (len(stream) - 1) // 2)
    config = replace(config, joint=replace(config.joint, length=length))
    loop = joint_loop(config, backbone, trainee, text.fingerprint, stream, out / WORK / _JOINT)
    size = in_bytes(_CHECKPOINTS * tensor_bytes(loop.model.state_dict()))
    job.told.on_plan(f"heads and target learn together for {loop.total_steps:,} steps; checkpoints take up to {size}")
    progress = loop.run(on_step=Follower(job, loop.total_steps, trainee.word), on_checkpoint=job.told.on_checkpoint)
    _save_target(backbone.finished(), job.target, out / _TARGET)
    effort = Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)
    return backbone.rank, trainee.module, effort


def _save_target(model: PreTrainedModel, source: str, folder: Path) -> None:
    """An ordinary model folder, with the tokenizer and the settings of generation that the target had."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_llama(model, folder, max_shard_size=_SHARD)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        copy_tokenizer(source, folder)


def _loss(job: _Job, target: str) -> tuple[float, int]:
    """The target's own loss on held-out text, in nats per token, and on how many tokens."""
    model = load_causal_lm(target, dtype=torch.bfloat16, device=job.config.device).eval()
    return mean_loss(model, job.prompts.text, length=min(_context(model), _LONGEST), max_tokens=_EVALUATED_TOKENS)


def _context(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONGEST
