"""What the commands that train have in common: what was typed, the folder they write, how long it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from truedraft.errors import OptionError


@dataclass(frozen=True, slots=True)
class Job:
    """What to train from, and where to, as it was typed."""

    model: str
    data: list[Path]
    held_out: list[Path]
    out: Path
    resume: bool


def check_folder(out: Path, resume: bool, work: Path) -> None:
    """Refuse a folder that holds other things than what is asked to go on with.

    Args:
        out: the folder to write.
        resume: whether to go on.
        work: what is there, a file or a folder, once a training has started in `out`.

    Raises:
        OptionError: says what is in the way.
    """
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {str(out)!r} is a file; name a folder")
    started = work.exists()
    if started and not resume:
        raise OptionError(f"--out {str(out)!r} holds a training; add --resume to go on with it, or name a new folder")
    if resume and not started:
        raise OptionError(f"--out {str(out)!r} holds no training to go on with; leave --resume out")
    if (out / "config.json").is_file() and not started:
        raise OptionError(f"--out {str(out)!r} holds a model, which would be overwritten; name a new folder")


def duration(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.1f} seconds"
