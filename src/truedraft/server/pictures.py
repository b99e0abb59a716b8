"""Pictures in requests: data URLs alone, for a server that fetched what clients name would reach what they cannot."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING

from truedraft.models.processor import read_picture
from truedraft.server.errors import ApiError

if TYPE_CHECKING:
    from truedraft.models.processor import Picture

MOST_PICTURES = 16
"""Of one request."""
MOST_PIXELS = 2**23
"""Of all of them together, so a picture of 3,840 x 2,160; a few bytes can stand for any number."""

_SHOWN = 40


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
