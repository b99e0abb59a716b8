"""Refuse arguments that no formula can use, and kept records that hold something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


def record(data: object, what: str, names: Sequence[str]) -> dict[str, Any]:
    """A JSON object with exactly these names.

    Raises:
        OptionError: it is no object, or has other names.
    """
    if not isinstance(data, dict) or set(data) != set(names):
        found = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise OptionError(f"{what} must be an object with {', '.join(names)}, got {found}")
    return data


def numbers(data: object) -> tuple[float, ...]:
    """A JSON list of numbers.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(data, list) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in data):
        raise OptionError(f"a list of numbers is needed, got {data!r}")
    return tuple(map(float, data))
