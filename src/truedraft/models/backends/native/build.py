"""Compiles the native forward on this machine, once, and caches it in the user's cache folder.

Without a working compiler models run without the native forward (`NativeBackend.fits` is False).

A cached library has the checksum of its bytes in its name, because loading a truncated library would crash the process.
It is loaded only from where nobody but its user (or root) could write. One process compiles, and others wait for it.

Run as a program, this compiles the usual variants for this processor without torch: `truedraft.lazy.compile_ahead`.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.errors import ModelError
from truedraft.files import cache_folder, could_not_be_kept, take_place
from truedraft.progress import log_stage

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
_COMPILERS = ("cc", "gcc", "clang")
_PLAIN = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w")
_OF_SMOLLM2 = ((4, 1), (8, 0), (4, 0))  # forms of its file, 4 bits with shifts and 8 without, and of its draft
_TRIES = ("-march=native", "-mcpu=native")
_TIMEOUT_S = 120.0
_ROOM = 1 << 24  # free bytes that the compiler needs in a folder
_OWNER_ONLY = 0o700
_WRITABLE_BY_OTHERS = 0o022


class Library(ctypes.CDLL):
    """decoder.c without the forms of quantised weights, each compiled when needed; OSError if that or loading fails."""

    def __init__(self, compiler: Sequence[str], defines: Sequence[str]) -> None:
        _load(compiler, (*defines, "-DSEPARATE"), super().__init__)
        self._compiler, self._defines = compiler, defines
        self._forms: dict[tuple[int, int], ctypes.CDLL] = {}

    def need_form(self, bits: int, kind: int) -> None:
        """Load products with weights of `bits` bits in quantized.h's layout `kind`; ModelError if that fails."""
        if (bits, kind) in self._forms:
            return
        made: list[ctypes.CDLL] = []
        form = (f"-DFORM_BITS={bits}", f"-DFORM_KIND={kind}")
        try:
            _load(self._compiler, (*self._defines, *form), lambda path: made.append(ctypes.CDLL(path)))
        except (OSError, subprocess.SubprocessError) as error:
            raise ModelError(f"products with weights of {bits} bits cannot be compiled or loaded ({error})") from error
        self.truedraft_take_form(ctypes.c_int64(bits), ctypes.c_int64(kind), made[0].truedraft_form)
        self._forms[bits, kind] = made[0]


@dataclass(frozen=True, slots=True)
class Built:
    """The compiled library, or None and why there is none."""

    library: Library | None
    reason: str = ""


@functools.cache
def built(dtype: torch.dtype) -> Built:
    """The forward for a dtype, compiled at the first call on this machine and loaded from the cache after that."""
    from truedraft.machine import dtype_name, may_use_tiles

    if dtype_name(dtype) not in ("bfloat16", "float32"):
        return Built(None, f"there is none for {dtype_name(dtype)}")
    return _built(_defines(dtype_name(dtype) == "bfloat16", may_use_tiles()))


def _built(defines: Sequence[str]) -> Built:
    given = os.environ.get("CC", "").strip()
    compiler = _compiler(given)
    if not compiler:
        missing = f"CC names {given!r}, which is not" if given else "there is no C compiler (cc, gcc or clang)"
        return Built(None, f"{missing} on this machine")
    try:
        return Built(Library(compiler, defines))
    except CompilerError as error:
        return Built(None, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"it cannot be compiled or loaded ({error})")


class CompilerError(OSError):
    """A compiler failed; holds its message."""


def _load(compiler: Sequence[str], defines: Sequence[str], load: Callable[[str], object]) -> None:
    """Load a library from the cache, or compile and cache it; raises CompilerError, or OSError where it cannot run."""
    key, folder = _key(compiler, defines), _folder()
    if _load_kept(folder, key, load):
        return
    log_stage("loading: compiling the forward for this processor, once on this machine")
    with _one_compiles(folder):
        if not _load_kept(folder, key, load):
            _load_compiled(compiler, defines, folder, key, load)


def _compiler(given: str) -> tuple[str, ...]:
    """The compile command, or nothing; `given` may have options after the program, as in "ccache gcc"."""
    for command in (given, *given.split()[:1]) if given else _COMPILERS:
        found = shutil.which(command)
        if found:
            return (found,) if command == given or not given else (found, *given.split()[1:])
    return ()


def _folder() -> Path | None:
    folder = cache_folder() / "native"
    try:
        folder.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
        if folder.stat().st_mode & _WRITABLE_BY_OTHERS:
            folder.chmod(_OWNER_ONLY)
        return folder if _is_ours(folder) else None
    except OSError:
        return None


@contextlib.contextmanager
def _one_compiles(folder: Path | None) -> Iterator[None]:
    """Wait until no other process compiles into the folder; without file locks several may."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):  # missing on Windows and in some shared folders
            import fcntl

            opened = os.open("" if folder is None else folder, os.O_RDONLY)
            held.callback(os.close, opened)  # which releases it, as the end of this process does
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _is_ours(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # on Windows, where only the user can write to the user's folders
        return True
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS


def _load_kept(folder: Path | None, key: str, load: Callable[[str], object]) -> bool:
    for path in sorted(folder.glob(f"decoder-{key}-*.so")) if folder else ():
        with contextlib.suppress(OSError):  # built against other libraries, or removed since
            if _is_ours(path) and path.stem.endswith(f"-{_checksum(path)}"):
                load(str(path))
                return True
    return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _key(compiler: Sequence[str], defines: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    settings = (*compiler[1:], *defines, str(_PLAIN), str(_TRIES), platform.machine(), _processor())
    read = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join((*read, version.stdout, *map(str.encode, settings)))).hexdigest()[:24]


def _defines(narrow: bool, tiles: bool) -> Sequence[str]:
    """Options for decoder.c, all measured (benchmarks/LOG.md); `narrow` is bfloat16, `tiles` whether AMX may be used.

    The instruction that multiplies pairs of bfloat16 takes as long as one float32 multiply-add on AMD's processors, and
    four times as long on Intel's. Quantised weights are prefetched at the distances that took least time on each.
    """
    processor = _processor()
    amd, intel = (vendor in processor for vendor in ("AuthenticAMD", "GenuineIntel"))
    flags = {
        "BF16": narrow,
        "PAIRED": narrow and "avx512_bf16" in processor and amd,
        "TILES": tiles,
        "PREFETCH_NEAR": 8192 if amd else 1536 if intel else 0,
        "PREFETCH_FAR": 16384 if intel else 0,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in flags.items())


def _processor() -> str:
    """Model and features of the processor, as the system reports them, because machines may share a cache."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.processor()} of {platform.node()}"
    lines = cpuinfo.read_text(errors="replace").splitlines()
    fields = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in fields)


def _load_compiled(
    compiler: Sequence[str], defines: Sequence[str], folder: Path | None, key: str, load: Callable[[str], object]
) -> None:
    keeping = folder is not None and os.access(folder, os.W_OK)
    if folder is not None and keeping and shutil.disk_usage(folder).free < _ROOM:
        _log.warning(could_not_be_kept(folder, os.strerror(errno.ENOSPC)))
        keeping = False
    with tempfile.TemporaryDirectory(
        prefix="decoder-", dir=folder if keeping else None, ignore_cleanup_errors=True
    ) as work:
        path = Path(work) / "decoder.so"
        _compile([*compiler, *_PLAIN], [*defines, "-shared", str(SOURCE), "-o", str(path)])
        if folder is not None and keeping:
            path.chmod(_OWNER_ONLY)
            # Atomically, because another process may be doing the same.
            kept = folder / f"decoder-{key}-{_checksum(path)}.so"
            take_place(path, kept)
            path = kept
        load(str(path))  # stays loaded when its file is removed


def _compile(command: Sequence[str], rest: Sequence[str]) -> None:
    """Run a compiler with the first option for this machine that it accepts; raises its first CompilerError."""
    failures = []
    for option in _TRIES:
        failure = _failure_of([*command, option, *rest])
        if not failure:
            return
        failures.append(failure)
    raise CompilerError(f"{command[0]} failed ({failures[0]})")


def _failure_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    message = done.stderr.decode(errors="replace").strip()
    return (message.splitlines() or ["no message"])[0] if done.returncode else ""


def _ahead() -> None:
    abilities = _processor()
    tiles = "amx_tile" in abilities
    library = _built(_defines(tiles or "avx512_bf16" in abilities, tiles)).library
    if library is not None:
        for form in _OF_SMOLLM2:
            library.need_form(*form)


if __name__ == "__main__":
    _ahead()
