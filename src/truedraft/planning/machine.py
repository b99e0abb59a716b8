"""The machine, as far as costs depend on it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from truedraft.models.dtypes import cpu_name


@dataclass(frozen=True, slots=True)
class Machine:
    """What costs were measured on.

    Attributes:
        cpu: the processor's name.
        cores: logical cores.
        capability: the widest vector instructions that torch uses, in its words.
        threads: that torch computes with.
        device: "cpu", or the GPU's name.
    """

    cpu: str
    cores: int
    capability: str
    threads: int
    device: str


def this_machine(device: str | torch.device = "cpu") -> Machine:
    """This machine, with the device that a model lives on."""
    place = torch.device(device)
    return Machine(
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
    )


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given; a clock read before tells nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
