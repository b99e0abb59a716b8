"""Pictures in requests. Only data URLs: a server that fetched clients' URLs would reach what clients cannot."""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from truedraft.errors import PromptError, TruedraftError
from truedraft.models.base import LanguageModel
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.models.processor import Processor, read_picture
from truedraft.server.errors import ApiError
from truedraft.text.histories import first_taken

if TYPE_CHECKING:
    from truedraft.models.processor import Picture

MOST_PICTURES = 16
"""Limit of pictures per request."""
MOST_PIXELS = 2**23
"""Limit of pixels per request, as in a picture of 3,840 x 2,160; a small file can decode to any number."""
MOST_READ = 16
"""Limit of requests with pictures that are processed or wait for it."""

_SHOWN = 40
_READ_IN_S = 5  # the Retry-After of requests above the limit


class PictureReader:
    """Processes chats with pictures, one request at a time, in its own thread.

    Args:
        target: its processor is loaded once, at once; if it cannot be, every request with pictures is refused.
    """

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
        """A conversation as a prompt.

        Args:
            messages: in the format of chat templates.
            urls: of the pictures in them, in order.
            param: the field that holds the messages, for errors.
            how: arguments of `Processor.chat`.

        Raises:
            ApiError: the pictures cannot be used, the template refuses the messages, or too many requests wait.
            OptionError: see `Processor.chat`.
        """
        processor = self._processor
        if isinstance(processor, str):
            raise ApiError(400, processor, param=param, code="invalid_value")
        if not self._places.acquire(blocking=False):
            raise ApiError(
                429,
                f"pictures of {MOST_READ} requests are being read already; ask again in {_READ_IN_S} s",
                headers={"Retry-After": str(_READ_IN_S)},
            )

        def read() -> MultimodalPrompt:
            pictures = read_pictures(urls, param)
            return first_taken(messages, lambda form: processor.chat(form, pictures, **how))

        reading = self._thread.submit(read)
        reading.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wrap_future(reading)
        except PromptError as error:
            raise ApiError(400, str(error), param=param, code="invalid_value") from error


def read_pictures(urls: Sequence[str], param: str) -> list[Picture]:
    """The pictures of a request, in order. Slow: do not call it in the event loop.

    Args:
        param: the field that holds them, for errors.

    Raises:
        ApiError: one is not a data URL, or there are too many.
        PromptError: one is not a picture, or they are too large.
        MissingExtraError: Pillow is not installed.
    """
    if len(urls) > MOST_PICTURES:
        raise ApiError(400, f"{param} holds {len(urls)} pictures, of at most {MOST_PICTURES}", param=param)
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
        raise ApiError(
            400,
            f"a picture must be a data URL, data:image/png;base64,..., for this server fetches nothing, got {shown!r}",
            param=param,
            code="invalid_image_url",
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"a picture is no base64 ({error})", param=param, code="invalid_image_url") from error
