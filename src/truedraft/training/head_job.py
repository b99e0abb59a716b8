"""What heads of any kind are trained from, and what the target writes for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from truedraft.errors import DataError
from truedraft.training.disk import writing
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.head_trees import TREE_TEMPERATURES
from truedraft.training.prompts import PromptSets, split_prompts
from truedraft.training.self_writing import write_self_text
from truedraft.training.standard_library import standard_library_prompts
from truedraft.training.texts import read_texts
from truedraft.training.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.training.self_text import SelfText

WORK = "work"
"""What the target wrote, its vectors, and the checkpoint, inside the folder of the heads."""
TRAIN_TEXT, TREE_TEXT = "train", "tree"
_EMBEDDED_TARGET = "embedded:target"

OnProgress: TypeAlias = Callable[[str, int, int, str], None]
"""Called with what is being done, how much of it is done, how much there is, and a remark."""

Config = TypeVar("Config", bound=HeadTrainingConfig, covariant=True)


@dataclass(frozen=True)
class HeadJob(Generic[Config]):
    """What is trained from, and how.

    Attributes:
        target: an embedded name, a folder, or a hub name.
        prompts: that the target answers.
        config: what decides the heads.
        on_progress: called as it goes.
    """

    target: str
    prompts: PromptSets
    config: Config
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
        folder: where it lies.
    """

    train: SelfText
    tree: SelfText
    fingerprint: str
    folder: Path


def prompts_for(
    target: str | Path, data: Sequence[Path] | PromptSets, held_out: Sequence[Path], config: HeadTrainingConfig
) -> PromptSets:
    """Prompts as they are given, or cut from files; without any, for the embedded target, the standard library's.

    Raises:
        DataError: there are no files and the target is another, or they cannot be used.
        ModelError: the target has no tokenizer.
    """
    if isinstance(data, PromptSets):
        return data
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


def write_texts(job: HeadJob[HeadTrainingConfig], model: LanguageModel, folder: Path) -> TargetText:
    """Let the target answer all prompts that are trained on or that trees are chosen on.

    Raises:
        OptionError: the folder holds answers to other prompts, of another target, or otherwise written.
        TrainingError: the target failed, or the files cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    follow = job.following("writing text", f"answers by {model.name}")
    train = write_self_text(model, job.prompts.train, folder, TRAIN_TEXT, job.config.writing, on_progress=follow)
    return TargetText(train, write_tree_text(job, model, folder, TREE_TEXT), model.fingerprint, folder)


def write_tree_text(job: HeadJob[HeadTrainingConfig], model: LanguageModel, folder: Path, name: str) -> SelfText:
    """The target's answers to the prompts for trees, to each one at every temperature that trees are counted at."""
    temperatures = tuple(TREE_TEMPERATURES.values())
    prompts = list(itertools.chain.from_iterable([prompt] * len(temperatures) for prompt in job.prompts.tree))
    config = replace(job.config.writing, temperatures=temperatures, seed=job.config.writing.seed + 1)
    follow = job.following("writing text for trees", f"answers by {model.name}")
    return write_self_text(model, prompts, folder, name, config, on_progress=follow)
