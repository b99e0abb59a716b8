"""Training heads of any kind on a frozen target's own answers, from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from truedraft.errors import CompositionError
from truedraft.models.architecture import load_causal_lm
from truedraft.models.lm_head import LmHead
from truedraft.training.budget import TRAINED
from truedraft.training.checkpoints import checkpoint_of
from truedraft.training.head_kind import HeadKind, Trained
from truedraft.training.head_loop import head_loop
from truedraft.training.identity import LENGTHS
from truedraft.training.medusa_results import Effort
from truedraft.training.windows import WindowSampler

if TYPE_CHECKING:
    from truedraft.training.head_job import HeadJob, TargetText
    from truedraft.training.loop import Progress, StepRecord
    from truedraft.training.self_text import SelfText
    from truedraft.training.trainee import Trainee

_REPLAYED = 0.3  # of the time for measuring goes to choosing trees by replay
_REPLAY_COST = 20.0  # replaying a position is taken to last as long as training on so many
_LEAST_REPLAYED = 1024  # positions, however little time there is
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
    config = _within_budget(job, text, trainee.reach, work)
    loop = head_loop(config, course, text.fingerprint, text.train, text.tree, work)
    progress = loop.run(
        on_step=Follower(job, loop.total_steps, trainee.word),
        on_checkpoint=job.told.on_checkpoint,
        time_is_up=lambda: job.budget.over(TRAINED),
    )
    if progress.step < loop.total_steps:
        job.told.on_note(f"the time was up after {progress.step:,} of {loop.total_steps:,} steps")
    effort = Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)
    held_out = _measured_on(job, text.tree, progress)
    trainee.module.eval().to(torch.bfloat16)  # as they are saved, and served
    return kind.judge(trainee, Trained(job, job.target, text.fingerprint, held_out, out, effort)), effort


def _within_budget(job: HeadJob[Any], text: TargetText, reach: int, work: Path) -> Any:
    """The configuration, with as many steps as there is time for; a training that goes on keeps its own number."""
    config = job.config
    if not job.budget.limited:
        return config
    checkpoint = checkpoint_of(work)
    if checkpoint is not None:
        return replace(config, steps=sum(int(checkpoint[1][name] or 0) for name in LENGTHS))
    windows = WindowSampler(text.train, reach, config.window, config.seed).windows
    return replace(config, steps=job.budget.steps(config.schedule(len(windows)).total_steps, job.step_s or 0.0))


def _measured_on(job: HeadJob[Any], text: SelfText, progress: Progress) -> SelfText:
    """The held-out text that trees are chosen on: as much as there is time for."""
    left_s = _REPLAYED * job.budget.left_s()
    if not job.budget.limited or not progress.elapsed_s:
        return text
    return text.first(max(_LEAST_REPLAYED, int(left_s * progress.tokens / progress.elapsed_s / _REPLAY_COST)))


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
