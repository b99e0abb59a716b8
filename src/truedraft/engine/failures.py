"""Failures that an engine recovered from: counted, logged once with a traceback, and warned of once."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from truedraft.engine.batch import StepItem
from truedraft.engine.request import Request

Found = TypeVar("Found")

_log = logging.getLogger(__name__)
# Without logging handlers Python prints records to standard error, tracebacks too.
logging.getLogger("truedraft").addHandler(logging.NullHandler())


class Failures:
    """The failures of one engine's parts. They fail no answer, so they would go unnoticed if they were not logged."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()
        self._warned = False

    def log(self, who: str, error: Exception) -> None:
        """Log a failure with its traceback, unless the same kind of error at the same line was logged before.

        The traceback keeps its lines, but the locals of its frames are cleared: an answer keeps its error, which would
        keep tensors and caches alive when memory may be short.
        """
        last = traceback.extract_tb(error.__traceback__)[-1:]
        kind = (who, type(error), *((frame.filename, frame.lineno) for frame in last))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s failed (%s)", who, told(error), exc_info=error)
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def together(
        self,
        who: str,
        items: Sequence[StepItem],
        work: Callable[[Sequence[StepItem]], Sequence[Found]],
        give_up: Callable[[Request, Exception], None],
    ) -> list[Found | None]:
        """Call `work` for all items together; if that fails, for each item separately.

        An item that fails separately gets None, and its request is given up.

        Args:
            items: of a step, at least one.
            work: returns a result for each item.
            give_up: is called with a request for which it fails, and the error.
        """
        try:
            return list(work(items))
        except Exception as error:
            if len(items) == 1:
                give_up(items[0].request, error)
                return [None]
            self.count_retry([item.request for item in items], who, error)
            return [found for item in items for found in self.together(who, [item], work, give_up)]

    def count_retry(self, requests: Sequence[Request], who: str, error: Exception) -> None:
        """Log that something failed for several requests together, and is now tried separately."""
        self.log(who, error)
        for request in requests:
            request.counters.recoveries += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{who} failed for {len(requests)} requests together ({told(error)}), so they were asked for "
                "apart, which is slow; stats.recoveries counts how often that happens in this engine",
                RuntimeWarning,
                stacklevel=2,
            )


def told(error: Exception) -> str:
    """An error in one sentence."""
    return f"{type(error).__name__}: {error}"
