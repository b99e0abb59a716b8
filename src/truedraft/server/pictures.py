"""Pictures in requests: data URLs alone, for a server that fetched what clients name would reach what they cannot."""

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
"""Of one request."""
MOST_PIXELS = 2**23
"""Of all of them together, so a picture of 3,840 x 2,160; a few bytes can stand for any number."""
MOST_READ = 16
"""Requests whose pictures are read or wait for that, bodies and all."""

_SHOWN = 40
_READ_IN_S = 5  # is what clients are told who find too many


class PictureReader:
    """Makes prompts of chats with pictures, one request at a time, in a thread that nothing else waits for.

    Args:
        target: whose processor it takes, at once and once: where it cannot be had, each request is told so.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._processor: Processor | str
        try:
            self._processor = target.processor
        except PromptError as error:
            self._processor = str(error)
        except TruedraftError:  # which may tell of folders
            self._processor = "this server reads no pictures, for what its model needs for that is missing; give text"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="truedraft-pictures")
        self._places = threading.BoundedSemaphore(MOST_READ)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], urls: Sequence[str], *, param: str, **how: Any
    ) -> MultimodalPrompt:
        """A conversation as a prompt.

        Args:
            messages: as templates know them.
            urls: of the pictures in them, in order.
            param: the field that holds them.
            how: as of `Processor.chat`.

        Raises:
            ApiError: the pictures cannot be used, the template refuses the messages, or too many requests wait.
            OptionError: as `Processor.chat`.
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
    """The pictures of a request, in order. This takes long: keep it off the loop that serves other clients.

    Args:
        urls: as the client gave them.
        param: the field that they stand in.

    Raises:
        ApiError: one is no data URL, or there are too many.
        PromptError: one is no picture, or they are too large.
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
