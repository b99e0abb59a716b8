"""What a training ran on, in words, for cards and records."""

from __future__ import annotations

import os
import platform

from truedraft.machine import cpu_name


def describe_machine(device: str = "cpu") -> str:
    """The GPU's name, or the processor's with its cores."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_name()}, {os.cpu_count()} cores ({platform.machine()}, {capability}), no GPU"
