"""What processor this is."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's name; Linux alone tells it in full."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
