"""Triton kernels for forwards over pages; Triton is imported with the first one used, so it may be missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.models.backends.graphs.attention_kernel import paged_attention
    from truedraft.models.backends.graphs.layer_kernels import gated, rms_norm, rotate_and_write

_LEAST_CAPABILITY = (8, 0)  # bfloat16 products on tensor cores

_HOMES = {
    "gated": "truedraft.models.backends.graphs.layer_kernels",
    "paged_attention": "truedraft.models.backends.graphs.attention_kernel",
    "rms_norm": "truedraft.models.backends.graphs.layer_kernels",
    "rotate_and_write": "truedraft.models.backends.graphs.layer_kernels",
}

__all__ = ["available", "gated", "paged_attention", "rms_norm", "rotate_and_write"]
__getattr__ = loads(__name__, _HOMES)


def available(device: torch.device) -> bool:
    """Whether kernels run on a device: NVIDIA from Ampere on, or a CPU if imported with `TRITON_INTERPRET=1`."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
