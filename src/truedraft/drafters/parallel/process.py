"""The process in which a draft model drafts ahead, and the pipes to it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import torch

from truedraft.drafters.base import CutShortError
from truedraft.drafters.parallel.ahead import AheadDrafter, Call, Reply
from truedraft.errors import DrafterError

_MAIN = "from truedraft.drafters.parallel.process import main; main()"


class DraftProcess:
    """Drafts in a separate process, so that neither the interpreter's lock nor the target's forward blocks it.

    It starts to load its model at once. It ends when this object is closed or collected, when the parent process ends,
    on an exception of its own, and if a call is interrupted, as by Ctrl-C. `make`, which makes its drafter, is pickled.
    """

    def __init__(self, make: Callable[[], AheadDrafter], threads: int = 1) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
            start_new_session=True,  # Ctrl-C in a terminal does not reach it
        )
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        with self._talking() as calls:
            pickle.dump((threads, make), calls, protocol=5)

    @property
    def alive(self) -> bool:
        return self.close.alive

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, request: int) -> None:
        """Send the end of a request; raises `DrafterError` if the process has ended."""
        with self._talking() as calls:
            pickle.dump(("end", request), calls, protocol=5)

    def propose(self, calls: Sequence[Call]) -> Reply:
        """Draft one chain per call, then ahead; raises `DrafterError` if the process has ended."""
        assert self._process.stdout is not None
        with self._talking() as pipe:
            pickle.dump(("propose", calls), pipe, protocol=5)
            pipe.flush()
            reply: Reply = pickle.load(self._process.stdout)
            return reply

    @contextmanager
    def _talking(self) -> Iterator[IO[bytes]]:
        assert self._process.stdin is not None
        try:
            yield self._process.stdin
            self._process.stdin.flush()
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise DrafterError(self._ended()) from error
        except BaseException:  # half a message, or its reply, would be read as part of the next
            self.close()
            raise

    def _ended(self) -> str:
        """How the process ended; a broken pipe may come shortly before its end."""
        status, lines = None, [""]
        if self.alive:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=5.0)
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        self.close()
        detail = next((f": {line}" for line in reversed(lines) if line), "")
        return f"the process that drafts ended with status {status}{detail}"


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        with suppress(OSError):  # data was not yet written when the process ended
            if pipe is not None:
                pipe.close()


def main() -> None:
    """The main loop of the process: read a call, reply, draft ahead."""
    calls, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that libraries print must not enter the pipe
    threads, make = pickle.load(calls)
    torch.set_num_threads(threads)
    drafter: AheadDrafter = make()
    with torch.inference_mode(), suppress(EOFError, BrokenPipeError):  # the parent process has ended
        while True:
            kind, given = pickle.load(calls)
            try:
                _serve(drafter, kind, given, replies)
            except CutShortError as cut:  # the caller drafts the same again by itself, and reports the cause
                raise cut.__cause__ or cut from None


def _serve(drafter: AheadDrafter, kind: str, given: Any, replies: IO[bytes]) -> None:
    if kind == "end":
        drafter.end(given)
        return
    with drafter.drafter.model.stepping():
        pickle.dump(drafter.propose(given), replies, protocol=5)
        replies.flush()
        drafter.draft_ahead()
