"""What the commands that train heads have in common: progress, words of their errors, and how to go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from truedraft.cli.failures import DONE, INTERRUPTED, say
from truedraft.cli.train_job import WORK, Job, checkpoint_lines, notes, same_command, saved_words
from truedraft.errors import OptionError

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.head_config import HeadTrainingConfig

_Result = TypeVar("_Result")
Train: TypeAlias = Callable[..., _Result]
"""`training.heads.train_heads`."""
_PLACES = (Path(WORK) / "joint", Path("stage-1") / WORK, Path(WORK))  # of checkpoints, the latest stage first
_QUIET_S = 120.0  # between two lines on one kind of work, where there is no terminal


def run(
    job: Job,
    config: HeadTrainingConfig,
    train: Train[_Result],
    report: Callable[[Terminal, str, _Result], None],
    record: Callable[[str, _Result], dict[str, Any]],
    typed: Mapping[str, str],
    json: bool,
) -> int:
    """Train with bars, report, and give the exit status.

    Args:
        job: what was typed.
        config: what decides the heads.
        train: the training.
        report: prints a result, for a model of this name.
        record: the same for JSON.
        typed: fields of the library's configuration as they are typed.
        json: whether to end with a JSON object.

    Raises:
        TruedraftError: in words of the command.
    """
    from truedraft.cli.session import quiet_hub
    from truedraft.cli.terminal import Terminal
    from truedraft.training.heads import Callbacks

    terminal = Terminal()
    try:
        with quiet_hub(), _Bars(terminal) as bars:
            result = train(
                job.model,
                job.data,
                job.out,
                config,
                held_out=job.held_out,
                callbacks=Callbacks(bars.show, notes(terminal), notes(terminal), checkpoint_lines(terminal)),
                budget=job.budget,
            )
    except OptionError as error:
        raise OptionError(_as_typed(str(error), typed)) from error
    except KeyboardInterrupt:
        terminal.end_line()
        say(how_to_go_on(job))
        return INTERRUPTED
    report(terminal, job.model, result)
    if json:
        terminal.json(record(job.model, result))
    return DONE


@contextlib.contextmanager
def naming_options(named: Mapping[str, str]) -> Iterator[None]:
    """Put the option in place of a field's name that a message on an unusable value begins with."""
    try:
        yield
    except OptionError as error:
        name, _, rest = str(error).partition(" ")
        raise OptionError(f"{named[name]} {rest}" if name in named else str(error)) from error


class _Bars:
    """One bar after another: each kind of work has its own."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = contextlib.ExitStack()
        self._what: str | None = None
        self._update: Callable[[int, str], None] = lambda done, remark: None
        self._said = time.monotonic()

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, what: str, done: int, total: int, remark: str) -> None:
        """How far a kind of work has come."""
        if what != self._what:
            self._stack.close()
            self._update = self._stack.enter_context(self._terminal.progress(what, total))
            self._what, self._said = what, time.monotonic()
        self._update(done, remark)
        quiet = what == "training" or self._terminal.err.is_terminal  # training has a line for each checkpoint
        if not quiet and time.monotonic() - self._said >= _QUIET_S:
            self._said = time.monotonic()
            say(f"{what}: {done:,} of {total:,} {remark}")


def _as_typed(message: str, typed: Mapping[str, str]) -> str:
    """Name options as they are typed, where the library names fields of its configuration."""
    for field, option in typed.items():
        for before in ("(", "; "):
            message = message.replace(f"{before}{field} was ", f"{before}{option} was ")
    return message


def how_to_go_on(job: Job) -> str:
    """What is kept of an interrupted training, and how to use it."""
    saved = saved_words(job, [job.out / place for place in _PLACES])
    if saved is not None:
        return saved
    if not (job.out / WORK).is_dir():
        return "interrupted before anything was written; the same command begins again"
    return f"interrupted; {same_command(job)} goes on, with the answers that are written"
