"""Compile the forward on this machine, once, and keep it in the user's cache.

There is no compiled file in the package: what a processor can do differs from machine to machine, and the compiler
that is there knows. Where none is, or it fails, models run without this (`NativeBody.fits` is False).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from truedraft.models.dtypes import has_avx512_bfloat16
from truedraft.models.user_cache import cache_folder

_SOURCE = Path(__file__).with_name("decoder.c")
_COMPILERS = ("cc", "gcc", "clang")
_PLAIN = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-w")
# From best to least: some compilers know this machine under another option, or come without OpenMP.
_TRIES = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",))
_TIMEOUT_S = 120.0


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
        return Built(None, f"there is none for {str(dtype).removeprefix('torch.')}")
    if dtype is torch.bfloat16 and not has_avx512_bfloat16():
        return Built(None, "this processor has no AVX-512 instructions for bfloat16")
    compiler = _compiler()
    if compiler is None:
        return Built(None, "there is no C compiler (cc, gcc or clang) on this machine")
    path = _folder() / f"decoder-{_key(compiler, dtype)}.so"
    try:
        if not path.is_file():
            failure = _compile(compiler, dtype, path)
            if failure:
                return Built(None, f"{compiler} failed ({failure})")
        return Built(ctypes.CDLL(str(path)))
    except OSError as error:
        return Built(None, f"it cannot be loaded ({error})")


def _compiler() -> str | None:
    given = os.environ.get("CC")
    return next((found for name in ((given,) if given else _COMPILERS) if (found := shutil.which(name))), None)


def _folder() -> Path:
    """The cache; a temporary folder where it cannot be written."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="truedraft-native-"))


def _key(compiler: str, dtype: torch.dtype) -> str:
    """Everything that the result depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (_SOURCE.read_text(), version, str(dtype), str(_TRIES), platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Model and abilities of the processor, as far as the system tells: a cache may be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in told)


def _compile(compiler: str, dtype: torch.dtype, path: Path) -> str:
    """Compile to a file; returns why it failed, or ""."""
    define = f"-DBF16={int(dtype is torch.bfloat16)}"
    failure = ""
    for options in _TRIES:
        handle, draft = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        command = [compiler, *_PLAIN, *options, define, str(_SOURCE), "-o", draft]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            Path(draft).unlink(missing_ok=True)
            return type(error).__name__
        if done.returncode == 0:
            Path(draft).replace(path)  # at once, for another process may be doing the same
            return ""
        Path(draft).unlink(missing_ok=True)
        failure = failure or (done.stderr.strip().splitlines() or ["no message"])[0]
    return failure
