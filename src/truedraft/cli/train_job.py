"""What the commands that train have in common: what was typed, the folder they write, and what they say meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE, say
from truedraft.errors import OptionError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truedraft.cli.terminal import Terminal
    from truedraft.training.loop import Saved
    from truedraft.training.workspace import TimeBudget

WORK = "work"
"""What is in the folder that is written once a training has started."""

Minutes: TypeAlias = Annotated[
    float | None,
    opt.option(
        "--minutes",
        "Wall time for all of it, measuring included; less is done where it does not suffice.",
        "Training",
        "M",
        show_default="as long as it takes",
    ),
]
Clean: TypeAlias = Annotated[
    bool,
    opt.flag(
        "--clean", "Remove the working files of the training in --out, and do nothing else.", "What to train, on what"
    ),
]


@dataclass(frozen=True, slots=True)
class Job:
    """What to train from, where to, and in what time, as it was typed."""

    model: str
    data: list[Path]
    held_out: list[Path]
    out: Path
    resume: bool
    budget: TimeBudget | None = None


def check_folder(out: Path, resume: bool, work: Path) -> None:
    """Refuse a folder that holds other things than what is asked to go on with.

    Args:
        out: the folder to write.
        resume: whether to go on.
        work: what is there, a file or a folder, once a training has started in `out`.

    Raises:
        OptionError: says what is in the way: also another process that is training there.
    """
    from truedraft.training.workspace import refuse_busy

    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {str(out)!r} is a file; name a folder")
    refuse_busy(out / WORK)
    started = work.exists()
    if started and not resume:
        raise OptionError(f"--out {str(out)!r} holds a training; add --resume to go on with it, or name a new folder")
    if resume and not started:
        raise OptionError(f"--out {str(out)!r} holds no training to go on with; leave --resume out")
    if (out / "config.json").is_file() and not started:
        raise OptionError(f"--out {str(out)!r} holds a model, which would be overwritten; name a new folder")


def time_budget(minutes: float | None) -> TimeBudget:
    """The time for a command that has just begun.

    Raises:
        OptionError: the minutes are no number above 0.
    """
    from truedraft.training.workspace import TimeBudget

    try:
        return TimeBudget(minutes)
    except OptionError as error:
        raise OptionError(f"--{error}") from error


def clean_folder(out: Path, json: bool) -> int:
    """Remove working files, say what that freed, and give the exit status.

    Raises:
        OptionError: there are none, or a process is training there.
    """
    from truedraft.cli.terminal import Terminal
    from truedraft.training.workspace import clear_work, in_bytes

    freed, terminal = clear_work(out), Terminal()
    terminal.out.print(f"removed the working files of the training in {out}: {in_bytes(freed)} freed", soft_wrap=True)
    if json:
        terminal.json({"command": "train --clean", "out": str(out), "freed_bytes": freed})
    return DONE


def notes(terminal: Terminal) -> Callable[[str], None]:
    """Says a sentence about a training on standard error, above the bar if there is one."""
    return lambda sentence: terminal.err.print(f"truedraft: note: {' '.join(sentence.split())}", soft_wrap=True)


def checkpoint_lines(terminal: Terminal) -> Callable[[Saved], None]:
    """Says a line for each checkpoint where there is no terminal; one shows a bar."""
    from truedraft.training.workspace import duration

    def line(saved: Saved) -> None:
        if not terminal.err.is_terminal:
            left = f", about {duration(saved.left_s)} left" if saved.step < saved.total_steps else ""
            say(
                f"step {saved.step:,} of {saved.total_steps:,}, loss {saved.loss:.3f}, {saved.tokens:,} tokens{left}; "
                f"saved in {saved.path}"
            )

    return line


def saved_words(job: Job, places: Sequence[Path]) -> str | None:
    """Where an interrupted training was saved and how it goes on; None where it was not.

    Args:
        job: what was typed.
        places: folders of its checkpoints, the latest first.
    """
    from truedraft.training.loop import CHECKPOINT, checkpoint_of

    for place in places:
        try:
            found = checkpoint_of(place)
        except TrainingError as error:
            return f"interrupted; {error}"
        if found is not None:
            where = f"the training is saved in {place / CHECKPOINT} as of step {found[0]:,}"
            return f"interrupted; {where}; {same_command(job)} goes on from there"
    return None


def same_command(job: Job) -> str:
    """What to type to go on."""
    return "the same command" if job.resume else "the same command with --resume"
