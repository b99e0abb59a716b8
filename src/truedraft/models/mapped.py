"""Memory that loading leaves behind: pages of mapped files that nobody will read again, and what was freed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")


def forget_pages(weight: Tensor) -> None:
    """Let go of the memory that a weight's file takes in this process, where it is mapped and the system says so.

    The weight stays readable, from the file. Without this a model that is packed for inference is in memory twice
    until its last weight is gone, for all weights of a file have one mapping.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or weight.device.type != "cpu" or not weight.is_contiguous() or not _MAPS.exists():
        return
    start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _is_of_a_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _is_of_a_file(first: int, last: int) -> bool:
    """Whether addresses lie in one mapping of a file of weights: in other memory their content would be lost."""
    for line in _MAPS.read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= first < end:
            return last <= end and inode != "0" and bool(path) and path[0].endswith(".safetensors")
    return False


def return_freed_memory() -> None:
    """Give what this process has freed back to the system, where the C library keeps it unless it is told.

    Tokenizers and configurations are read into many small pieces; of a vocabulary of 262,144 they leave 190 MB.
    """
    with contextlib.suppress(OSError, AttributeError):  # a system without this call, or another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
