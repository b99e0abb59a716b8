"""What decoder.c reads and writes: structures, weights in its order, and scratch memory."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.models.backends.native.build import SOURCE
from truedraft.models.cache import Buffers
from truedraft.models.quantized import Scheme, StoredWeight, numbers_of, quantized_of
from truedraft.models.threads import forward_threads

LANES = 16
_PACKED_ROWS = 512  # per job of a thread; whole blocks
_QUANTIZED_UNITS = 8  # per job of a thread
PER_SCALE = 32
"""Inputs of an output with quantised weights that share a scale."""
UNIT = 64
"""Outputs of a layer are padded with zeros to a multiple of this."""

_CPU = torch.device("cpu")
CHUNK = 256
"""Positions that a query sees together."""
_QUERIES = 16
_MOST_FOUND = 1 << 24  # numbers, 64 MiB
_GROUP = 96
_MOST_THREADS = 128  # that team.h uses
_NUMBERS: dict[str, type[Any]] = {"float": c_float, "double": c_double, "int32_t": c_int32, "int64_t": c_int64}
Made = TypeVar("Made", bound=Structure)


@cache
def _declared() -> dict[str, str]:
    source = re.sub(r"/\*.*?\*/", "", SOURCE.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"typedef struct \{([^}]*)\} (\w+);", source)
    return {name: declarations.replace("const ", "") for declarations, name in found}


def _as_declared(*parts: type[Structure]) -> Callable[[type[Made]], type[Made]]:
    """Gives a structure CName the fields of Name in decoder.c, the only place that defines their order.

    Worked example: of `int64_t rows; const Linear *linear; const float *a, *b;` these are an integer, a pointer to a
    `CLinear`, which has to be among the parts, and two addresses.
    """
    kinds: dict[str, type[Any]] = _NUMBERS | {part.__name__[1:]: part for part in parts}

    def made(structure: type[Made]) -> type[Made]:
        fields: list[tuple[str, type[Any]]] = []
        for declaration in _declared()[structure.__name__[1:]].split(";")[:-1]:
            kind, names = declaration.split(maxsplit=1)
            for name in names.split(","):
                if "*" not in name:
                    of = kinds[kind]
                else:
                    of = POINTER(kinds[kind]) if kinds.get(kind) in parts and name.count("*") == 1 else c_void_p
                fields.append((name.strip(" *"), of))
        structure._fields_ = fields
        return structure

    return made


@_as_declared()
class CLinear(Structure):
    """A linear layer with packed weights."""


@_as_declared()
class CCoded(Structure):
    """A file's data for some outputs of a quantised layer."""


@_as_declared(CLinear)
class CLayer(Structure):
    """A decoder layer."""


@_as_declared()
class CNorms(Structure):
    """Options of all norms of a model."""


@_as_declared(CLinear, CLayer, CNorms)
class CModel(Structure):
    """A model."""


@_as_declared()
class CSegment(Structure):
    """One request's share of a forward."""


@_as_declared(CSegment)
class CBatch(Structure):
    """A packed forward."""


@_as_declared()
class CScratch(Structure):
    """Memory for intermediate results."""


@_as_declared(CLinear)
class CHeads(Structure):
    """Residual heads before the LM head."""


@_as_declared()
class CAsked(Structure):
    """A request to run heads."""


@_as_declared()
class CChain(Structure):
    """How a chain is drawn."""


class Weights:
    """Owns the tensors at the addresses in structures; `library` is decoder.c, compiled for their dtype."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: list[Tensor] = []
        self._pointed: list[CLinear] = []

    def keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def free(self, addresses: Collection[int]) -> None:
        self._kept = [tensor for tensor in self._kept if tensor.data_ptr() not in addresses]

    def linear(self, parts: Sequence[Tensor], bias: Tensor | None, *, alternate: bool = False) -> CLinear:
        """A linear layer from weights `[out, in]`, which are packed, and a bias of `padded_bias`.

        The outputs of `parts` are concatenated, all but the last a multiple of 16; if they `alternate`, blocks of two
        parts do, so that two factors of an output are computed together. If all parts are quantised they keep their
        codes; if only some are, these are dequantised and packed with the others.
        """
        stored = [each for part in parts if (each := quantized_of(part)) is not None]
        if len(stored) == len(parts):
            return self._coded(stored, bias, alternate)
        return self.linears([list(map(numbers_of, parts))], bias, alternate=alternate)

    def linears(self, layers: Sequence[Sequence[Tensor]], bias: Tensor | None, *, alternate: bool = False) -> CLinear:
        outputs, inputs = sum(map(len, layers[0])), layers[0][0].shape[1]
        cells = self.keep(packed(self._library, layers, alternate=alternate))
        return CLinear(cells, None if bias is None else self.keep(bias), inputs, outputs, inputs, 0)

    def _coded(self, parts: Sequence[StoredWeight], bias: Tensor | None, alternate: bool) -> CLinear:
        alike = [list(each) for _, each in itertools.groupby(parts, lambda part: part.form)]
        outputs, inputs, order = _outputs_of(parts), parts[0].shape[1], parts[0].order
        kept = None if order is None else self.keep(order)
        more: int | None = None  # the address of the layer with the further outputs
        for some in reversed(alike):
            linear = CLinear(
                self._laid_out(some, alternate), None, inputs, outputs, inputs, some[0].form[0], some[0].form[1].value,
                -(-_outputs_of(some) // UNIT), more, kept,
            )  # fmt: skip
            self._pointed.append(linear)
            more = ctypes.addressof(linear)
        linear.bias = None if bias is None else self.keep(bias)
        return linear

    def _laid_out(self, parts: Sequence[StoredWeight], alternate: bool) -> int:
        (bits, scheme), (_, inputs), outputs = parts[0].form, parts[0].shape, _outputs_of(parts)
        self._library.need_form(bits, scheme.value)
        linear = CLinear(None, None, inputs, outputs, inputs, bits, scheme.value)
        linear.own = -(-outputs // UNIT)
        memory = _huge(self.bytes_of(linear), torch.uint8)
        linear.weights = memory.data_ptr()
        stride, place = len(parts) if alternate else 1, 0
        jobs: list[tuple[StoredWeight, slice, int]] = []
        for number, part in enumerate(parts):
            place = number if alternate else place
            for rows in part.pieces():
                jobs.append((part, rows, place))
                place += (rows.stop - rows.start) // LANES * stride

        def run(job: tuple[StoredWeight, slice, int]) -> None:
            piece = job[0].rows(job[1])
            tensors = [piece.codes, piece.scales, piece.shifts, piece.inner, piece.lesser]
            held = [None if each is None else each.contiguous() for each in tensors]
            coded = CCoded(*(None if each is None else each.data_ptr() for each in held))
            self._library.truedraft_lay_out(
                ctypes.byref(linear), ctypes.byref(coded), c_int64(len(piece)), c_int64(job[2]), c_int64(stride)
            )

        with ThreadPoolExecutor(min(len(jobs), forward_threads())) as pool:
            list(pool.map(run, jobs))
        self._kept.append(memory)
        return memory.data_ptr()

    def bytes_of(self, linear: CLinear) -> int:
        units = linear.own if linear.own else -(-linear.outputs // UNIT)
        self._library.truedraft_unit_bytes.restype = c_int64
        return int(units * self._library.truedraft_unit_bytes(ctypes.byref(linear)))

    def quantized(self, linear: CLinear, bits: int, layers: int = 1) -> CLinear:
        """The first of `layers` consecutive layers from `linear` on, with weights of 8 or 4 bits and the same bias."""
        self._library.need_form(bits, Scheme.ONE.value)
        units = layers * -(-linear.outputs // UNIT)
        codes = _huge(quantized_bytes(linear, bits, layers), torch.uint8)
        address = codes.data_ptr()

        def run(first: int) -> None:
            count = min(_QUANTIZED_UNITS, units - first)
            self._library.truedraft_quantize(
                ctypes.byref(linear), c_int64(first), c_int64(count), c_int64(bits), c_void_p(address)
            )

        with ThreadPoolExecutor(forward_threads()) as pool:
            list(pool.map(run, range(0, units, _QUANTIZED_UNITS)))
        self._kept.append(codes)
        made = CLinear(address, linear.bias, linear.inputs, linear.outputs, linear.read, bits)
        made.order = linear.order
        return made

    def outputs(self, linear: CLinear, outputs: Tensor) -> CLinear:
        """A layer without a bias that has some outputs of another one, as `outputs`, int64, names them."""
        made = CLinear.from_buffer_copy(linear)
        made.outputs = len(outputs)
        made.own = -(-len(outputs) // UNIT) if linear.bits else 0
        memory = _huge(self.bytes_of(made), torch.uint8)
        made.weights = memory.data_ptr()
        self._library.truedraft_copy_outputs(
            ctypes.byref(linear), c_void_p(outputs.data_ptr()), c_int64(len(outputs)), ctypes.byref(made)
        )
        self._kept.append(memory)
        return made


def _outputs_of(parts: Sequence[StoredWeight]) -> int:
    return sum(part.shape[0] for part in parts)


def pieces(linear: CLinear) -> Iterator[CLinear]:
    """A layer, and its further outputs that are quantised in other ways."""
    yield linear
    if linear.more:
        yield from pieces(CLinear.from_address(linear.more))


def quantized_bytes(linear: CLinear, bits: int, layers: int = 1) -> int:
    """Bytes of the result of `Weights.quantized`."""
    units, groups = layers * -(-linear.outputs // UNIT), -(-linear.inputs // PER_SCALE)
    return int(units * groups * (2 * UNIT + UNIT * PER_SCALE * bits // 8))


def packed(library: Any, layers: Sequence[Sequence[Tensor]], *, alternate: bool = False) -> Tensor:
    """Weights `[out, in]` as `[blocks, cells, 16 outputs, inputs of a cell]`, in huge pages where the system has them.

    Each of several layers of one size, given in parts, begins with a whole unit. A cell is one input in float32 and two
    neighbouring ones in bfloat16: 32 bits of one output.
    Worked example in float32: entry (17, 3) of the weight is at block 1, cell 3, output 1.
    """
    parts = layers[0]
    outputs, inputs, dtype = sum(map(len, parts)), parts[0].shape[1], parts[0].dtype
    per_cell = 2 if dtype is torch.bfloat16 else 1
    cells, stride = inputs // per_cell, len(parts) if alternate else 1
    blocks = -(-outputs // UNIT) * (UNIT // LANES)
    target = _huge(len(layers) * blocks * LANES * inputs, dtype).view(-1, cells, LANES, per_cell)
    jobs: list[tuple[Tensor, Tensor]] = []
    for layer, parts in enumerate(layers):
        place = layer * blocks
        for number, part in enumerate(parts):
            for first in range(0, len(part), _PACKED_ROWS):
                block = place + first // LANES * stride
                jobs.append((part[first : first + _PACKED_ROWS].detach(), target[block:]))
            place = layer * blocks + number + 1 if alternate else place + len(part) // LANES

    def run(job: tuple[Tensor, Tensor]) -> None:
        rows, where = job[0].contiguous(), job[1]
        library.truedraft_pack(
            c_void_p(rows.data_ptr()), c_int64(len(rows)), c_int64(cells), c_void_p(where.data_ptr()), c_int64(stride)
        )

    with ThreadPoolExecutor(min(len(jobs), forward_threads())) as pool:  # ctypes releases the GIL
        list(pool.map(run, jobs))
    return target


def padded_bias(parts: Sequence[Tensor | None], outputs: Sequence[int]) -> Tensor | None:
    """Biases concatenated, in float32, padded to whole units; None without any."""
    if all(part is None for part in parts):
        return None
    bias = torch.zeros(-(-sum(outputs) // UNIT) * UNIT, dtype=torch.float32, device="cpu")
    for part, place in zip(parts, bias[: sum(outputs)].split(list(outputs)), strict=True):
        if part is not None:
            place.copy_(part.detach())
    return bias


def _huge(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros in newly mapped memory, with huge pages if possible: sequential reads are faster with them."""
    size = max(count, 1) * dtype.itemsize
    private: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)  # shared memory gets no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:count]


class Scratch:
    """Memory for intermediate results, kept between forwards; `stride` and `spread` are elements of rows."""

    def __init__(
        self, library: Any, dtype: torch.dtype, stride: int, experts: int = 0, chosen: int = 0, spread: int = 0
    ) -> None:
        self._settle = library.truedraft_settle
        self._settle.restype = None
        self._dtype = dtype
        self._stride = stride
        self._experts, self._chosen, self._spread = experts, chosen, spread
        # A late thread may process a group of rows for an expert without rows.
        self._room = (_GROUP if experts else 16, 512, 0, 0)
        self._memory: list[Tensor] = []
        self._struct = CScratch()
        self._inputs = (0, 0)

    def of(self, rows: int, keys: int, threads: int, found: int = 0) -> CScratch:
        """Memory for at least so many rows, scores of a query, threads, and numbers that are found in chunks."""
        threads, found = min(threads, _MOST_THREADS), found if found <= _MOST_FOUND else 0
        if any(required > there for required, there in zip((rows, keys, threads, found), self._room, strict=True)):
            # Keys and chunks by doubling: a context that grows by a token per step would reallocate at every step.
            keys, found = (
                max(required, 2 * there) if required > there else there
                for required, there in ((keys, self._room[1]), (found, self._room[3]))
            )
            rows, threads = max(rows, self._room[0]), max(threads, self._room[2])
            self.settle()
            self._room = (rows, keys, threads, found)
            span = -(-keys // 32) * 32 + 64
            shared = [self._zeros(rows, self._stride) for _ in range(4)]
            fetched = self._zeros(threads, rows, self._stride)
            slots, room = rows * self._chosen, rows * max(self._stride, self._chosen * self._spread)
            listed = 5 * slots + self._experts + self._chosen + 2
            inputs = torch.zeros(threads, room, dtype=torch.float32, device=_CPU)
            scores = torch.zeros(threads, 2 * _QUERIES, span, dtype=torch.float32, device=_CPU)
            of_experts = [self._zeros(slots, self._spread) for _ in range(2)]
            choices = torch.zeros(slots, dtype=torch.int64, device=_CPU)
            shares = torch.zeros(slots, dtype=torch.float32, device=_CPU)
            lists = torch.zeros(threads, listed, dtype=torch.int32, device=_CPU)
            of_chunks = torch.zeros(found, dtype=torch.float32, device=_CPU)
            self._memory = [*shared, fetched, inputs, scores, *of_experts, choices, shares, lists, of_chunks]
            self._inputs = (inputs.data_ptr(), inputs.data_ptr() + inputs.nbytes)
            self._struct = CScratch(*(each.data_ptr() for each in self._memory), rows, span, room, listed, found)
        return self._struct

    def settle(self) -> None:
        """Wait for threads that a forward did not wait for; call before this memory or weights are freed."""
        if self._memory:
            self._settle(*map(ctypes.c_void_p, self._inputs))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=_CPU)


class Addresses:
    """Where the keys and values of one request's attention calls lie, while `generation` is that of the buffers."""

    def __init__(
        self, buffers: Buffers, calls: int, kv_heads: int, key_width: int, value_width: int, dtype: torch.dtype
    ) -> None:
        keys, values = buffers.addressed(calls, kv_heads, key_width, value_width, dtype)
        self.coded = buffers.coded
        self.generation = buffers.generation
        self.keys = (ctypes.c_void_p * calls)(*(each.data_ptr() for each in keys))
        self.values = (ctypes.c_void_p * calls)(*(each.data_ptr() for each in values))
