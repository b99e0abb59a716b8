"""Prepares the grammars of structured answers before their requests are queued, so that no other request waits."""

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
    """Prepares forms in its own threads: quick ones in two, and slow ones, which need a trial, one at a time.

    Args:
        forms: of the engine; None if its model has no tokenizer.
    """

    def __init__(self, forms: Forms | None) -> None:
        self._forms = forms
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="truedraft-forms")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="truedraft-trials")
        self._open: set[asyncio.Future[Any]] = set()
        self._stopped = threading.Event()

    async def prepared(self, structured: Structured, deadline: float | None, owner: Hashable = None) -> Prepared | None:
        """Prepare a form, which stays cached while the result is referenced. Cancelling this stops the work.

        Args:
            deadline: by `time.monotonic`; None is no limit.
            owner: forms are shared only within one owner.

        Returns:
            None if requests with it are to be refused.

        Raises:
            ApiError: it took too long, or the server is being stopped.
            TruedraftError: the form cannot be prepared.
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
        """Run work in a thread; cancelling this removes work that has not begun."""
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
        """Refuse open and future forms; called in the event loop."""
        self._stopped.set()
        for each in list(self._open):
            each.cancel()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False)


def stopping(again_in_s: int = 1) -> ApiError:
    """The error of requests to a server that is being stopped."""
    message = "the server is being stopped; ask again, elsewhere or in a moment"
    return ApiError(503, message, headers={"Retry-After": str(again_in_s)})
