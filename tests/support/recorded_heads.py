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


class Recordable(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading from the device, and copying numbers of the host to it."""

    READS = frozenset(
        {
            "_local_scalar_dense",
            "item",
            "nonzero",
            "masked_select",
            "unique",
            "_unique2",
            "is_nonzero",
            "equal",
            "bincount",
        }
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, overload, kwargs = func._schema.name.removeprefix("aten::"), func._overloadname, kwargs or {}
        by_mask = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:])
        )
        if name in self.READS or by_mask or (name == "repeat_interleave" and overload == "Tensor"):
            raise AssertionError(f"{name} waits for the device")
        if name == "lift_fresh":
            raise AssertionError(f"{name} copies numbers of the host to the device")
        return func(*args, **kwargs)


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
