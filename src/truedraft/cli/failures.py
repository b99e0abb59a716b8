"""From exceptions to one line on standard error, a JSON object where one was asked for, and an exit status.

0 done; 1 the check or run failed; 2 unusable arguments; 3 not enough evidence (certify); 130 interrupted. In certify 1
says that a check failed, and nothing else does: whatever breaks on the way is 3.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

from truedraft.cli.streams import say
from truedraft.errors import (
    CompositionError,
    DataError,
    ModelNotFoundError,
    OptionError,
    PeerError,
    PromptError,
    TruedraftError,
    UnknownOptionError,
    UnsupportedModelError,
)

DONE, FAILED, UNUSABLE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

_UNUSABLE = (
    OptionError, PromptError, ModelNotFoundError, UnsupportedModelError, CompositionError, DataError, PeerError
)  # fmt: skip
_DEBUG = "TRUEDRAFT_DEBUG"


class InterruptedCommandError(TruedraftError):
    """Ctrl-C ended a command before it had anything to show."""


class UndecidedError(TruedraftError):
    """A certificate ended before its verdict: nothing was found, and nothing was shown."""

    @classmethod
    def because(cls, error: BaseException, advice: str) -> UndecidedError:
        """What ended it, and what to do now."""
        undecided = cls(f"{describe(error)}; {advice}")
        undecided.field = getattr(error, "field", None)
        return undecided


def exit_status(error: BaseException) -> int:
    """The exit status that an error ends the command with."""
    if isinstance(error, KeyboardInterrupt | InterruptedCommandError):
        return INTERRUPTED
    if isinstance(error, UndecidedError):
        return UNDECIDED
    if isinstance(error, _UNUSABLE) or is_usage_error(error):
        return UNUSABLE
    return FAILED


def report(error: BaseException) -> int:
    """Say on standard error, in one line, what went wrong; returns the exit status.

    A traceback is shown only where the environment variable TRUEDRAFT_DEBUG is 1.
    """
    if os.environ.get(_DEBUG) == "1":
        traceback.print_exception(error)
    status = exit_status(error)
    say(describe(error) if status == INTERRUPTED else f"error: {describe(error)}")
    return status


def error_record(command: str | None, error: BaseException) -> dict[str, Any]:
    """The JSON object of a command that ended with nothing else to show.

    Args:
        command: as "generate"; None where there is no such command.
        error: what ended it.
    """
    told = {"command": command, "error": describe(error), "status": exit_status(error)}
    return told | {"field": getattr(error, "field", None)}


def warn(message: str) -> None:
    """One line on standard error, once in a command."""
    logging.getLogger("truedraft.cli").warning(message)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """While a command runs, each distinct warning of this package is one line on standard error, said once.

    One with a traceback is the record of a failure that answers tell of as well: it waits for the command's end, and is
    said where no other line had it.
    """
    said: dict[str, None] = {}
    failures: dict[str, None] = {}

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = f"{record.levelname.lower()}: {record.getMessage()}"
            if record.exc_info:
                failures[line] = None
            elif line not in said:
                said[line] = None
                say(line)

    handler, logger = Lines(logging.WARNING), logging.getLogger("truedraft")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for line in failures:
            if not any(other.startswith(line) for other in said):
                say(line)


def describe(error: BaseException) -> str:
    """What went wrong, in a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, TruedraftError):
        return str(error)
    if is_usage_error(error):
        return _describe_usage(error)
    if isinstance(error, OSError) and error.strerror:  # a full disk, or a file that is another user's
        return f"cannot read or write {error.filename or 'a file'} ({error.strerror})"
    return f"internal error: {type(error).__name__}: {error}; please report it ({_DEBUG}=1 shows where it happened)"


def is_usage_error(error: BaseException) -> bool:
    """Whether the command line could not be read.

    typer carries click's exceptions as its own or as click's, depending on its version, so they are known by shape.
    """
    return callable(getattr(error, "format_message", None))


def _describe_usage(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "truedraft")
    message = _unknown_option(error) or error.format_message()  # type: ignore[attr-defined]
    message = message.strip().rstrip(".")
    # Of a command that has commands, what belongs to one of them may have been typed without its name.
    known = getattr(getattr(context, "command", None), "commands", {})
    if known and (given := re.match(r"No such command '(.*?)'", message)):  # typer would name several that are near
        return f"{UnknownOptionError.nearest('command', given[1], known)} (see {command} --help)"
    first = f"; name one of its commands first: {', '.join(known)}" if known else ""
    return f"{message[:1].lower()}{message[1:]}{first} (see {command} --help)"


def _unknown_option(error: BaseException) -> str | None:
    """Name an option that does not exist, and the nearest that does."""
    given = getattr(error, "option_name", None)
    if given is None or type(error).__name__ != "NoSuchOption":
        return None
    params = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])
    valid = ["--help", *(name for param in params for name in param.opts if name.startswith("-"))]
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.5)
    return f"unknown option {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")
