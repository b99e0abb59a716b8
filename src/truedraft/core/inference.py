"""Without gradients, entered once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Asked = ParamSpec("Asked")
Found = TypeVar("Found")


def in_inference_mode(function: Callable[Asked, Found]) -> Callable[Asked, Found]:
    """As `torch.inference_mode()`, for what a step calls many times: it is not entered where it holds already.

    To enter it once more takes 1.6 microseconds, to see that it holds 0.1.
    """

    @wraps(function)
    def without_gradients(*args: Asked.args, **kwargs: Asked.kwargs) -> Found:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return without_gradients
