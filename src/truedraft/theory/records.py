"""Read kept records, and refuse what they should not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truedraft.errors import OptionError


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
