"""The process in which a draft model drafts ahead, and the pipes to it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from truedraft.drafters.parallel.ahead import AheadDrafter, Call, Reply
from truedraft.errors import DrafterError

_MAIN = "from truedraft.drafters.parallel.process import main; main()"


class DraftProcess:
    """Drafts in a process of its own, so that neither the interpreter's lock nor the target's forward holds it up.

    The process begins to load its model when this is made, and ends when this is forgotten, when it is closed, or when
    the process that it serves is gone, however that came about: it reads from a pipe that then ends. Ctrl-C in a
    terminal does not reach it.

    Args:
        make: makes what drafts, there; it is pickled.
        threads: that its forwards use.
    """

    def __init__(self, make: Callable[[], AheadDrafter], threads: int = 1) -> None:
        self._work = pickle.dumps((threads, make))
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        self._errors = errors
        self._ready = False
        self._close = weakref.finalize(self, _end, self._process, errors)
        self._tell(self._work)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._close.alive

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def end(self, request: int) -> None:
        """A request is over; nothing happens where the process is gone."""
        if self.alive:
            self._tell(pickle.dumps(("end", request), protocol=5))

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each call; behind that it drafts ahead.

        Raises:
            DrafterError: the draft model cannot be loaded or failed, or the process is gone.
        """
        self._tell(pickle.dumps(("propose", calls), protocol=5))
        reply = self._next()
        if isinstance(reply, str):
            raise DrafterError(reply)
        return reply

    def close(self) -> None:
        """End the process."""
        self._close()

    def _tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._gone() from error
        except BaseException:  # half a message would be taken for another
            self._start_again()
            raise

    def _next(self) -> Reply | str:
        """What it answers, once its model is there.

        Raises:
            DrafterError: the process is gone, or has no model.
        """
        assert self._process.stdout is not None
        try:
            if not self._ready:
                problem = pickle.load(self._process.stdout)
                if problem is not None:
                    self.close()
                    raise DrafterError(problem)
                self._ready = True
            reply: Reply | str = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise self._gone() from error
        except DrafterError:
            raise
        except BaseException:  # as by Ctrl-C: the answer would be taken for that to the next call
            self._start_again()
            raise
        return reply

    def _start_again(self) -> None:
        self.close()
        self._start()

    def _gone(self) -> DrafterError:
        status, told = self._process.wait() if self._hung_up() else None, ""
        if not self._errors.closed:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            told = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        self.close()
        return DrafterError(f"the process that drafts ended with status {status}{told}")

    def _hung_up(self) -> bool:
        """Whether it is over, which it may be about to be where a pipe to it broke."""
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return False
        return True


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a process, whatever it is at; it holds nothing that is worth keeping."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was not yet written to a process that is gone
            pass


def main() -> None:
    """What the process does: read a call, answer it, draft ahead, until nobody calls any more."""
    calls, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        threads, make = pickle.load(calls)
        torch.set_num_threads(threads)
        drafter: AheadDrafter = make()
        _answer(replies, None)
    except EOFError:
        return
    except Exception as error:
        _answer(replies, f"the draft cannot be loaded in a process of its own ({type(error).__name__}: {error})")
        return
    with torch.inference_mode():
        try:
            _serve(drafter, calls, replies)
        except (EOFError, BrokenPipeError):  # nobody is there any more
            return


def _serve(drafter: AheadDrafter, calls: IO[bytes], replies: IO[bytes]) -> None:
    while True:
        kind, given = pickle.load(calls)
        if kind == "propose":
            with drafter.drafter.model.stepping():
                reply: Reply | str
                try:
                    reply = drafter.propose(given)
                except Exception as error:
                    reply = f"{type(error).__name__}: {error}"
                _answer(replies, reply)
                drafter.draft_ahead()
        else:
            drafter.end(given)


def _answer(replies: IO[bytes], reply: Any) -> None:
    pickle.dump(reply, replies, protocol=5)
    replies.flush()
