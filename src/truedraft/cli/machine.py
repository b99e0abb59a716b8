"""What a measurement depends on: machine, versions, threads."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from truedraft import __version__


def machine_facts() -> dict[str, Any]:
    """Machine, versions and threads, for reports."""
    import torch

    from truedraft.models.dtypes import cpu_name, has_bfloat16, pick_device, pick_dtype

    device = pick_device("auto")
    return {
        "truedraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": has_bfloat16(torch.device("cpu")),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "device_auto": str(device),
        "dtype_auto": str(pick_dtype("auto", device)).removeprefix("torch."),
    }
