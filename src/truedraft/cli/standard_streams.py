"""Standard input, output and error, whatever state and encoding a command finds them in."""

from __future__ import annotations

import errno
import os
import sys

from truedraft.cli.failures import say


def prepare_streams() -> None:
    """UTF-8 in and out under any locale; a closed descriptor becomes one that swallows everything.

    Otherwise the next file that is opened would take its number, and whoever writes to standard error would write
    there. Half characters are written out, as \\udcff, which in JSON is what they are.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def output_is_open() -> bool:
    """Whether there is a standard output; says so on standard error if not."""
    if sys.stdout is None:
        say("error: standard output is closed; send it to a file, or to /dev/null")
    return sys.stdout is not None


def output_was_taken() -> bool:
    """Whether standard output took all that was written; says so on standard error if not, unless its reader left.

    What it did not take is given up, else the interpreter would try again at its end, and fail in its own words.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say(f"error: standard output cannot be written ({error.strerror or error})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True
