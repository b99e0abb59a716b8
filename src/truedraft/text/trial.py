"""A form is tried in a separate process before this one compiles it, because its cost is known only then.

An intersection of expressions, or multiples of a large number, may take minutes and gigabytes, and rules nested too
deeply crash the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import IO, Any

from truedraft.errors import OptionError

MOST_SECONDS = 3  # of a CPU, for compiling a form
MOST_BYTES = 128 << 20  # of a form
_ROOM = 64 << 20  # bytes of addresses in addition to the form: temporary memory, and the thread's stack
_STACK = 1 << 20  # bytes; an eighth of the stack of threads that compile forms
_STATM = Path("/proc/self/statm")  # of Linux: pages of addresses, and of memory
_MAIN = "from truedraft.text.trial import main; main()"


class Trial:
    """Compiles one form in another process, of the lowest priority, to measure it; any thread may cancel it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._guard:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    def run(self, tokenizer: str, grammar: str, limits: dict[str, Any], vocab_size: int, eos_id: int) -> int | str:
        """Compile a form; returns its bytes of memory, or why the library rejects it.

        An `OptionError` if it exceeds a limit, a `CancelledError` if `cancel` was called.
        """
        most = MOST_SECONDS, MOST_BYTES
        work = json.dumps([tokenizer, grammar, limits, {"n_vocab": vocab_size, "eos_token": eos_id}, most]).encode()
        with self._guard:
            if self._cancelled:
                raise CancelledError
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
                start_new_session=True,
            )
        try:
            output, _ = process.communicate(work)
        finally:
            process.kill()
            process.wait()
        with self._guard:
            if self._cancelled:
                raise CancelledError
        if process.returncode or not output:
            raise OptionError(_ending(process.returncode), field="structured")
        found: int | str = json.loads(output)
        if isinstance(found, int) and found > MOST_BYTES:
            raise OptionError(_ending(-signal.SIGABRT), field="structured")
        return found


def _ending(status: int) -> str:
    """Why there is no form, by the signal that ended the process; out of memory, the library aborts."""
    simpler = "make it simpler, as by smaller multipleOf"
    known = {
        -getattr(signal, "SIGXCPU", 0): f"takes more than {MOST_SECONDS} s to prepare; {simpler}",
        -signal.SIGSEGV: "has rules that lead to each other too deeply; make it flatter",
        -signal.SIGABRT: f"would hold more than {MOST_BYTES >> 20} MiB; {simpler}",
    }
    return known.get(status, f"cannot be prepared (the process that tried ended with status {status}); make it simpler")


def main() -> None:
    """Entry point of the process: it prints the bytes of the form, or why there is none."""
    if hasattr(os, "nice"):
        os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # yields immediately to any thread that wakes up
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints must not mix with the result
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_try, args=(sys.stdin.buffer, replies))
    thread.start()
    thread.join()


def _try(calls: IO[bytes], replies: IO[str]) -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer, grammar, limits, vocabulary, most = json.load(calls)
    guide = LLTokenizer(tokenizer, **vocabulary)
    before = _limited(*most)
    matcher = LLMatcher(guide, grammar, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    json.dump(matcher.get_error() if matcher.is_error() else max(_resident() - before, 0), replies)
    replies.flush()


def _limited(most_seconds: int, most_bytes: int) -> int:
    """Set the limits of the process, if the system supports them; returns the bytes of memory already in use."""
    try:
        import resource
    except ImportError:
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + most_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _STATM.exists():
        resource.setrlimit(resource.RLIMIT_AS, (_pages(0) + most_bytes + _ROOM,) * 2)
    return _resident()


def _resident() -> int:
    if _STATM.exists():
        return _pages(1)
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes where there is no such file, on a Mac


def _pages(column: int) -> int:
    return int(_STATM.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
