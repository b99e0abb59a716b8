"""A form is tried in a process of its own before this one makes it: what it takes is known only then.

The library bounds most of its work, and not all: an intersection of expressions, or multiples of a large number, may
take minutes and gigabytes, and rules nested too deeply end the process.
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

MOST_SECONDS = 3
"""Of a processor, that preparing a form may take."""
MOST_BYTES = 128 << 20
"""That one may hold."""
_ROOM = 64 << 20  # of addresses, beside what a form holds: what it takes meanwhile, and the thread's stack
_STACK = 1 << 20  # bytes; an eighth of what threads have where a form is made
_STATM = Path("/proc/self/statm")  # of Linux: pages of addresses, and of memory
_MAIN = "from truedraft.text.trial import main; main()"


class Trial:
    """Prepares one form in another process, of the lowest priority, to see what it takes; any thread may cancel it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End it where it stands, or before it begins."""
        with self._guard:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    def run(self, tokenizer: str, grammar: str, limits: dict[str, Any], vocab_size: int, eos_id: int) -> int | str:
        """Prepare a form.

        Args:
            tokenizer: as JSON.
            grammar: as the library reads it.
            limits: of the library.
            vocab_size: how many ids there are.
            eos_id: ends a text.

        Returns:
            The bytes that it holds, or why the library refuses it.

        Raises:
            OptionError: it takes too much.
            CancelledError: somebody did so.
        """
        most = MOST_SECONDS, MOST_BYTES
        work = json.dumps([tokenizer, grammar, limits, {"n_vocab": vocab_size, "eos_token": eos_id}, most]).encode()
        with self._guard:
            if self._cancelled:
                raise CancelledError
            self._process = process = self._started()
        try:
            told, _ = process.communicate(work)
        finally:
            process.kill()
            process.wait()
        with self._guard:
            if self._cancelled:
                raise CancelledError
        if process.returncode or not told:
            raise OptionError(_ending(process.returncode), field="structured")
        found: int | str = json.loads(told)
        if isinstance(found, int) and found > MOST_BYTES:
            raise OptionError(_too_large(), field="structured")
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
            start_new_session=True,
        )


def _too_large() -> str:
    return f"would hold more than {MOST_BYTES >> 20} MiB; make it simpler, as by smaller multipleOf"


def _ending(status: int) -> str:
    """What the end of the process says of the form."""
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"takes more than {MOST_SECONDS} s to prepare; make it simpler, as by smaller multipleOf"
    if status == -signal.SIGSEGV:
        return "has rules that lead to each other too deeply; make it flatter"
    if status == -signal.SIGABRT:  # which is how the library ends where there is no memory
        return _too_large()
    return f"cannot be prepared (the process that tried ended with status {status}); make it simpler"


def main() -> None:
    """What the process does: it says what the form holds, or why there is none."""
    if hasattr(os, "nice"):
        os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # this gives way at once to any thread that wakes up
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
    """Bound what comes, where the system can do so; returns the bytes of memory that are taken already."""
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
    """Bytes of memory that are taken."""
    if _STATM.exists():
        return _pages(1)
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes where there is no such file, on a Mac


def _pages(column: int) -> int:
    return int(_STATM.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
