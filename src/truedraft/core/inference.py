"""Inference mode, entered at most once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Found = TypeVar("Found")


def in_inference_mode(function: Callable[Params, Found]) -> Callable[Params, Found]:
    """Like `torch.inference_mode()`, but not entered again where active: that takes 1.6 microseconds, the check 0.1."""

    @wraps(function)
    def without_gradients(*args: Params.args, **kwargs: Params.kwargs) -> Found:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return without_gradients
