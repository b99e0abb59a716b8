"""Drafters with heads as they run beside a target whose forwards are recorded, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.backends import HostRecorder
from truedraft.drafters import Medusa, Redrafter
from truedraft.models.backends.graphs.replay import Outputs, Recording
from truedraft.models.base import LanguageModel


class Waitless(TorchDispatchMode):
    """Refuses operations that wait for a device, because their result's shape or value must be known.

    Attributes:
        operations: those that ran, with the shapes of their tensors.
    """

    refused = frozenset({
        "_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal",
        "bincount", "repeat_interleave.Tensor",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2])
        )
        if {name, f"{name}.{func._overloadname}"} & self.refused or by_mask:
            raise AssertionError(f"{name} waits for the device, or copies to it")
        self.operations.append((name, tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))))
        return func(*args, **(kwargs or {}))


class Recordable(Waitless):
    """Refuses all that a CUDA graph cannot hold: copying numbers of the host to the device, too."""

    refused = Waitless.refused | {"lift_fresh"}


class StrictRecorder(HostRecorder):
    """Records only what a CUDA graph can hold."""

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        def watched() -> Outputs:
            with Recordable():
                return forward()

        return super().record(watched)


class _Recorded:
    recorder: StrictRecorder

    def _recorder(self, target: LanguageModel) -> Any:
        self.recorder = StrictRecorder()
        return self.recorder


class RecordedMedusa(_Recorded, Medusa):
    pass


class RecordedRedrafter(_Recorded, Redrafter):
    pass
