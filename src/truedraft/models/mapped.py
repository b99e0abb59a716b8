"""Frees memory after loading: pages of mapped files that are not read again, and freed blocks of the allocator."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")


def forget_pages(weight: Tensor) -> None:
    """Release a weight's mapped file pages; it stays readable. Otherwise a packed model is in memory twice."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or weight.device.type != "cpu" or not weight.is_contiguous() or not _MAPS.exists():
        return
    start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _is_of_a_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def in_memory(tensor: Tensor, files: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """A tensor of a file, copied if the file may be mapped, so that later changes of the file do not affect it.

    If a mapped file is overwritten in place, the bytes change; if it is truncated, the process is killed. `files` are
    address ranges from `_files_mapped`; None reads them now.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    files, address = _files_mapped() if files is None else files, tensor.data_ptr()
    if files is not None:
        place = bisect_right(files, address, key=lambda span: span[0]) - 1
        if place < 0 or address >= files[place][1]:
            return tensor
    copy = tensor.clone()
    forget_pages(tensor)
    return copy


def read_in(module: nn.Module) -> None:
    """Copy a module's weights that are in mapped files, one by one; each source leaves memory at once."""
    files = _files_mapped()  # once, because reading it takes as long as copying a weight
    for weight in (*module.parameters(), *module.buffers()):
        if type(weight.data) is Tensor:
            weight.data = in_memory(weight.data, files)


def _mappings() -> Iterator[tuple[int, int, str]]:
    for line in _MAPS.read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0":
            begin, end = (int(each, 16) for each in span.split("-"))
            yield begin, end, "".join(path)


def _files_mapped() -> list[tuple[int, int]] | None:
    return sorted((begin, end) for begin, end, _ in _mappings()) if _MAPS.exists() else None


def _is_of_a_file(first: int, last: int) -> bool:
    """Whether addresses are within one mapping of a file of weights; in other memory their content would be lost."""
    return any(
        begin <= first and last <= end and (path.endswith(".safetensors") or "/blobs/" in path)  # the hub's cache
        for begin, end, path in _mappings()
    )


def return_freed_memory() -> None:
    """Return freed memory to the system; the C library keeps 190 MB after reading a vocabulary of 262,144."""
    with contextlib.suppress(OSError, AttributeError):  # a system without this call, or another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
