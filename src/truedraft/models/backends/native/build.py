"""Compile the forward on this machine, once, and keep it in the user's cache.

There is no compiled file in the package: what a processor can do differs from machine to machine, and the compiler
that is there knows. Where none is, or it fails, models run without this (`NativeBackend.fits` is False).

A kept library carries the checksum of its bytes in its name, for loading half a library would end the process. It is
only loaded where nobody but its user (or root) could have put it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from truedraft.files import take_place
from truedraft.machine import cache_folder, could_not_be_kept, dtype_name, has_avx512_bfloat16, may_use_tiles
from truedraft.progress import told_stage

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
_COMPILERS = ("cc", "gcc", "clang")
_PLAIN = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w")
_PARTS = 4  # of decoder.c, see quantized.h
# Some compilers know this machine under another option.
_TRIES = ("-march=native", "-mcpu=native")
_TIMEOUT_S = 120.0
_ROOM = 1 << 24  # bytes that a folder must have left for the compiler to work in it
_OURS_ALONE = 0o700
_WRITABLE_BY_OTHERS = 0o022


@dataclass(frozen=True, slots=True)
class Built:
    """What came of compiling.

    Attributes:
        library: the loaded library, or None.
        reason: why there is none, in words; "" where there is one.
    """

    library: ctypes.CDLL | None
    reason: str = ""


@functools.cache
def built(dtype: torch.dtype) -> Built:
    """The forward for a dtype, compiled at the first call on this machine and loaded from the cache after that."""
    if dtype not in (torch.bfloat16, torch.float32):
        return Built(None, f"there is none for {dtype_name(dtype)}")
    given = os.environ.get("CC", "").strip()
    compiler = _compiler(given)
    if not compiler:
        missing = f"CC names {given!r}, which is not" if given else "there is no C compiler (cc, gcc or clang)"
        return Built(None, f"{missing} on this machine")
    try:
        key, folder = _key(compiler, dtype), _folder()
        kept = None if folder is None else _kept(folder, key)
        return _compiled(compiler, dtype, folder, key) if kept is None else Built(kept)
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"it cannot be compiled or loaded ({error})")


def _compiler(given: str) -> tuple[str, ...]:
    """The command that compiles, or nothing; `given` may hold options behind the program, as in "ccache gcc"."""
    for command in (given, *given.split()[:1]) if given else _COMPILERS:
        found = shutil.which(command)
        if found:
            return (found,) if command == given or not given else (found, *given.split()[1:])
    return ()


def _folder() -> Path | None:
    """Where libraries are kept; None where the cache cannot be made, or others could put libraries there."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(mode=_OURS_ALONE, parents=True, exist_ok=True)
        if folder.stat().st_mode & _WRITABLE_BY_OTHERS:
            folder.chmod(_OURS_ALONE)
        return folder if _is_ours(folder) else None
    except OSError:
        return None


def _is_ours(path: Path) -> bool:
    """Whether only this user, or root, could have written a file or folder."""
    if not hasattr(os, "getuid"):  # on Windows, where a user's folders are that user's own
        return True
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS


def _kept(folder: Path, key: str) -> ctypes.CDLL | None:
    """A library from earlier; None where there is none, or none that is whole and can be loaded."""
    for path in sorted(folder.glob(f"decoder-{key}-*.so")):
        with contextlib.suppress(OSError):  # made where other libraries were at hand, or gone meanwhile
            if _is_ours(path) and path.stem.endswith(f"-{_checksum(path)}"):
                return ctypes.CDLL(str(path))
    return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _key(compiler: Sequence[str], dtype: torch.dtype) -> str:
    """Everything that the result depends on."""
    asked = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    told = (*compiler[1:], *_defines(dtype), str(_PLAIN), str(_TRIES), platform.machine(), _processor())
    read = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join((*read, asked.stdout, *map(str.encode, told)))).hexdigest()[:24]


def _defines(dtype: torch.dtype) -> tuple[str, ...]:
    """What decoder.c is compiled for; all of it measured (benchmarks/LOG.md).

    The instruction that multiplies pairs of bfloat16 and adds them takes AMD's processors as long as one multiplication
    and addition of float32, and Intel's four times as long. Intel's have to be asked for quantised weights ahead.
    """
    narrow, processor = dtype is torch.bfloat16, _processor()
    told = {
        "BF16": narrow,
        "PAIRED": narrow and has_avx512_bfloat16() and "AuthenticAMD" in processor,
        "TILES": may_use_tiles(),
        "ASKS_AHEAD": "GenuineIntel" in processor,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in told.items())


def _processor() -> str:
    """Model and abilities of the processor, as far as the system tells: a cache may be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.processor()} of {platform.node()}"
    lines = cpuinfo.read_text(errors="replace").splitlines()
    told = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in told)


def _compiled(compiler: Sequence[str], dtype: torch.dtype, folder: Path | None, key: str) -> Built:
    """Compile, load, and keep the library where there is a folder for it that can be written."""
    keeping = folder is not None and os.access(folder, os.W_OK)
    if folder is not None and keeping and shutil.disk_usage(folder).free < _ROOM:
        _log.warning(could_not_be_kept(folder, os.strerror(errno.ENOSPC)))
        keeping = False
    with tempfile.TemporaryDirectory(
        prefix="decoder-", dir=folder if keeping else None, ignore_cleanup_errors=True
    ) as work:
        path = Path(work) / "decoder.so"
        failure = _compile(compiler, dtype, path)
        if failure:
            return Built(None, f"{compiler[0]} failed ({failure})")
        if folder is not None and keeping:
            path.chmod(_OURS_ALONE)
            # At once, for another process may be doing the same.
            kept = folder / f"decoder-{key}-{_checksum(path)}.so"
            take_place(path, kept)
            path = kept
        return Built(ctypes.CDLL(str(path)))  # stays loaded when its file goes


def _compile(compiler: Sequence[str], dtype: torch.dtype, path: Path) -> str:
    """Compile to a file, in parts side by side, for a compiler takes seconds; returns why it failed, or ""."""
    told_stage("loading: compiling the forward for this processor, once on this machine")
    failure = ""
    objects = [path.with_name(f"part{part}.o") for part in range(_PARTS)]
    for option in _TRIES:
        common = [*compiler, *_PLAIN, option]
        parts = [
            [*common, *_defines(dtype), f"-DPART={part}", "-c", str(SOURCE), "-o", str(each)]
            for part, each in enumerate(objects)
        ]
        with ThreadPoolExecutor(_PARTS) as pool:
            failures = [each for each in pool.map(_failure_of, parts) if each]
        failed = failures[0] if failures else _failure_of([*common, "-shared", *map(str, objects), "-o", str(path)])
        if not failed:
            return ""
        failure = failure or failed
    return failure


def _failure_of(command: Sequence[str]) -> str:
    """Why a command failed, or ""."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    message = done.stderr.decode(errors="replace").strip()
    return (message.splitlines() or ["no message"])[0] if done.returncode else ""
