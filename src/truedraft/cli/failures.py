"""From exceptions to one line on standard error and an exit status.

0 done; 1 the check or run failed; 2 unusable arguments; 3 not enough evidence (certify); 130 interrupted.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

from truedraft.errors import (
    CompositionError,
    DataError,
    ModelNotFoundError,
    OptionError,
    PromptError,
    TruedraftError,
    UnsupportedModelError,
)

DONE, FAILED, UNUSABLE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

_UNUSABLE = (OptionError, PromptError, ModelNotFoundError, UnsupportedModelError, CompositionError, DataError)
_DEBUG = "TRUEDRAFT_DEBUG"

P = ParamSpec("P")


def exit_status(error: BaseException) -> int:
    """The exit status that an error ends the command with."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, _UNUSABLE) or _is_usage_error(error):
        return UNUSABLE
    return FAILED


def report(error: BaseException) -> int:
    """Say on standard error, in one line, what went wrong; returns the exit status.

    A traceback is shown only where the environment variable TRUEDRAFT_DEBUG is 1.
    """
    if os.environ.get(_DEBUG) == "1":
        traceback.print_exception(error)
    interrupted = isinstance(error, KeyboardInterrupt)
    say("interrupted" if interrupted else f"error: {describe(error)}")
    return exit_status(error)


def telling(command: Callable[P, int]) -> Callable[P, int]:
    """The command, which tells of an interruption by itself: typer, depending on its version, would end silently."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as error:
            return report(error)

    return run


def say(message: str) -> None:
    """One line on standard error, whatever line breaks the message holds."""
    sys.stderr.write(f"truedraft: {' '.join(message.split())}\n")
    sys.stderr.flush()


def describe(error: BaseException) -> str:
    """What went wrong, in a sentence."""
    if isinstance(error, TruedraftError):
        return str(error)
    if _is_usage_error(error):
        return _describe_usage(error)
    return f"internal error: {type(error).__name__}: {error}; please report it ({_DEBUG}=1 shows where it happened)"


def _is_usage_error(error: BaseException) -> bool:
    """Whether the command line could not be read.

    typer carries click's exceptions as its own or as click's, depending on its version, so they are known by shape.
    """
    return callable(getattr(error, "format_message", None))


def _describe_usage(error: BaseException) -> str:
    command = getattr(getattr(error, "ctx", None), "command_path", "truedraft")
    message = _unknown_option(error) or error.format_message()  # type: ignore[attr-defined]
    message = message.strip().rstrip(".")
    return f"{message[:1].lower()}{message[1:]} (see {command} --help)"


def _unknown_option(error: BaseException) -> str | None:
    """Name an option that does not exist, and the nearest that does."""
    given = getattr(error, "option_name", None)
    if given is None or type(error).__name__ != "NoSuchOption":
        return None
    params = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])
    valid = ["--help", *(name for param in params for name in param.opts if name.startswith("-"))]
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.5)
    return f"unknown option {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")
