"""What failed in an engine and was got over: counted, logged once with its traceback, and warned of once."""

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
# Where nobody set up logging Python prints to standard error what has no handler, tracebacks too.
logging.getLogger("truedraft").addHandler(logging.NullHandler())


class Failures:
    """The failures of one engine's parts. They cost no answer, so nobody would see them if they were not told."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()
        self._warned = False

    def log(self, who: str, error: Exception) -> None:
        """Log a failure with its traceback, unless the same was logged before: one kind of error at one line.

        The traceback goes on to name its lines, but its frames let go of what they hold. An answer keeps its error, and
        these would keep tensors and caches with it, where memory may be what is short.

        Args:
            who: what failed.
            error: how.
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
        """What something finds for each item.

        Where it fails for all together, each is tried alone: so shows whose fault it was. It finds None for these, and
        their requests are given up.

        Args:
            who: works.
            items: of a step, at least one.
            work: finds something for each of some items.
            give_up: is told of a request that it fails for.
        """
        try:
            return list(work(items))
        except Exception as error:
            if len(items) == 1:
                give_up(items[0].request, error)
                return [None]
            self.asked_again([item.request for item in items], who, error)
            return [found for item in items for found in self.together(who, [item], work, give_up)]

    def asked_again(self, requests: Sequence[Request], who: str, error: Exception) -> None:
        """Something failed for several requests together, and they are now asked for apart.

        Args:
            requests: each counts one recovery.
            who: what failed.
            error: how.
        """
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
