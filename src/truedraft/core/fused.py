"""Distributions of float32 on a CPU and draws from them, in fewer passes over a row than torch makes: `fused.c`.

It is compiled on this machine at the first call. Without a compiler nothing fits, and `probs.py` computes by torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from truedraft.compiled import find_compiler, load_compiled

_SOURCE = Path(__file__).with_name("fused.c")


@functools.cache
def _library() -> ctypes.CDLL | None:
    loaded: list[ctypes.CDLL] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        load_compiled(_SOURCE, find_compiler(), (), lambda path: loaded.append(ctypes.CDLL(path)))
    return loaded[0] if loaded else None


def fit(*tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> bool:
    """Whether the functions here take these `[..., vocab]`, all of one shape."""
    shape = tensors[0].shape
    return (
        all(each.dtype in dtypes and each.device.type == "cpu" and each.shape == shape for each in tensors)
        and tensors[0].numel() > 0
        and _library() is not None
    )


LOGITS = (torch.float32, torch.bfloat16)


def addresses(dtype: torch.dtype, *names: str) -> list[int] | None:
    """The addresses of functions of fused.c, those of logits for a dtype in `LOGITS`; None without the library."""
    library = _library()
    if library is None or dtype not in LOGITS:
        return None
    of_logits = "" if dtype == torch.float32 else "_halves"
    found = (getattr(library, f"truedraft_{name}{of_logits if name != 'draw' else ''}") for name in names)
    return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in found]


def softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    """softmax(logits / temperature), float32, of `[..., vocab]` in one of `LOGITS` and temperatures `[...]`.

    A row with NaN, or without a finite largest logit, becomes NaN.
    """
    name = "softmax" if logits.dtype == torch.float32 else "softmax_halves"
    return _made(name, torch.empty(logits.shape, dtype=torch.float32), logits, temperatures.float())


def token_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Entries of `softmax` at temperature 1 of tokens `[...]`, int64; 0 for `vocab`, which is no token."""
    name = "token_probs" if logits.dtype == torch.float32 else "token_probs_halves"
    return _made(name, torch.empty(tokens.shape, dtype=torch.float32), logits, tokens)


def largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entries of `[..., vocab]` in one of `LOGITS`, NaN where one is, and their places: of equal the first.

    Both are `[...]`, the entries float64 and the places int64.
    """
    name = "largest" if values.dtype == torch.float32 else "largest_halves"
    entries, places = _made(name, torch.empty(2, *values.shape[:-1], dtype=torch.float64), values, values)
    return entries, places.long()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`probs.residual`."""
    return _made("residual", torch.empty(p.shape, dtype=torch.float32), p, q)


def sums_and_least(values: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of `[rows, vocab]` and their least entries, `[rows]`; the sum is NaN where an entry is."""
    sums, least = _made("sums", torch.empty(2, len(values), dtype=torch.float32), values, values)
    return sums, least


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`probs.draw`; `uniforms` `[...]` are float64."""
    return _made("draw", torch.empty(weights.shape[:-1], dtype=torch.int64), weights, uniforms)


def _made(name: str, result: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Call a function of rows `[..., vocab]` and of others, which fills the result."""
    rows, others, vocab = rows.contiguous(), others.contiguous(), rows.shape[-1]
    first, second, to = (ctypes.c_void_p(each.data_ptr()) for each in (rows, others, result))
    counts = ctypes.c_int64(rows.numel() // vocab), ctypes.c_int64(vocab)
    getattr(_library(), f"truedraft_{name}")(first, *counts, second, to)
    return result
