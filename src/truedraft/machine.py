"""This machine: its properties, and the device and number format to use on it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from truedraft import __version__
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.options import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Dtypes of weights, by their names as typed."""


def pick_device(name: str | torch.device) -> torch.device:
    """The device of an option; "auto" is CUDA where available. OptionError: no such device, or none on this machine."""
    name = str(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UnknownOptionError.nearest("device", name, ("auto", "cpu", "cuda"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r} is not of the form cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device {name!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices")
    return device


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of an option; "auto" is bfloat16 where the device computes in it, else float32. UnknownOptionError if
    none.
    """
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise UnknownOptionError.nearest("dtype", name, ("auto", *DTYPES))
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as typed: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 products; emulated ones are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_avx512_bfloat16() or _cpu_has("_is_amx_tile_supported")


def has_avx512_bfloat16() -> bool:
    """Whether the processor multiplies vectors of bfloat16."""
    return _cpu_has("_is_avx512_bf16_supported")


@functools.cache
def may_use_tiles() -> bool:
    """Whether the processor has AMX tiles and the system lets this process use them; requests that permission."""
    return _cpu_has("_is_amx_tile_supported") and _cpu_has("_init_amx")


def keep_rows_alike(device: torch.device, dtype: torch.dtype) -> None:
    """Keeps oneDNN from products in which a row's bits depend on the other rows.

    On processors with AMX it computes few rows with vector instructions and many with tiles, which add up in another
    order. It reads its instruction set from the environment once, at this process's first product of its kind, so this
    is called before a model is loaded. After such a product it has no effect (`model.equality` detects that), and a
    value set by the user is kept.
    """
    if device.type == "cpu" and dtype is torch.bfloat16 and _cpu_has("_is_amx_tile_supported"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _cpu_has(probe: str) -> bool:
    """torch has these probes under private names only; where one is missing, no is the safe answer."""
    return bool(getattr(torch.cpu, probe, lambda: False)())


def cpu_name() -> str:
    """The processor's name; complete only on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def this_machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What costs depend on: this machine, with the device of a model; GPUs by their names."""
    place = torch.device(device)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
    }


def wait_for(device: torch.device) -> None:
    """Return when the device has finished all queued work; a clock read earlier does not include it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes in use on a CUDA device, by any process, and its total; None for another device.

    Memory that torch's allocator holds unused counts as free.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total - free - unused, total


def free_memory(device: torch.device) -> int | None:
    """Bytes of memory still available where a model is; None where unknown.

    Of the device, or of the system and the control group of this process.
    """
    if (on_gpu := gpu_memory(device)) is not None:
        used, total = on_gpu
        return total - used
    found = [_system_free(), _group_free()]
    return min((each for each in found if each is not None), default=None)


def _system_free() -> int | None:
    """Available memory; None except on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _group_free() -> int | None:
    """Memory left of a container's limit, with cached files counted as free; None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().splitlines()
        files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    except (OSError, ValueError, IndexError):  # one without a limit says "max"
        return None
    return max(limit - used + files, 0)


def in_bytes(count: int) -> str:
    """A number of bytes in words."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def describe_machine(device: str = "cpu") -> str:
    """The GPU's name, or the processor's with its cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_name()}, {os.cpu_count()} cores ({platform.machine()}, {capability}), no GPU"


def run_delay_s() -> float:
    """Seconds that this process's threads were runnable and waited for a core; 0 where the system does not count them.

    Its growth during a measurement shows how busy the machine was.
    """
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may have ended
            waited += int(thread.read_text().split()[1])
    return waited / 1e9


def versions() -> dict[str, str]:
    """Versions of the libraries that speeds depend on, with truedraft's also where it is not installed."""
    return {"truedraft": __version__, "torch": torch.__version__, "transformers": metadata.version("transformers")}


def machine_facts() -> dict[str, Any]:
    """Machine, versions and threads, for reports."""
    device = pick_device("auto")
    return {
        **versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": has_bfloat16(torch.device("cpu")),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "device_auto": str(device),
        "dtype_auto": dtype_name(pick_dtype("auto", device)),
    }
