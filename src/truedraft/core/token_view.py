"""A read-only view of a growing list of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn, overload


class TokenView(Sequence[int]):
    """A read-only view of a list with another owner, without a copy. Slices are new lists."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __add__(self, more: Sequence[int]) -> list[int]:
        return [*self._tokens, *more]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._tokens == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._tokens)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("request.tokens is the engine's and cannot be changed; take a copy, list(request.tokens)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
