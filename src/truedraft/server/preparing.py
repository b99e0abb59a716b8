"""Preparation of requests before they are queued, so that no other request waits: grammars, and pictures of chats.

Pictures are data URLs only: a server that fetched clients' URLs would reach what clients cannot.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from truedraft.core.params import Structured
from truedraft.errors import PromptError, TruedraftError
from truedraft.models.base import LanguageModel
from truedraft.models.multimodal import MultimodalPrompt, Picture, Processor, read_picture
from truedraft.server.errors import ApiError, invalid
from truedraft.text.forms import Forms, Prepared
from truedraft.text.histories import first_taken
from truedraft.text.trial import Trial

_Value = TypeVar("_Value")

MOST_PICTURES = 16  # per request
MOST_PIXELS = 2**23  # per request, as in a picture of 3,840 x 2,160; a small file can decode to any number
MOST_READ = 16  # requests with pictures that are processed or wait for it
_READ_IN_S = 5  # the Retry-After of requests above that
_SHOWN = 40


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until a deadline by `time.monotonic`, 0 after it; None without one."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def stopping(again_in_s: int = 1) -> ApiError:
    """The error of requests to a server that is being stopped."""
    return ApiError(503, "the server is being stopped; ask again, elsewhere or in a moment", retry_s=again_in_s)


class FormQueue:
    """Prepares forms in its own threads: quick ones in two, and slow ones, which need a trial, one at a time."""

    def __init__(self, forms: Forms | None) -> None:
        self._forms = forms
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="truedraft-forms")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="truedraft-trials")
        self._open: set[asyncio.Future[Any]] = set()
        self._stopped = threading.Event()

    async def prepared(self, structured: Structured, deadline: float | None, owner: Hashable = None) -> Prepared | None:
        """Prepare a form, cached for its `owner` while the result is referenced; None if requests are to be refused.

        Cancelling this stops the work. An `ApiError` after the deadline, or if the server is being stopped.
        """
        forms = self._forms
        if forms is None or (found := forms.found(structured, owner)):
            return None if forms is None else found
        trial = Trial()
        try:
            async with asyncio.timeout(seconds_left(deadline)):
                grammar, is_quick = await self._run(self._quick, forms.grammar, structured)
                pool = self._quick if is_quick else self._slow
                return await self._run(pool, forms.make, structured, grammar, is_quick, trial, owner)
        except TimeoutError:
            raise ApiError(504, "the form took longer to prepare than this server allows; make it simpler") from None
        finally:
            trial.cancel()

    async def _run(self, pool: Executor, work: Callable[..., _Value], *given: Any) -> _Value:
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


class PictureReader:
    """Processes chats with pictures, one request at a time, in its own thread; refuses them without a processor."""

    def __init__(self, target: LanguageModel) -> None:
        self._processor: Processor | str
        try:
            self._processor = target.processor
        except PromptError as error:
            self._processor = str(error)
        except TruedraftError:  # its message may have paths
            self._processor = "this server reads no pictures, for what its model needs for that is missing; give text"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="truedraft-pictures")
        self._places = threading.BoundedSemaphore(MOST_READ)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], urls: Sequence[str], *, param: str, **how: Any
    ) -> MultimodalPrompt:
        """A conversation as a prompt, with the pictures of `urls` in order, by `Processor.chat` with `how`."""
        processor = self._processor
        if isinstance(processor, str):
            raise invalid(param, processor, "invalid_value")
        if not self._places.acquire(blocking=False):
            message = f"pictures of {MOST_READ} requests are being read already; ask again in {_READ_IN_S} s"
            raise ApiError(429, message, retry_s=_READ_IN_S)

        def read() -> MultimodalPrompt:
            pictures = read_pictures(urls, param)
            return first_taken(messages, lambda form: processor.chat(form, pictures, **how))

        reading = self._thread.submit(read)
        reading.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wrap_future(reading)
        except PromptError as error:
            raise invalid(param, str(error), "invalid_value") from error


def read_pictures(urls: Sequence[str], param: str) -> list[Picture]:
    """The pictures of a request, in order. Slow: do not call it in the event loop."""
    if len(urls) > MOST_PICTURES:
        raise invalid(param, f"{param} holds {len(urls)} pictures, of at most {MOST_PICTURES}")
    left = MOST_PIXELS
    found: list[Picture] = []
    for number, url in enumerate(urls, start=1):
        picture = read_picture(_content(url, param), f"picture {number} of {param}", left)
        left -= picture.width * picture.height
        found.append(picture)
    return found


def _content(url: str, param: str) -> bytes:
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        shown = url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
        message = "a picture must be a data URL, data:image/png;base64,..., for this server fetches nothing, got"
        raise invalid(param, f"{message} {shown!r}", "invalid_image_url")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(param, f"a picture is no base64 ({error})", "invalid_image_url") from error
