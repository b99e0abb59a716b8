"""Public names of a package that load on first use, so that importing the package costs next to nothing.

What they load takes seconds, and so does what a first start compiles: `compile_ahead` does it beside them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_BUILD = Path(__file__).parent / "models" / "backends" / "native" / "build.py"
_GPU = Path("/dev/nvidiactl")


def loads(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package.

    Args:
        package: its name.
        homes: its public names, with the modules that hold them.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load


@functools.cache
def compile_ahead() -> subprocess.Popen[bytes] | None:
    """Start compiling the forward for this processor in a process of its own, while others import transformers.

    Where it was compiled before, that process ends at once. Nothing is started where transformers is there already or
    models are likely to run on a GPU; what is compiled outlasts this process, for the next start.
    """
    if "transformers" in sys.modules or _GPU.exists():
        return None
    quiet = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        command = [sys.executable, str(_BUILD)]
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    return None
