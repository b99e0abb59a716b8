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
    """Drafts in a process of its own, so that neither the interpreter's lock nor the target's forward holds it up.

    The process begins to load its model when this is made, and ends when this is forgotten, when it is closed, or when
    the process that it serves is gone, however that came about: it reads from a pipe that then ends. It ends by what
    it raises, too, and where a call is interrupted, as by Ctrl-C.

    Args:
        make: makes what drafts, there; it is pickled.
        threads: that its forwards use.
    """

    def __init__(self, make: Callable[[], AheadDrafter], threads: int = 1) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
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
        """Whether it can be asked."""
        return self.close.alive

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def end(self, request: int) -> None:
        """A request is over.

        Raises:
            DrafterError: the process is gone.
        """
        with self._talking() as calls:
            pickle.dump(("end", request), calls, protocol=5)

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each call; behind that it drafts ahead.

        Raises:
            DrafterError: the process is gone, as where the draft model cannot be loaded or failed.
        """
        assert self._process.stdout is not None
        with self._talking() as pipe:
            pickle.dump(("propose", calls), pipe, protocol=5)
            pipe.flush()
            reply: Reply = pickle.load(self._process.stdout)
            return reply

    @contextmanager
    def _talking(self) -> Iterator[IO[bytes]]:
        """The pipe to the process."""
        assert self._process.stdin is not None
        try:
            yield self._process.stdin
            self._process.stdin.flush()
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise DrafterError(self._gone()) from error
        except BaseException:  # half a message, or the answer to it, would be taken for another
            self.close()
            raise

    def _gone(self) -> str:
        """How the process ended, which it may be about to do where a pipe to it broke."""
        status, lines = None, [""]
        if self.alive:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=5.0)
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        self.close()
        told = next((f": {line}" for line in reversed(lines) if line), "")
        return f"the process that drafts ended with status {status}{told}"


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a process, whatever it is at; it holds nothing that is worth keeping."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        with suppress(OSError):  # what was not yet written to a process that is gone
            if pipe is not None:
                pipe.close()


def main() -> None:
    """What the process does: read a call, answer it, draft ahead, until nobody calls any more."""
    calls, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    threads, make = pickle.load(calls)
    torch.set_num_threads(threads)
    drafter: AheadDrafter = make()
    with torch.inference_mode(), suppress(EOFError, BrokenPipeError):  # nobody is there any more
        while True:
            kind, given = pickle.load(calls)
            try:
                _serve(drafter, kind, given, replies)
            except CutShortError as cut:  # the caller drafts the same again by itself, and is told the cause
                raise cut.__cause__ or cut from None


def _serve(drafter: AheadDrafter, kind: str, given: Any, replies: IO[bytes]) -> None:
    if kind == "end":
        drafter.end(given)
        return
    with drafter.drafter.model.stepping():
        pickle.dump(drafter.propose(given), replies, protocol=5)
        replies.flush()
        drafter.draft_ahead()
