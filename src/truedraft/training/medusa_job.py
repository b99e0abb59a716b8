"""What Medusa heads are trained from, and what the target writes for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from truedraft.training.disk import writing
from truedraft.training.head_trees import TREE_TEMPERATURES
from truedraft.training.self_writing import write_self_text

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.training.medusa_config import MedusaTrainingConfig
    from truedraft.training.prompts import PromptSets
    from truedraft.training.self_text import SelfText

WORK = "work"
"""What the target wrote, its vectors, and the checkpoint, inside the folder of the heads."""

OnProgress: TypeAlias = Callable[[str, int, int, str], None]
"""Called with what is being done, how much of it is done, how much there is, and a remark."""


@dataclass(frozen=True)
class MedusaJob:
    """What is trained from, and how.

    Attributes:
        target: an embedded name, a folder, or a hub name.
        prompts: that the target answers.
        config: what decides the heads.
        on_progress: called as it goes.
    """

    target: str
    prompts: PromptSets
    config: MedusaTrainingConfig
    on_progress: OnProgress

    def following(self, what: str, remark: str = "") -> Callable[[int, int], None]:
        """`on_progress` of one kind of work."""

        def follow(done: int, total: int) -> None:
            self.on_progress(what, done, total, remark)

        return follow


@dataclass(frozen=True)
class TargetText:
    """What a target wrote.

    Attributes:
        train: to train on.
        tree: to choose trees on.
        fingerprint: of the target.
    """

    train: SelfText
    tree: SelfText
    fingerprint: str


def write_texts(job: MedusaJob, model: LanguageModel, folder: Path) -> TargetText:
    """Let the target answer all prompts that are trained on or that trees are chosen on.

    Raises:
        OptionError: the folder holds answers to other prompts, of another target, or otherwise written.
        TrainingError: the target failed, or the files cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    follow = job.following("writing text", f"answers by {model.name}")
    train = write_self_text(model, job.prompts.train, folder, "train", job.config.writing, on_progress=follow)
    return TargetText(train, write_tree_text(job, model, folder, "tree"), model.fingerprint)


def write_tree_text(job: MedusaJob, model: LanguageModel, folder: Path, name: str) -> SelfText:
    """The target's answers to the prompts for trees, to each one at every temperature that trees are counted at."""
    temperatures = tuple(TREE_TEMPERATURES.values())
    prompts = list(itertools.chain.from_iterable([prompt] * len(temperatures) for prompt in job.prompts.tree))
    config = replace(job.config.writing, temperatures=temperatures, seed=job.config.writing.seed + 1)
    follow = job.following("writing text for trees", f"answers by {model.name}")
    return write_self_text(model, prompts, folder, name, config, on_progress=follow)
