"""What a training ran on, in words, for cards and records."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine(device: str = "cpu") -> str:
    """The GPU's name, or the processor's with its cores."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_name()}, {os.cpu_count()} cores ({platform.machine()}, {capability}), no GPU"


def cpu_name() -> str:
    """The processor's name; Linux alone tells it in full."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
