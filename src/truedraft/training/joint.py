"""Stage 2: heads and target trained together; the target keeps its distribution (Medusa-2, 2401.10774, 2.2.2)."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from truedraft.drafters.heads.head import HeadRecord, VectorHead
from truedraft.errors import MissingExtraError
from truedraft.machine import in_bytes
from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.models.checkpoint import weights_hash
from truedraft.models.lm_head import LmHead
from truedraft.models.loading import load_model
from truedraft.training.evaluate import context_of, mean_loss
from truedraft.training.head_config import HeadLoss, HeadTrainingConfig, heads_optimizer
from truedraft.training.heads import (
    TREE_TEXT,
    HeadJob,
    TargetText,
    judge,
    lm_head_of,
    run,
    starting_head,
    train_stage_1,
    write_tree_text,
)
from truedraft.training.loop import Phase, RunFolder, TrainingLoop, tensor_bytes, trained_weights
from truedraft.training.losses import ForwardKL, TargetRows, computed_rows, distillation_gradient
from truedraft.training.optimizer import MixedOptimizer, SeparateOptimizers, WarmupStableDecay
from truedraft.training.report import Effort, HeadReport, HeadResult, JointReport
from truedraft.training.texts.data import BlockSampler, copy_tokenizer, load_tokenizer, stream_hash
from truedraft.training.workspace import WORK, writing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STAGE_1, _TARGET, _JOINT = "stage-1", "target", "joint"
_EVALUATED_TOKENS = 65_536
_LONGEST = 2048  # tokens of a sequence for measuring the loss
_SHARD = "5GB"
_CHECKPOINTS = 2 * 3  # an old and a new one, each with the weights and at most two numbers for each weight
_WHOLE_PARAMETERS = 300_000_000  # up to here all weights are trained: their gradients and moments take under 6 GB
_RANK = 32


def rank_for(parameters: int) -> int:
    """The rank of adapters for a number of weights; 0 where all of them are trained."""
    return 0 if parameters <= _WHOLE_PARAMETERS else _RANK


def check_adapters() -> None:
    """Raise MissingExtraError unless peft is installed."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "training a large target needs LoRA adapters by peft, which is not installed; "
            "`pip install 'truedraft[train]'` installs it, or train all weights with a LoRA rank of 0"
        )


class Backbone:
    """A target in training, by adapters of a rank; 0 trains all weights, None decides by their number.

    Adapters are at all of its linear layers except the LM head.
    """

    def __init__(self, target: str | Path, rank: int | None, device: str) -> None:
        before = load_causal_lm(target, dtype="auto", device=device).eval().requires_grad_(False)
        self.rank = rank_for(before.num_parameters()) if rank is None else rank
        self._before = None if self.rank else before
        if self.rank:
            check_adapters()
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self.module: Any = get_peft_model(before, lora)
        else:
            self.module = load_causal_lm(target, device=device)
        self.lm_head = LmHead.of(self.model)

    @property
    def model(self) -> PreTrainedModel:
        return cast("PreTrainedModel", self.module.get_base_model() if self.rank else self.module)

    @torch.no_grad()
    def logits_before(self, ids: Tensor) -> Tensor:
        before = self.module if self._before is None else self._before
        with contextlib.nullcontext() if self._before is not None else self.module.disable_adapter():
            return cast("Tensor", before(input_ids=ids, use_cache=False).logits.flatten(0, 1))

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[tokens, vocab]` for ids `[sequences, length]`, and the vectors `[tokens, width]` that gave them."""
        entered: list[Tensor] = []
        lm_head = self.model.get_output_embeddings()
        hook = lm_head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
        try:
            logits = self.module(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        return logits.flatten(0, 1), entered[0].flatten(0, 1)

    def finished(self) -> PreTrainedModel:
        """The trained target with merged adapters; training is over."""
        return cast("PreTrainedModel", self.module.merge_and_unload() if self.rank else self.module)


@dataclass(frozen=True)
class JointObjective:
    """KL(p0 || p) plus `heads_share` (lambda_0) times the heads' loss towards p0; both train the target."""

    backbone: Backbone
    of_heads: HeadLoss
    heads_share: float

    def accumulate(self, batch: Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        assert own is None, "one process trains both"
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        before = self.backbone.logits_before(inputs)
        logits, hidden = self.backbone.run(inputs)
        head, loss = self.of_heads.head, self.of_heads.loss
        reach = head.reach
        rows = torch.arange(len(labels), device=batch.device).view(inputs.shape)
        places = rows[:, : inputs.shape[1] - reach].flatten()
        read = labels[places[:, None] + torch.arange(reach, device=batch.device)]  # [positions, reach]
        vectors = head.unroll(hidden[places].float(), self.backbone.lm_head.embed(read.T))

        def target_at(some: slice) -> TargetRows:
            return computed_rows(labels[some], lambda: before[some], loss)

        of_heads, values = self.of_heads.gradient(vectors, places, target_at, scale * self.heads_share)
        of_target, kept = distillation_gradient(logits, before, labels, ForwardKL(), scale)
        torch.autograd.backward([logits, vectors], [of_target, of_heads])
        heads = values.pop("loss")
        return {"loss": kept["loss"] + self.heads_share * heads, "kl_to_before": kept["loss"], "heads": heads} | values


def joint_loop(
    config: HeadTrainingConfig,
    backbone: Backbone,
    head: VectorHead,
    fingerprint: str,
    stream: NDArray[np.uint32],
    folder: Path,
) -> TrainingLoop:
    """The loop that trains both, starting with heads from stage 1; errors as `stream_loop`."""
    joint = config.joint
    schedule = WarmupStableDecay.of(joint.steps, joint.decay_share)
    more = {"target": fingerprint, "data_sha256": stream_hash(stream), "start_from": weights_hash(head)}
    identity = dict(config.identity(schedule, config.decisive - _STAGE_1_ONLY | {"joint"}, **more))
    identity["joint.lora_rank"] = backbone.rank
    identity.pop("joint.steps")
    sequences = max(1, joint.tokens_per_step // joint.length)
    adapters = [weight for weight in backbone.module.parameters() if weight.requires_grad] if backbone.rank else []
    of_heads = HeadLoss(head, backbone.lm_head, config.distillation_loss, config.place_decay)
    of_target = MixedOptimizer(backbone.module, joint.backbone, adapters)
    return TrainingLoop(
        nn.ModuleDict({"backbone": backbone.module, "heads": head}),
        SeparateOptimizers(heads_optimizer(head, joint.heads), of_target),
        JointObjective(backbone, of_heads, joint.heads_share),
        [Phase(schedule.total_steps, BlockSampler(stream, joint.length, config.seed), sequences, sequences)],
        schedule,
        RunFolder(folder, identity, config.device, config.checkpoint_every_s),
    )


_STAGE_1_ONLY = frozenset({"reads_token", "optimizer", "positions_per_step", "window"})
"""Fields that affect stage 2 only through its starting heads."""


def train_jointly(job: HeadJob, text: TargetText, out: Path) -> HeadResult:
    """Train heads, or take `start_from`, then heads and target; write `out/target`, and heads for it in `out`.

    Raises MissingExtraError if adapters need peft, and the errors of `train_heads`.
    """
    warm, before = _warm_heads(job, text, out)
    target = str(out / _TARGET)
    job_of_both = replace(job, config=replace(job.config, start_from=warm))
    rank, head, effort = _train(job_of_both, text, out)
    model = load_model(target, device=job.config.device)
    fingerprint = model.fingerprint
    record = HeadRecord(target, fingerprint, sample=model.sample)
    tree_text = write_tree_text(job, model, out / WORK, f"{TREE_TEXT}-{fingerprint[:8]}")
    del model
    lm_head = lm_head_of(target, job.config.device)
    report = judge(job, head, lm_head, record, tree_text, out, effort)
    loss_before, tokens = _loss(job, job.target)
    loss_after, _ = _loss(job, target)
    return HeadResult(out, report, effort, JointReport(out / _TARGET, rank, loss_before, loss_after, tokens, before))


def _warm_heads(job: HeadJob, text: TargetText, out: Path) -> tuple[Path, HeadReport]:
    folder = out / _STAGE_1
    if job.config.start_from is None:
        return folder, train_stage_1(job, text, folder, folder / WORK)[0]
    lm_head = lm_head_of(job.target, job.config.device)
    head = starting_head(job, lm_head, text.fingerprint)
    effort = Effort(0, 0, 0, 0.0)
    return folder, judge(job, head, lm_head, text.record(job.target), text.tree, folder, effort)


def _train(job: HeadJob, text: TargetText, out: Path) -> tuple[int, VectorHead, Effort]:
    config = job.config
    backbone = Backbone(job.target, config.joint.lora_rank, config.device)
    head = cast("VectorHead", starting_head(job, backbone.lm_head, text.fingerprint))
    end = load_tokenizer(job.target).eos_token_id
    ids = [id_ for record in text.train.records for id_ in (*record.prompt, *record.answer, end)]
    stream = np.array(ids, dtype=np.uint32)
    length = min(config.joint.length, context_of(backbone.model), (len(stream) - 1) // 2)
    config = replace(config, joint=replace(config.joint, length=length))
    loop = joint_loop(config, backbone, head, text.fingerprint, stream, out / WORK / _JOINT)
    size = in_bytes(_CHECKPOINTS * tensor_bytes(trained_weights(loop.model)))
    job.callbacks.on_plan(
        f"heads and target learn together for {loop.total_steps:,} steps; checkpoints take up to {size}"
    )
    effort = run(job, loop, text)
    model, folder = backbone.finished(), out / _TARGET
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_llama(model, folder, max_shard_size=_SHARD)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        copy_tokenizer(job.target, folder)
    return backbone.rank, head, effort


def _loss(job: HeadJob, target: str) -> tuple[float, int]:
    model = load_causal_lm(target, dtype="auto", device=job.config.device).eval()
    return mean_loss(model, job.prompts.text, length=min(context_of(model), _LONGEST), max_tokens=_EVALUATED_TOKENS)
