"""The folder and the time of a training: a full disk, one process at a time, working files, time limits."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from truedraft.errors import OptionError, TrainingError
from truedraft.files import written_whole
from truedraft.options import check_positive

WORK = "work"  # working files, inside the output folder of a training
PLACES = (f"{WORK}/joint", f"stage-1/{WORK}", WORK)  # where working files may be in it, those of the latest stage first
LOG = "log.jsonl"  # the log of steps, a line each
WRITTEN, TRAINED = 0.4, 0.75  # shares of the time at which writing ends and training ends; the rest is for measuring
_MARGIN = 0.9  # share of the time for steps: the rest is for measurements between them
_LEAST_STEPS, _FEW_STEPS = 5, 100  # with fewer steps noise; with fewer than the second little gain
_LOCK, _OWNER = "lock", "pid"  # of the process that trains in a folder
_WORKING = (
    "checkpoint.pt*", "log.jsonl*", "run.json*", "train.*", "tree.*", "tree-*.*", "held_out.*", "answers.*",
    "questions.*", _OWNER,
)  # fmt: skip


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert a failure to write `path` into a TrainingError with advice; complete files stay as they are."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write {str(path)!r}: {error.strerror or error}; what was finished before is kept: make room, or "
            "whatever else it takes, and go on with the same command"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a kill or a full disk leaves the old or the new one; else TrainingError."""
    with writing(path), written_whole(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def exclusive_access(work: Path) -> Iterator[None]:
    """Lock a working folder until the process ends; OptionError if it is locked, TrainingError if not writable."""
    made = [folder for folder in (work, work.parent) if not folder.exists()]
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            owner = "another process"
            with contextlib.suppress(OSError, ValueError):
                owner = f"process {int((work / _OWNER).read_text())}"
            raise OptionError(
                f"{owner} is training in {str(work.parent)!r}: wait until it ends, end it, or name a new folder"
            ) from error
    try:
        write_whole(work / _OWNER, f"{os.getpid()}\n")
        yield
    finally:
        if {path.name for path in work.glob("*")} <= {_LOCK, _OWNER}:
            for path in list(work.glob("*")):
                path.unlink()
        lock.release()
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails unless it is empty, when nothing was begun


def refuse_busy(work: Path) -> None:
    """Raise OptionError if another process is training in a working folder."""
    if (work / _LOCK).is_file():
        with exclusive_access(work):
            pass


def clear_work(out: Path) -> int:
    """Remove only a training's working files, and return the freed bytes.

    Raises OptionError if there are none or another process is training there, TrainingError on failure.
    """
    places = [out / place for place in PLACES if (out / place).is_dir()]
    files = [path for place in places for pattern in _WORKING for path in place.glob(pattern) if path.is_file()]
    if not files:
        raise OptionError(f"{str(out)!r} holds no working files of a training; there is nothing to remove")
    work = out / WORK
    with exclusive_access(work):
        freed = sum(path.stat().st_size for path in files)
        with writing(out):
            for path in (*files, work / _OWNER, work / _LOCK):
                path.unlink(missing_ok=True)
    for place in (*places, out / "stage-1", out):
        with contextlib.suppress(OSError):
            place.rmdir()  # fails unless it is empty
    return freed


def finish_work(out: Path) -> None:
    """Remove a training's working files except the log, which moves to the output; TrainingError on failure."""
    logs = [out / place / LOG for place in PLACES if (out / place / LOG).is_file()]
    with writing(out):
        if logs:
            logs[0].replace(out / LOG)
    with contextlib.suppress(OptionError):  # there are no working files
        clear_work(out)


def log_of(out: Path) -> Path:
    """The path of a training's log."""
    return next((path for place in PLACES if (path := out / place / LOG).is_file()), out / LOG)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class TimeBudget:
    """The time limit of a whole command, counted from construction; None sets no limit.

    Raises OptionError if minutes is not above 0.
    """

    def __init__(self, minutes: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None:
            check_positive("minutes", minutes)
        self.minutes = minutes
        self._clock = clock
        self._began = self._loaded = clock()

    @property
    def limited(self) -> bool:
        return self.minutes is not None

    def loaded(self) -> None:
        """Mark the end of loading and trials: shares are of the remaining time from now on."""
        self._loaded = self._clock()

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is spent, at least 0; infinite without a limit."""
        return max(0.0, self._loaded + share * self._work_s - self._clock()) if self.limited else math.inf

    @property
    def _work_s(self) -> float:
        return max(0.0, self._began + (self.minutes or 0.0) * 60.0 - self._loaded)

    def over(self, share: float = 1.0) -> bool:
        return self.left_s(share) <= 0.0

    def within(self, seconds: float) -> Callable[[], bool]:
        """A function that returns whether `seconds`, or the whole budget, have passed; False without a limit."""
        end = self._clock() + seconds
        return lambda: self.limited and (self._clock() >= end or self.over())

    def steps(self, most: int, step_s: float, *, begin: float = 0.0, until: float = TRAINED) -> int:
        """Training steps of `step_s` that fit between two shares, from 1 to `most`."""
        if self.minutes is None:
            return most
        left_s = min(self.left_s(until), (until - begin) * self._work_s)
        return max(1, min(most, int(_MARGIN * left_s / max(step_s, 1e-9))))

    def buys(self, steps: int, requested: int, words: str, on_note: Callable[[str], None]) -> None:
        """Report the effect of few steps beforehand; TrainingError if they are too few for a useful drafter."""
        if self.minutes is None or steps >= min(requested, _FEW_STEPS):
            return
        least, some = (
            f"{math.ceil(self.minutes * min(each, requested) / steps):,}" for each in (_LEAST_STEPS, _FEW_STEPS)
        )
        got = f"in {self.minutes:g} minutes there is time for {words}"
        if steps < min(requested, _LEAST_STEPS):
            raise TrainingError(
                f"{got}, from which a drafter learns next to nothing: give it --minutes {least} for the least, some "
                f"{some} for one that helps, a faster machine, or a smaller drafter"
            )
        on_note(f"{got}, and a drafter learns little in fewer than {_FEW_STEPS}: some {some} minutes help")


def duration(seconds: float) -> str:
    """Seconds as text."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.1f} seconds"
