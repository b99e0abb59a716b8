"""Quantised weights as stored: integer codes with scales, for all file formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from torch import Tensor, nn

GROUP = 32
"""Inputs of an output that share scales."""
HEAD = 8
"""Groups that share an outer scale, in schemes with two levels."""


class Scheme(Enum):
    """The formula from a code to its weight; values are those of quantized.h.

    With groups of 32 inputs of an output, of which 8 share a head:

    - ONE: scale * (code - middle), the middle code being 2^(bits - 1). GGUF's Q4_0, Q5_0 and Q8_0.
    - SHIFTED: scale * code + shift. Q4_1 and Q5_1.
    - ZEROED: scale * (code - zero). GPTQ and AWQ.
    - NESTED: (scale of the head * inner scale) * code - (shift of the head * inner shift). Q4_K and Q5_K.
    - HALVES: (scale of the head * inner scale) * (code - middle), signed inner scales, one for half a group. Q6_K.
    - WIDE and WIDE_ZEROED: ONE and ZEROED with scales in float32.
    """

    ONE = 0
    SHIFTED = 1
    ZEROED = 2
    NESTED = 3
    HALVES = 4
    WIDE = 5
    WIDE_ZEROED = 6


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[out, in]` of codes."""

    bits: int  # of a code: 4, 5, 6 or 8
    scheme: Scheme
    codes: Tensor  # [out, in], uint8, from 0
    scales: Tensor  # [out, groups], float16; of NESTED and HALVES [out, heads]; of WIDE and WIDE_ZEROED float32
    shifts: Tensor | None = None  # as `scales`, of SHIFTED and NESTED
    inner: Tensor | None = None  # [out, groups], uint8: inner scales of NESTED, zeros; HALVES: int8 [out, 2 groups]
    lesser: Tensor | None = None  # [out, groups], uint8: inner shifts of NESTED
    order: Tensor | None = None  # [in], int32: the input that each column multiplies, if groups are not contiguous

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def form(self) -> tuple[int, Scheme]:
        return self.bits, self.scheme

    def rows(self, index: Tensor | slice) -> QuantizedWeight:
        rest = [None if each is None else each[index] for each in (self.shifts, self.inner, self.lesser)]
        some = QuantizedWeight(self.bits, self.scheme, self.codes[index], self.scales[index], *rest)
        return replace(some, order=self.order)

    def dequantized(self) -> Tensor:
        """`[out, in]`, float32: products and sums in the order and with the rounding of the `gguf` package."""
        numbers, middle = self.codes.float(), 2 ** (self.bits - 1)

        def by(change: Callable[[Tensor, Tensor], Tensor], each: Tensor, over: int = GROUP) -> None:
            if numbers.shape[1] == over * each.shape[1]:
                change(numbers.view(len(numbers), -1, over), each.float()[..., None])
            else:  # the last inputs are fewer
                change(numbers, each.float().repeat_interleave(over, -1)[:, : self.codes.shape[1]])

        if self.scheme in (Scheme.ONE, Scheme.WIDE, Scheme.HALVES):
            numbers.sub_(middle)
        elif self.scheme in (Scheme.ZEROED, Scheme.WIDE_ZEROED) and self.inner is not None:
            by(Tensor.sub_, self.inner)
        if self.scheme in (Scheme.NESTED, Scheme.HALVES):
            assert self.inner is not None
            by(Tensor.mul_, *_of_both(self.scales, self.inner, 2 if self.scheme is Scheme.HALVES else 1))
        else:
            by(Tensor.mul_, self.scales)
        if self.scheme is Scheme.SHIFTED and self.shifts is not None:
            by(Tensor.add_, self.shifts)
        elif self.shifts is not None and self.lesser is not None:
            by(Tensor.sub_, *_of_both(self.shifts, self.lesser))
        return numbers if self.order is None else numbers[:, self.order.argsort()]


def _of_both(outer: Tensor, inner: Tensor, parts: int = 1) -> tuple[Tensor, int]:
    """Products of both levels for each group or for `parts` parts of it, float32; and the number of inputs of each."""
    spread = outer.float().repeat_interleave(HEAD * parts, -1)[:, : inner.shape[1]]
    return spread * inner.float(), GROUP // parts


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight `[out, in]`, see `QuantizedWeight`, that is read on demand: a parameter's `quantized`.

    `rows` reads some outputs, for several threads. `together` outputs are read at a time when all are needed; None
    reads all of them, if reading some takes as long.
    """

    form: tuple[int, Scheme]
    rows: Callable[[Tensor | slice], QuantizedWeight]
    shape: tuple[int, int]
    order: Tensor | None = None
    together: int | None = None

    def read(self) -> QuantizedWeight:
        return self.rows(slice(None))

    def pieces(self) -> Iterator[slice]:
        """All outputs in pieces, because codes of all would take much memory in addition to the result."""
        out = self.shape[0]
        step = self.together or out
        return (slice(first, min(first + step, out)) for first in range(0, out, step))


def quantized_of(weight: Tensor) -> StoredWeight | None:
    """A parameter's codes if it is quantised; the parameter itself then has no values."""
    return getattr(weight, "quantized", None)


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight of a model is quantised."""
    return any(quantized_of(weight) is not None for weight in model.parameters())


def numbers_of(weight: Tensor) -> Tensor:
    """A parameter's values in its dtype, dequantised if necessary."""
    stored = quantized_of(weight)
    return weight.detach() if stored is None else stored.read().dequantized().to(weight.dtype)


def dequantize(model: nn.Module) -> None:
    """Dequantise all weights of a model to its dtype."""
    for weight in model.parameters():
        if quantized_of(weight) is not None:
            weight.data = numbers_of(weight)
            del weight.quantized  # type: ignore[attr-defined]


def in_halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of a parameter's outputs, quantised if it is."""
    parts = weight.detach().chunk(2)
    stored, count = quantized_of(weight), len(parts[0])
    if stored is not None:

        def rows(first: int, index: Tensor | slice) -> QuantizedWeight:
            if isinstance(index, Tensor):
                return stored.rows(first + index)
            begin, end, step = index.indices(count)
            return stored.rows(slice(first + begin, first + end, step))

        for part, first in zip(parts, (0, count), strict=True):
            half = replace(stored, rows=partial(rows, first), shape=(count, stored.shape[1]))
            part.quantized = half  # type: ignore[attr-defined]
    return parts[0], parts[1]
