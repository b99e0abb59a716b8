"""Where tests of Triton's kernels compute them."""

from __future__ import annotations

from importlib.metadata import version

import torch

from truedraft.models.backends.graphs.attention import has_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def why_not() -> str:
    """Why the kernels cannot be computed here; "" if they can."""
    if not has_kernels(torch.device(DEVICE)):
        return "needs a GPU and triton, or triton with TRITON_INTERPRET=1: make test-kernels"
    if DEVICE == "cpu" and tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        return "the interpreter before Triton 3.7 makes no loop bounds with NumPy 2.4"
    return ""
