"""From exceptions to one line on standard error, a JSON object if requested, and an exit status.

0 done; 1 the check or run failed; 2 unusable arguments; 3 not enough evidence (certify); 130 interrupted. In certify 1
always means that a check failed; any other error is 3.
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

from truedraft import errors
from truedraft.cli.terminal import say

DONE, FAILED, UNUSABLE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

_UNUSABLE = (
    errors.OptionError, errors.PromptError, errors.ModelNotFoundError, errors.UnsupportedModelError,
    errors.CompositionError, errors.DataError, errors.PeerError,
)  # fmt: skip
_DEBUG = "TRUEDRAFT_DEBUG"


class InterruptedCommandError(errors.TruedraftError):
    """Ctrl-C ended a command before it had a result."""


class UndecidedError(errors.TruedraftError):
    """A certificate ended without a verdict."""

    @classmethod
    def because(cls, error: BaseException, advice: str) -> UndecidedError:
        undecided = cls(f"{describe(error)}; {advice}")
        undecided.field = getattr(error, "field", None)
        return undecided


def exit_status(error: BaseException) -> int:
    """The exit status of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt | InterruptedCommandError):
        return INTERRUPTED
    if isinstance(error, UndecidedError):
        return UNDECIDED
    if isinstance(error, _UNUSABLE) or is_usage_error(error):
        return UNUSABLE
    return FAILED


def report(error: BaseException) -> int:
    """Print an error in one line on standard error; returns the exit status.

    A traceback is shown only if the environment variable TRUEDRAFT_DEBUG is 1.
    """
    if os.environ.get(_DEBUG) == "1":
        traceback.print_exception(error)
    status = exit_status(error)
    say(describe(error) if status == INTERRUPTED else f"error: {describe(error)}")
    return status


def error_record(command: str | None, error: BaseException) -> dict[str, Any]:
    """The JSON object of a command ("generate", or None for an unknown one) that ended with an error."""
    record = {"command": command, "error": describe(error), "status": exit_status(error)}
    return record | {"field": getattr(error, "field", None)}


def warn(message: str) -> None:
    """Print a line on standard error, once per command."""
    logging.getLogger("truedraft.cli").warning(message)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """During a command, print each distinct warning of this package once, as one line on standard error.

    A warning with a traceback records a failure that answers also report: it is printed at the command's end, if no
    other line had it.
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
    """The error in a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, errors.TruedraftError):
        return str(error)
    if is_usage_error(error):
        return _describe_usage(error)
    if isinstance(error, OSError) and error.strerror:  # such as a full disk, or a file without permission
        return f"cannot read or write {error.filename or 'a file'} ({error.strerror})"
    return f"internal error: {type(error).__name__}: {error}; please report it ({_DEBUG}=1 shows where it happened)"


def is_usage_error(error: BaseException) -> bool:
    """Whether the command line could not be parsed.

    By its version, typer has its own copy of click's exceptions or uses click's, so they are recognized by shape.
    """
    return callable(getattr(error, "format_message", None))


def _describe_usage(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "truedraft")
    message = _unknown_option(error) or error.format_message()  # type: ignore[attr-defined]
    message = message.strip().rstrip(".")
    # An option of a subcommand may have been typed without the subcommand.
    known = getattr(getattr(context, "command", None), "commands", {})
    if known and (given := re.match(r"No such command '(.*?)'", message)):  # typer would list several similar ones
        return f"{errors.UnknownOptionError.nearest('command', given[1], known)} (see {command} --help)"
    first = f"; name one of its commands first: {', '.join(known)}" if known else ""
    return f"{message[:1].lower()}{message[1:]}{first} (see {command} --help)"


def _unknown_option(error: BaseException) -> str | None:
    given = getattr(error, "option_name", None)
    if given is None or type(error).__name__ != "NoSuchOption":
        return None
    params = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])
    valid = ["--help", *(name for param in params for name in param.opts if name.startswith("-"))]
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.5)
    return f"unknown option {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")
