"""Training heads of any kind on a frozen target's own answers, from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from truedraft.errors import CompositionError
from truedraft.models.architecture import load_causal_lm
from truedraft.models.lm_head import LmHead
from truedraft.training.head_kind import HeadKind, Trained
from truedraft.training.head_loop import head_loop
from truedraft.training.medusa_results import Effort

if TYPE_CHECKING:
    from truedraft.training.head_job import HeadJob, TargetText
    from truedraft.training.loop import StepRecord
    from truedraft.training.trainee import Trainee

_Student = TypeVar("_Student", bound="Trainee")
_Judged = TypeVar("_Judged")


def train_heads(
    job: HeadJob[Any], kind: HeadKind[Any, _Judged], text: TargetText, out: Path, work: Path
) -> tuple[_Judged, Effort]:
    """Train heads on what the target wrote, save and measure them.

    Args:
        job: what is trained from.
        kind: of the heads.
        text: what the target wrote.
        out: where the heads are saved.
        work: for checkpoint and log.

    Returns:
        What the heads are worth, and what it took.

    Raises:
        DataError: the answers are shorter than what the heads reach.
        OptionError: `work` holds a training with another configuration.
        CompositionError: the heads to start from do not fit.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    lm_head = lm_head_of(job.target, job.config.device)
    trainee = starting_heads(job, kind, lm_head, text.fingerprint)
    course = kind.course(trainee, text.train, job, text.folder)
    loop = head_loop(job.config, course, text.fingerprint, text.train, text.tree, work)
    progress = loop.run(on_step=Follower(job, loop.total_steps, trainee.word))
    effort = Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)
    trainee.module.eval().to(torch.bfloat16)  # as they are saved, and served
    return kind.judge(trainee, Trained(job, job.target, text.fingerprint, text.tree, out, effort)), effort


def lm_head_of(target: str, device: str) -> LmHead:
    """The target's LM head in bfloat16; the rest of the model is freed.

    Raises:
        UnsupportedModelError: heads cannot share it.
    """
    return LmHead.of(load_causal_lm(target, dtype=torch.bfloat16, device=device).eval())


def starting_heads(job: HeadJob[Any], kind: HeadKind[_Student, Any], lm_head: LmHead, fingerprint: str) -> _Student:
    """New heads, or those to start from.

    Raises:
        CompositionError: those to start from were trained for another target, or are of other sizes.
        ModelError: they cannot be read.
    """
    trainee = kind.new(lm_head)
    folder = job.config.start_from
    if folder is None:
        return trainee
    found = kind.load(folder)
    if found.fingerprint not in (None, fingerprint):
        raise CompositionError(
            f"the heads in {str(folder)!r} were trained for {found.target_name} (fingerprint {found.fingerprint}), and "
            f"the target is {job.target} (fingerprint {fingerprint}); start from heads that were trained for it, or "
            "from none"
        )
    if found.config != trainee.module.config:
        raise CompositionError(
            f"the heads in {str(folder)!r} are {found.config}, and asked for are {trainee.module.config}; ask for the "
            "same sizes, or start from none"
        )
    trainee.module.load_state_dict(found.module.float().state_dict())
    return trainee


class Follower:
    """Reports the steps of a training, with what was last measured on held-out answers.

    Args:
        job: whose `on_progress` is called.
        total: steps of the training.
        word: what a place is called.
    """

    def __init__(self, job: HeadJob[Any], total: int, word: str) -> None:
        self._job = job
        self._total = total
        self._word = word
        self._right = ""

    def __call__(self, record: StepRecord) -> None:
        """A step is over."""
        right = [value for name, value in record.values.items() if name.endswith("_top_1")]
        if right:
            self._right = f", {self._word}s right " + " ".join(f"{share:.2f}" for share in right)
        remark = f"loss {record.values['loss']:.3f}{self._right}"
        self._job.on_progress("training", record.step + 1, self._total, remark)
