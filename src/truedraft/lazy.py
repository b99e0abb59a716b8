"""Public names of a package that load on first use, so that importing the package costs next to nothing.

Loading takes seconds, and so does compiling at a first start: `compile_ahead` compiles at the same time.
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
    """The `__getattr__` of a package, by the modules of its public names."""

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load


@functools.cache
def compile_ahead() -> subprocess.Popen[bytes] | None:
    """Start compiling the forward for this processor in a separate process, while this one imports transformers.

    If it was compiled before, that process ends at once. Nothing is started where transformers is imported already or
    models are likely to run on a GPU; the result is kept for the next start.
    """
    if "transformers" in sys.modules or _GPU.exists():
        return None
    quiet = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        command = [sys.executable, str(_BUILD)]
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    return None
