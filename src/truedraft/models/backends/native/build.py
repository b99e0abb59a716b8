"""Compiles the native forward on this machine, once: `truedraft.compiled`; without it `NativeBackend.fits` is False.

Run as a program, this compiles the usual variants for this processor without torch: `truedraft.lazy.compile_ahead`.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.compiled import CompilerError, find_compiler, load_compiled, processor
from truedraft.errors import ModelError

if TYPE_CHECKING:
    import torch

SOURCE = Path(__file__).with_name("decoder.c")
_FUSED = Path(__file__).parents[3] / "core" / "fused.c"  # of `truedraft.core.fused`, which imports torch
_OF_SMOLLM2 = ((4, 1), (8, 0), (4, 0))  # forms of its file, 4 bits with shifts and 8 without, and of its draft


class Library(ctypes.CDLL):
    """decoder.c without the forms of quantised weights, each compiled when needed; OSError if that or loading fails."""

    def __init__(self, compiler: Sequence[str], defines: Sequence[str]) -> None:
        load_compiled(SOURCE, compiler, (*defines, "-DSEPARATE"), super().__init__)
        self._compiler, self._defines = compiler, defines
        self._forms: dict[tuple[int, int], ctypes.CDLL] = {}

    def need_form(self, bits: int, kind: int) -> None:
        """Load products with weights of `bits` bits in quantized.h's layout `kind`; ModelError if that fails."""
        if (bits, kind) in self._forms:
            return
        made: list[ctypes.CDLL] = []
        form = (f"-DFORM_BITS={bits}", f"-DFORM_KIND={kind}")
        try:
            load_compiled(SOURCE, self._compiler, (*self._defines, *form), lambda path: made.append(ctypes.CDLL(path)))
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
    try:
        return Built(Library(find_compiler(), defines))
    except CompilerError as error:
        return Built(None, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"it cannot be compiled or loaded ({error})")


def _defines(narrow: bool, tiles: bool) -> Sequence[str]:
    """Options for decoder.c, all measured (benchmarks/LOG.md); `narrow` is bfloat16, `tiles` whether AMX may be used.

    The instruction that multiplies pairs of bfloat16 takes as long as one float32 multiply-add on AMD's processors, and
    four times as long on Intel's. Quantised weights are prefetched at the distances that took least time on each.
    """
    about = processor()
    amd, intel = (vendor in about for vendor in ("AuthenticAMD", "GenuineIntel"))
    flags = {
        "BF16": narrow,
        "PAIRED": narrow and "avx512_bf16" in about and amd,
        "TILES": tiles,
        "PREFETCH_NEAR": 8192 if amd else 1536 if intel else 0,
        "PREFETCH_FAR": 16384 if intel else 0,
        "PASSING": amd,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in flags.items())


def _ahead() -> None:
    abilities = processor()
    tiles = "amx_tile" in abilities
    library = _built(_defines(tiles or "avx512_bf16" in abilities, tiles)).library
    if library is not None:
        for form in _OF_SMOLLM2:
            library.need_form(*form)
        load_compiled(_FUSED, find_compiler(), (), str)


if __name__ == "__main__":
    _ahead()
