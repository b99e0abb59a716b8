"""Stage 2 from end to end: warm heads, joint training, the new target's folder, and what became of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.models.loading import load_model
from truedraft.training.disk import writing
from truedraft.training.evaluate import mean_loss
from truedraft.training.joint import Backbone, joint_loop, joint_stream
from truedraft.training.medusa_job import WORK, MedusaJob, TargetText, write_tree_text
from truedraft.training.medusa_results import Effort, JointReport, MedusaResult, TrainedHeads
from truedraft.training.stage_one import Follower, judge, lm_head_of, starting_heads, train_heads
from truedraft.training.tokenizer import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from truedraft.heads.medusa import MedusaHeads

_STAGE_1, _TARGET, _JOINT = "stage-1", "target", "joint"
_EVALUATED_TOKENS = 65_536
_LONGEST = 2048  # tokens of a sequence on which the loss is measured
_SHARD = "5GB"


def train_jointly(job: MedusaJob, text: TargetText, out: Path) -> MedusaResult:
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
    rank, heads, effort = _train(replace(job, config=replace(job.config, start_from=warm)), text, out)
    model = load_model(target, device=job.config.device)
    fingerprint = model.fingerprint
    tree_text = write_tree_text(job, model, out / WORK, f"tree-{fingerprint[:8]}")
    del model
    trained = judge(job, target, heads, lm_head_of(target, job.config.device), tree_text, fingerprint, out, effort)
    loss_before, tokens = _loss(job, job.target)
    loss_after, _ = _loss(job, target)
    return MedusaResult(out, trained, effort, JointReport(out / _TARGET, rank, loss_before, loss_after, tokens, before))


def _warm_heads(job: MedusaJob, text: TargetText, out: Path) -> tuple[Path, TrainedHeads]:
    """The folder with the heads to begin with, and what they are worth: given ones, or those of a first stage."""
    folder = out / _STAGE_1
    if job.config.start_from is None:
        return folder, train_heads(job, text, folder, folder / WORK).heads
    lm_head = lm_head_of(job.target, job.config.device)
    heads = starting_heads(job, lm_head, text.fingerprint)
    effort = Effort(0, 0, 0, 0.0)
    return folder, judge(job, job.target, heads, lm_head, text.tree, text.fingerprint, folder, effort)


def _train(job: MedusaJob, text: TargetText, out: Path) -> tuple[int, MedusaHeads, Effort]:
    """Train both, and write the new target; gives the rank of its adapters, the heads, and what it took."""
    config = job.config
    backbone = Backbone(job.target, config.joint.lora_rank, config.device)
    heads = starting_heads(job, backbone.lm_head, text.fingerprint)
    stream = joint_stream(text.train, load_tokenizer(job.target).eos_token_id)
    length = min(config.joint.length, _context(backbone.model), (len(stream) - 1) // 2)
    config = replace(config, joint=replace(config.joint, length=length))
    loop = joint_loop(config, backbone, heads, text.fingerprint, stream, out / WORK / _JOINT)
    progress = loop.run(on_step=Follower(job, loop.total_steps))
    _save_target(backbone.finished(), job.target, out / _TARGET)
    return backbone.rank, heads, Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)


def _save_target(model: PreTrainedModel, source: str, folder: Path) -> None:
    """An ordinary model folder, with the tokenizer and the settings of generation that the target had."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_llama(model, folder, max_shard_size=_SHARD)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        save_tokenizer(load_tokenizer(source), folder)


def _loss(job: MedusaJob, target: str) -> tuple[float, int]:
    """The target's own loss on held-out text, in nats per token, and on how many tokens."""
    model = load_causal_lm(target, dtype=torch.bfloat16, device=job.config.device).eval()
    return mean_loss(model, job.prompts.text, length=min(_context(model), _LONGEST), max_tokens=_EVALUATED_TOKENS)


def _context(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONGEST
