"""Refuse arguments that no formula can use."""

from __future__ import annotations

import math

from truedraft.errors import OptionError


def check_share(name: str, value: float) -> None:
    """Refuse what is no number in [0, 1].

    Raises:
        OptionError: names the argument and its value.
    """
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise OptionError(f"{name} must be a number in [0, 1], got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """Refuse what is no finite number of 0 or more.

    Raises:
        OptionError: names the argument and its value.
    """
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise OptionError(f"{name} must be a number of 0 or more, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Refuse what is no finite number above 0.

    Raises:
        OptionError: names the argument and its value.
    """
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise OptionError(f"{name} must be a number above 0, got {value!r}")


def check_whole(name: str, value: int, lowest: int) -> None:
    """Refuse what is no whole number of `lowest` or more.

    Raises:
        OptionError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise OptionError(f"{name} must be a whole number of {lowest} or more, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
