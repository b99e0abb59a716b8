"""What heads of any kind are trained from, and what the target writes for it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from truedraft.errors import DataError
from truedraft.planning import TREE_TEMPERATURES
from truedraft.training.budget import WRITTEN, TimeBudget, duration
from truedraft.training.checkpoints import CHECKPOINT, Saved
from truedraft.training.disk import writing
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.prompts import PromptSets, shuffled, split_prompts
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
_TRAIN_WRITTEN = 0.9 * WRITTEN  # the rest of it is for the text that trees are chosen on

OnProgress: TypeAlias = Callable[[str, int, int, str], None]
"""Called with what is being done, how much of it is done, how much there is, and a remark."""
_FLOOR = 0.1  # of the tokens that are asked for: with less, next to nothing of the training that was asked for is left
_ENOUGH = 0.95  # of them is as good as all

Config = TypeVar("Config", bound=HeadTrainingConfig, covariant=True)
_AnyConfig = TypeVar("_AnyConfig", bound=HeadTrainingConfig)


@dataclass(frozen=True)
class Told:
    """Who is told of a training, and of what.

    Attributes:
        on_progress: how far each kind of work has come.
        on_note: sentences on what is done otherwise than asked for.
        on_plan: sentences on the disk and the time that it will take.
        on_checkpoint: each checkpoint.
    """

    on_progress: OnProgress = lambda what, done, total, remark: None
    on_note: Callable[[str], None] = warnings.warn
    on_plan: Callable[[str], None] = lambda sentence: None
    on_checkpoint: Callable[[Saved], None] = lambda saved: None


@dataclass(frozen=True)
class HeadJob(Generic[Config]):
    """What is trained from, and how.

    Attributes:
        target: an embedded name, a folder, or a hub name.
        prompts: that the target answers.
        config: what decides the heads.
        told: called as it goes.
        budget: the time for all of it.
        data: what the prompts were cut from, in words.
        step_s: seconds of a training step, where they are known before.
    """

    target: str
    prompts: PromptSets
    config: Config
    told: Told
    budget: TimeBudget = field(default_factory=TimeBudget)
    data: str = "prompts of the caller's"
    step_s: float | None = None

    @property
    def on_progress(self) -> OnProgress:
        """See `Told`."""
        return self.told.on_progress

    @property
    def within_s(self) -> float | None:
        """Seconds that are left for measuring; None where nothing limits them."""
        return self.budget.left_s() if self.budget.limited else None

    def following(self, what: str, remark: str = "") -> Callable[[int, int], None]:
        """`on_progress` of one kind of work."""

        def follow(done: int, total: int) -> None:
            self.told.on_progress(what, done, total, remark)

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


def job_for(
    target: str | Path,
    data: Sequence[Path] | PromptSets,
    held_out: Sequence[Path],
    config: _AnyConfig,
    told: Told,
    budget: TimeBudget | None,
) -> HeadJob[_AnyConfig]:
    """A job, with prompts as they are given, or cut from files; the embedded target needs none of either.

    With a limit of time the prompts are shuffled, so that those which are answered in time come from all of the text.

    Raises:
        DataError: there are no files and the target is another, they cannot be used, or hold far too little text.
        ModelError: the target has no tokenizer.
    """
    words = "prompts of the caller's"
    if isinstance(data, PromptSets):
        prompts = data
    else:
        prompts = _prompts_of(target, data, held_out, config)
        _check_amount(prompts, config, told.on_note)
        words = ", ".join(path.name for path in data) or "the standard library of Python"
    budget = budget or TimeBudget()
    if budget.limited:
        prompts = replace(prompts, train=shuffled(prompts.train, config.seed))
    return HeadJob(str(target), prompts, config, told, budget, words)


def _prompts_of(
    target: str | Path, data: Sequence[Path], held_out: Sequence[Path], config: HeadTrainingConfig
) -> PromptSets:
    if not data and str(target) != _EMBEDDED_TARGET:
        raise DataError(
            f"there is no text to cut prompts for {str(target)!r} from; name at least one file like what it will be "
            "used for with --data FILE"
        )
    tokenizer = load_tokenizer(target)
    if not data:
        return standard_library_prompts(tokenizer, config.prompts, config.prompt_tokens)
    others = read_texts(held_out) if held_out else ()
    found = split_prompts(read_texts(data), others, tokenizer, config.prompts, config.prompt_tokens)
    names = ", ".join(path.name for path in held_out or data)
    return replace(found, source=names if held_out else f"the end of {names}")


def _check_amount(prompts: PromptSets, config: HeadTrainingConfig, on_note: Callable[[str], None]) -> None:
    """Say where there is less text than asked for, and refuse far too little."""
    wanted = config.prompts
    separate = len(prompts.train) if prompts.apart is None else prompts.apart
    if separate < _ENOUGH * wanted.train:
        got = (
            f"the text gives {separate:,} prompts that share nothing, for about "
            f"{separate * config.writing.answer_tokens:,} tokens by the target, and {config.tokens:,} are asked for"
        )
        if separate < _FLOOR * wanted.train:
            raise DataError(f"{got}: give more text, or ask for fewer tokens")
        on_note(f"{got}; heads learn more from more text")
    if len(prompts.tree) < _ENOUGH * wanted.tree or len(prompts.test) < _ENOUGH * wanted.test:
        on_note(
            f"the held-out text gives {len(prompts.tree)} of {wanted.tree} prompts to choose trees on, and "
            f"{len(prompts.test)} of {wanted.test} to measure on: with more text the figures are surer"
        )


def write_texts(job: HeadJob[HeadTrainingConfig], model: LanguageModel, folder: Path) -> TargetText:
    """Let the target answer all prompts that are trained on or that trees are chosen on.

    Raises:
        OptionError: the folder holds answers to other prompts, of another target, or otherwise written.
        TrainingError: the target failed, or the files cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    train = write_self_text(
        model,
        job.prompts.train,
        folder,
        TRAIN_TEXT,
        job.config.writing,
        on_progress=job.following("writing text", f"answers by {model.name}"),
        on_forecast=lambda left_s: job.told.on_plan(f"writing takes about {duration(left_s)}"),
        time_is_up=_time_is_up(job, folder, _TRAIN_WRITTEN),
    )
    if len(train.records) < len(job.prompts.train):
        job.told.on_note(
            f"in the time given the target wrote {len(train.tokens):,} of about {job.config.tokens:,} tokens"
        )
    return TargetText(train, write_tree_text(job, model, folder, TREE_TEXT), model.fingerprint, folder)


def write_tree_text(job: HeadJob[HeadTrainingConfig], model: LanguageModel, folder: Path, name: str) -> SelfText:
    """The target's answers to the prompts for trees, to each one at every temperature that trees are counted at."""
    temperatures = tuple(TREE_TEMPERATURES.values())
    prompts = list(itertools.chain.from_iterable([prompt] * len(temperatures) for prompt in job.prompts.tree))
    config = replace(job.config.writing, temperatures=temperatures, seed=job.config.writing.seed + 1)
    follow = job.following("writing text for trees", f"answers by {model.name}")
    over = _time_is_up(job, folder, WRITTEN)
    return write_self_text(model, prompts, folder, name, config, on_progress=follow, time_is_up=over)


def _time_is_up(job: HeadJob[HeadTrainingConfig], folder: Path, share: float) -> Callable[[], bool]:
    """Whether writing must end. What a training that goes on was begun with stays as it is."""
    begun = job.budget.limited and (folder / CHECKPOINT).is_file()
    return lambda: begun or job.budget.over(share)
