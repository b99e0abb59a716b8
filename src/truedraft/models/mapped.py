"""Memory that loading leaves behind: pages of mapped files that nobody will read again, and what was freed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

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


def in_memory(tensor: Tensor, files: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """A tensor of a file, copied where the file may be mapped: it stays what it is, whatever becomes of the file.

    Of one that is overwritten in place the bytes would change, and one that is cut short would end the process.

    Args:
        tensor: any.
        files: where files are mapped, as `_files_mapped` found it when the tensor was there; None looks now.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    files = _files_mapped() if files is None else files
    if files is not None and not _is_within(tensor.data_ptr(), files):
        return tensor
    copy = tensor.clone()
    forget_pages(tensor)
    return copy


def read_in(module: nn.Module) -> None:
    """Copy a module's weights that lie in mapped files, one by one; what is copied leaves memory at once."""
    files = _files_mapped()  # once: to read it takes as long as to copy a weight
    for weight in (*module.parameters(), *module.buffers()):
        if type(weight.data) is Tensor:
            weight.data = in_memory(weight.data, files)


def _files_mapped() -> list[tuple[int, int]] | None:
    """Where files are mapped, in order, as far as the system says."""
    if not _MAPS.exists():
        return None
    lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    spans = [span.split("-") for span, _, _, _, inode, *_ in lines if inode != "0"]
    return sorted((int(begin, 16), int(end, 16)) for begin, end in spans)


def _is_within(address: int, spans: Sequence[tuple[int, int]]) -> bool:
    place = bisect_right(spans, address, key=lambda span: span[0]) - 1
    return place >= 0 and address < spans[place][1]


def _is_of_a_file(first: int, last: int) -> bool:
    """Whether addresses lie in one mapping of a file of weights: in other memory their content would be lost."""
    for line in _MAPS.read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= first < end:
            of_weights = bool(path) and (path[0].endswith(".safetensors") or "/blobs/" in path[0])  # the hub's cache
            return last <= end and inode != "0" and of_weights
    return False


def return_freed_memory() -> None:
    """Give what this process has freed back to the system, where the C library keeps it unless it is told.

    Tokenizers and configurations are read into many small pieces; of a vocabulary of 262,144 they leave 190 MB.
    """
    with contextlib.suppress(OSError, AttributeError):  # a system without this call, or another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
