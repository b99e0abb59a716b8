"""Forms of structured answers are prepared before their requests are queued, where nobody else waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from truedraft.core.params import Structured
from truedraft.server.errors import ApiError
from truedraft.text.forms import Forms, Prepared
from truedraft.text.trial import Trial

_Value = TypeVar("_Value")


class FormQueue:
    """Prepares forms in threads of its own: quick ones, and one at a time of those that are tried first.

    Args:
        forms: of the engine; None where its model has no tokenizer.
    """

    def __init__(self, forms: Forms | None) -> None:
        self._forms = forms
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="truedraft-forms")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="truedraft-trials")
        self._open: set[asyncio.Future[Any]] = set()
        self._stopped = threading.Event()

    async def prepared(self, structured: Structured, deadline: float | None, owner: Hashable = None) -> Prepared | None:
        """A form, which is there for requests as long as this is held; None where they are to be refused for it.

        Whoever cancels this ends what is done for it.

        Args:
            structured: what is asked for.
            deadline: by `time.monotonic`; None is no limit.
            owner: who asks; forms are shared within one alone.

        Raises:
            ApiError: it took too long, or the server is being stopped.
            TruedraftError: the form cannot be had.
        """
        forms = self._forms
        if forms is None or (found := forms.found(structured, owner)):
            return None if forms is None else found
        trial = Trial()
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left):
                grammar, is_quick = await self._run(self._quick, forms.grammar, structured)
                pool = self._quick if is_quick else self._slow
                return await self._run(pool, forms.make, structured, grammar, is_quick, trial, owner)
        except TimeoutError:
            raise ApiError(504, "the form took longer to prepare than this server allows; make it simpler") from None
        finally:
            trial.cancel()

    async def _run(self, pool: Executor, work: Callable[..., _Value], *given: Any) -> _Value:
        """Do some work in a thread; where that has not begun, whoever cancels this takes it back."""
        if self._stopped.is_set():
            raise stopping()
        doing = asyncio.wrap_future(pool.submit(work, *given))
        self._open.add(doing)
        try:
            return await doing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped.is_set() and task is not None and not task.cancelling():
                raise stopping() from None
            raise
        finally:
            self._open.discard(doing)

    def abort(self) -> None:
        """Refuse what is open, and all that comes; called in the event loop."""
        self._stopped.set()
        for each in list(self._open):
            each.cancel()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False)


def stopping(again_in_s: int = 1) -> ApiError:
    """What requests are told where the server takes none any more."""
    message = "the server is being stopped; ask again, elsewhere or in a moment"
    return ApiError(503, message, headers={"Retry-After": str(again_in_s)})
