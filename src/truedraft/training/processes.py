"""Processes that train together, launched by `accelerate launch` or `torchrun`.

Each reads its part of every batch, and gradients are summed: the result is that of one process up to the order of
sums in float32. The main process does all else while the others wait.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from truedraft.errors import MissingExtraError, OptionError, TrainingError

_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # names of different launchers
_Given = TypeVar("_Given")
_PATIENCE = timedelta(days=14)  # timeout of waiting processes: the target may write for days


@dataclass(frozen=True)
class Processes:
    """The processes of one training, and the rank of this one; without `together` it works by itself."""

    rank: int = 0
    count: int = 1
    together: bool = False

    @classmethod
    def here(cls) -> Processes:
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size(), together=True)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> slice | None:
        """The slice of `count` sequences that this process reads, which may be empty; None is all of them.

        Worked example: of 5 sequences the first of two processes reads 0 and 1, and the second 2 to 4.
        """
        if self.count == 1:
            return None
        return slice(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def from_main(self, value: _Given | None) -> _Given:
        """Broadcast the main process's value; the others pass None and wait."""
        found: list[Any] = [value]
        if self.together:
            with _talking():
                distributed.broadcast_object_list(found)
        given: _Given = found[0]
        return given

    def anywhere(self, value: bool) -> bool:
        return any(self._of_all(value))

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums of the processes' values by name; names may be missing in some processes."""
        sums: Counter[str] = Counter()
        for each in self._of_all(dict(values)):
            sums.update(each)
        return dict(sums)

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum each gradient over all processes; it stays None where no process has one."""
        if not self.together:
            return
        trained = [each for each in parameters if each.requires_grad]
        found = zip(*self._of_all([each.grad is not None for each in trained]), strict=True)
        for weight, has_one in zip(trained, found, strict=True):
            if any(has_one):
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()
                with _talking():
                    distributed.all_reduce(weight.grad)

    def refuse_several(self, what: str) -> None:
        """Raise OptionError if there are several."""
        if self.count > 1:
            raise OptionError(f"{what} in one process, and {self.count} were launched: start it without a launcher")

    def _of_all(self, value: Any) -> list[Any]:
        if not self.together:
            return [value]
        found = [value] * self.count
        with _talking():
            distributed.all_gather_object(found, value)
        return found


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError("another process of this training has ended; it says why") from error


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the launched processes in the block (gloo on CPUs, NCCL on GPUs); yields this process's device.

    Raises MissingExtraError if accelerate is needed, OptionError if several were requested and one was launched.
    """
    if all(int(os.environ.get(name, "1")) < 2 for name in _COUNTS):
        if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
            raise OptionError(
                "`accelerate launch` was to launch several processes and launched one, as it does on CPUs: give it "
                "--multi_gpu, which launches several on CPUs, too"
            )
        yield device
        return
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingExtraError(
            "training in several processes needs accelerate: pip install 'truedraft[train]'; or start one process"
        ) from error
    state = PartialState(cpu=device.startswith("cpu"), timeout=_PATIENCE)
    try:
        yield str(state.device)
    finally:
        state.destroy_process_group()
