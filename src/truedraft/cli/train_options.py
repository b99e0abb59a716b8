"""The options of `truedraft train KIND`."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from truedraft.cli.session import ReportOptions
from truedraft.options import MODEL_HELP, UNNAMED, UNNAMED_HELP, MachineOptions, flag, group, option
from truedraft.training.options import DraftSizeOptions, NgramSizeOptions, TextOptions, Trains, WritingOptions

_ANSWERED = "Text by the target, where --data has prompts"
_WHAT, _TEXT, _HEADS, _RUN = "What to train, on what", "Text by the target", "Heads", "Training"


@dataclass(frozen=True)
class JobOptions:
    """What is trained, on which data, and the output folder."""

    model: str = option(UNNAMED, f"The target: {MODEL_HELP}", "M", shown_default=UNNAMED_HELP)
    data: tuple[Path, ...] = option(
        (),
        "Text, or .json or .jsonl of texts or chats, that prompts are cut from, or of prompts; self lets an instruct "
        "model ask itself; a folder of the datasets library, or hf:NAME#SPLIT on the hub. May be repeated. Without it, "
        "for embedded:target, the standard library of this Python.",
        "FILE|self",
    )
    held_out: tuple[Path, ...] = option(
        (), "Text to choose trees and measure on; without it, the end of the data.", "FILE"
    )
    out: Path = option(meaning="The folder to write.", metavar="DIR")
    resume: bool = flag("Go on where the training in --out stopped.")
    keep_work: bool = flag(
        "Leave the working files of a finished training, so that --resume goes on with more steps, and other heads can "
        "share its answers."
    )
    clean: bool = flag("Remove the working files of the training in --out, and do nothing else.")
    ray: bool = flag(
        "Let machines of a Ray cluster write the text by the target: of RAY_ADDRESS, or only this machine."
    )


@dataclass(frozen=True)
class DraftJobOptions(JobOptions):
    """The same for a draft model."""

    data: tuple[Path, ...] = option(
        (),
        "Text, or .json or .jsonl of texts or chats, to train on, or of prompts, which the target answers; self lets "
        "an instruct model ask itself. May be repeated. Needed.",
        "FILE|self",
    )
    held_out: tuple[Path, ...] = option((), "Text to measure on; without it, the last 5 % of the data.", "FILE")


@dataclass(frozen=True)
class NgramJobOptions(JobOptions):
    """The same for a table of n-grams."""

    data: tuple[Path, ...] = option(
        (),
        "Text, or .json or .jsonl of texts or chats, to count; with --answers also of prompts, or self, which lets an "
        "instruct model ask itself. May be repeated. Without it, for embedded:target, the standard library of this "
        "Python.",
        "FILE|self",
    )
    held_out: tuple[Path, ...] = option((), "Text to measure on; without it, the last 5 % of the data.", "FILE")
    answers: bool = flag("Count what the target answers to prompts cut from the text, in place of the text.")


@dataclass(frozen=True)
class RunOptions:
    """Time limit of a training."""

    minutes: float | None = option(
        None,
        "Wall time for all of it, from loading to measuring; less is done where it does not suffice, and nothing where "
        "that teaches nothing.",
        "M",
        shown_default="as long as it takes",
    )
    tracker: str | None = option(
        None,
        "Follow it in one of accelerate's trackers: tensorboard, wandb, mlflow, trackio or others.",
        "NAME",
        shown_default="none; log.jsonl has the same",
    )


@dataclass(frozen=True)
class DraftRunOptions(RunOptions):
    """How a draft model is trained."""

    steps: int = option(1000, "Updates; the rate decays in the last fifth.", "N", least=1)
    tokens_per_step: int = option(4096, "Tokens of one update.", "N", least=1)
    length: int | None = option(None, "Tokens of a sequence.", "N", shown_default="512 or less", least=1)
    decay_length: int | None = option(
        None, "The same while the rate decays.", "N", shown_default="2048 or less", least=1
    )
    on_policy: float = option(
        0.0,
        "Share of sequences whose second half the draft writes itself, to learn what the target says of it.",
        "SHARE",
    )
    learning_rate: float = option(2e-3, "The highest rate.", "RATE")
    seed: int = option(0, "Decides the first weights and the order of the data.", "S", least=0)


@dataclass(frozen=True)
class DraftOptions:
    """Options of `truedraft train draft`."""

    job: DraftJobOptions = group(_WHAT)
    run: DraftRunOptions = group(_RUN)
    size: DraftSizeOptions = group("Size of the draft")
    text: TextOptions = group(_ANSWERED, without=("prompt_tokens",))
    writing: WritingOptions = group(_ANSWERED)
    machine: MachineOptions = group("Machine", without=("dtype", "kv_dtype", "no_fast_paths"))
    report: ReportOptions = group("Report")


@dataclass(frozen=True)
class HeadOptions:
    """Options that trainings of heads on a frozen target share."""

    job: JobOptions = group(_WHAT)
    text: TextOptions = group(_TEXT)
    writing: WritingOptions = group(_TEXT)
    size: Any = group(_HEADS)
    run: RunOptions = group(_RUN)
    learning: Any = group(_RUN)
    machine: MachineOptions = group("Machine", without=("dtype", "kv_dtype", "no_fast_paths"))
    report: ReportOptions = group("Report")
    more: ClassVar[Any] = None  # options of only one kind


def options_of(word: str, trains: Trains) -> type[HeadOptions]:
    """The options of `truedraft train` for a kind of heads."""
    own: list[tuple[str, type[Any], Any]] = [
        ("size", trains.size, group(_HEADS)),
        ("learning", trains.learning, group(_RUN)),
    ]
    if trains.more is not None:
        own.append(("more", trains.more, group(trains.heading)))
    return make_dataclass(f"{word.title().replace('-', '')}Options", own, bases=(HeadOptions,), frozen=True)


@dataclass(frozen=True)
class NgramOptions:
    """Options of `truedraft train ngram`."""

    job: NgramJobOptions = group(_WHAT)
    size: NgramSizeOptions = group("Size of the table")
    text: TextOptions = group("Text by the target, with --answers")
    writing: WritingOptions = group("Text by the target, with --answers")
    run: RunOptions = group(_RUN, without=("tracker",))
    machine: MachineOptions = group("Machine", without=("dtype", "kv_dtype", "no_fast_paths"))
    report: ReportOptions = group("Report")
    seed: int = option(0, "Decides what the target writes.", "S", heading="Text by the target, with --answers", least=0)
