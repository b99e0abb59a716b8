"""Frees memory after loading: pages of mapped files that are not read again, and freed blocks of the allocator."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")
Span: TypeAlias = tuple[int, int, str]
"""First address of a mapping, the one after its last, and the file."""


def in_memory(tensor: Tensor, files: Sequence[Span] | None = None) -> Tensor:
    """A tensor of a file, copied if the file may be mapped, so that later changes of the file do not affect it.

    If a mapped file is overwritten in place, the bytes change; if it is truncated, the process is killed. `files` are
    from `_files_mapped`; None reads them now. Pages of a file of weights leave memory with the copy, or it would be
    there twice.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    files, address = _files_mapped() if files is None else files, tensor.data_ptr()
    if files is None:
        return tensor.clone()
    place = bisect_right(files, address, key=lambda span: span[0]) - 1
    if place < 0 or address >= files[place][1]:
        return tensor
    copy = tensor.clone()
    _forget_pages(tensor, files[place])
    return copy


def read_in(module: nn.Module) -> None:
    """Copy a module's weights that are in mapped files, one by one; each source leaves memory at once."""
    files = _files_mapped()  # once, because reading it takes as long as copying a weight
    for weight in (*module.parameters(), *module.buffers()):
        if type(weight.data) is Tensor:
            weight.data = in_memory(weight.data, files)


def _files_mapped() -> list[Span] | None:
    """The mappings of files, by address; None where the system does not tell."""
    if not _MAPS.exists():
        return None
    spans = []
    for line in _MAPS.read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0":
            begin, end = (int(each, 16) for each in span.split("-"))
            spans.append((begin, end, "".join(path)))
    return sorted(spans)


def _forget_pages(tensor: Tensor, file: Span) -> None:
    """Release a tensor's pages of a mapped file of weights; it stays readable. Other memory would lose its content."""
    begin, end, path = file
    if not (path.endswith(".safetensors") or "/blobs/" in path) or not tensor.is_contiguous():  # the hub's cache
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin <= first < last <= end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Return freed memory to the system; the C library keeps 190 MB after reading a vocabulary of 262,144."""
    with contextlib.suppress(OSError, AttributeError):  # a system without this call, or another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
