"""Stage 1 from end to end: heads of a frozen target, their trees, and their acceptance in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from truedraft.errors import CompositionError
from truedraft.heads.checkpoint import load_medusa, save_medusa
from truedraft.models.architecture import load_causal_lm
from truedraft.models.lm_head import LmHead
from truedraft.models.loading import load_model
from truedraft.training.head_loop import head_loop, new_heads
from truedraft.training.head_trees import count_trees
from truedraft.training.medusa_results import Effort, MedusaResult, TrainedHeads
from truedraft.training.served import measure_served

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.training.loop import StepRecord
    from truedraft.training.medusa_job import MedusaJob, TargetText
    from truedraft.training.self_text import SelfText


def train_heads(job: MedusaJob, text: TargetText, out: Path, work: Path) -> MedusaResult:
    """Train heads on what the target wrote.

    Args:
        job: what is trained from.
        text: what the target wrote.
        out: where the heads are saved.
        work: for checkpoint and log.

    Raises:
        DataError: the answers are shorter than what the heads reach.
        OptionError: `work` holds a training with another configuration.
        CompositionError: the heads to start from do not fit.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    lm_head = lm_head_of(job.target, job.config.device)
    heads = starting_heads(job, lm_head, text.fingerprint)
    loop = head_loop(job.config, heads, lm_head, text.fingerprint, text.train, text.tree, work)
    follow = Follower(job, loop.total_steps)
    progress = loop.run(on_step=follow)
    effort = Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)
    trained = judge(job, job.target, heads, lm_head, text.tree, text.fingerprint, out, effort)
    return MedusaResult(out, trained, effort)


def judge(
    job: MedusaJob,
    target: str,
    heads: MedusaHeads,
    lm_head: LmHead,
    tree_text: SelfText,
    fingerprint: str,
    out: Path,
    effort: Effort,
) -> TrainedHeads:
    """Count the trees of trained heads, save both, and measure them in the engine.

    Args:
        job: names the prompts of the test.
        target: whose heads they are: a name, or a folder.
        heads: trained.
        lm_head: of the target.
        tree_text: what the target wrote to choose trees on.
        fingerprint: of the target.
        out: where the heads are saved.
        effort: what it took, which is saved too.
    """
    heads = heads.eval().to(torch.bfloat16)  # as they are saved, and served
    job.on_progress("choosing trees", 0, 1, "")
    counted = count_trees(heads, lm_head, tree_text)
    job.on_progress("choosing trees", 1, 1, "")
    trees = {kind: each.tree for kind, each in counted.items()}
    save_medusa(out, heads, target, fingerprint, trees, effort.as_dict())
    model = load_model(target, device=job.config.device)
    saved = load_medusa(out).heads
    served = measure_served(model, saved, counted, job.prompts.test, on_progress=job.following("measuring"))
    trained = TrainedHeads(counted, served)
    save_medusa(out, heads, target, fingerprint, trees, effort.as_dict() | trained.as_dict())
    return trained


def lm_head_of(target: str, device: str) -> LmHead:
    """The target's LM head in bfloat16; the rest of the model is freed.

    Raises:
        UnsupportedModelError: heads cannot share it.
    """
    return LmHead.of(load_causal_lm(target, dtype=torch.bfloat16, device=device).eval())


def starting_heads(job: MedusaJob, lm_head: LmHead, fingerprint: str) -> MedusaHeads:
    """New heads, or those to start from.

    Raises:
        CompositionError: those to start from were trained for another target, or are of other sizes.
        ModelError: they cannot be read.
    """
    heads = new_heads(job.config, lm_head)
    folder = job.config.start_from
    if folder is None:
        return heads
    found = load_medusa(folder)
    if found.fingerprint not in (None, fingerprint):
        raise CompositionError(
            f"the heads in {str(folder)!r} were trained for {found.target_name} (fingerprint {found.fingerprint}), and "
            f"the target is {job.target} (fingerprint {fingerprint}); start from heads that were trained for it, or "
            "from none"
        )
    if found.heads.config != heads.config:
        raise CompositionError(
            f"the heads in {str(folder)!r} are {found.heads.config}, and asked for are {heads.config}; ask for the "
            "same sizes, or start from none"
        )
    heads.load_state_dict(found.heads.float().state_dict())
    return heads


class Follower:
    """Reports the steps of a training, with what was last measured on held-out answers.

    Args:
        job: whose `on_progress` is called.
        total: steps of the training.
    """

    def __init__(self, job: MedusaJob, total: int) -> None:
        self._job = job
        self._total = total
        self._right = ""

    def __call__(self, record: StepRecord) -> None:
        """A step is over."""
        right = [value for name, value in record.values.items() if name.endswith("_top_1")]
        if right:
            self._right = ", heads right " + " ".join(f"{share:.2f}" for share in right)
        remark = f"loss {record.values['loss']:.3f}{self._right}"
        self._job.on_progress("training", record.step + 1, self._total, remark)
