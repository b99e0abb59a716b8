"""Moved packages can be imported under their old names for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "truedraft.bench": "truedraft.measure.bench",
    "truedraft.cache": "truedraft.models.cache",
    "truedraft.cluster": "truedraft.server.cluster",
    "truedraft.control": "truedraft.engine.policy",
    "truedraft.costs": "truedraft.engine.policy",
    "truedraft.embedded": "truedraft.models.embedded",
    "truedraft.learning": "truedraft.training.online",
    "truedraft.peers": "truedraft.measure.peers",
    "truedraft.planning.decisions": "truedraft.engine.policy.decisions",
    "truedraft.planning.sizes": "truedraft.engine.policy.sizes",
    "truedraft.planning": "truedraft.measure",
    "truedraft.theory": "truedraft.core.theory",
}
"""New names by old ones; the first matching prefix counts."""


def new_name(name: str) -> str | None:
    """The new name of a module; None for one that was not moved.

    >>> new_name("truedraft.cluster.proxy")
    'truedraft.server.cluster.proxy'
    """
    for old, new in MOVED.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return None


class _Moved(MetaPathFinder, Loader):
    """Imports a module under its old name: the same object as under the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        message = f"{fullname} is {new} now; its old name goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(str(new_name(module.__name__)))


_FINDER = _Moved()


def find_moved() -> None:
    """Install the finder for moved packages, before all others, which would find copies of a package's modules."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
