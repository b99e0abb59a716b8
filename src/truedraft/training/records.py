"""`run.json`: what a run was, so that its result can be made again."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from truedraft.training.disk import writing
from truedraft.training.machine import describe_machine

if TYPE_CHECKING:
    from truedraft.training.identity import Identity

RUN_RECORD = "run.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def typed_command() -> list[str]:
    """The words of the command that runs."""
    program = Path(sys.argv[0])
    first = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return [*first, *sys.argv[1:]]


def write_run_record(folder: Path, *, identity: Identity, device: str) -> None:
    """Write the command, the versions, the machine, and what decides the weights (with the hash of the data)."""
    record = {
        "command": typed_command(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "machine": describe_machine(device),
        "threads": torch.get_num_threads(),
        "identity": dict(identity),
    }
    with writing(folder / RUN_RECORD):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_RECORD).write_text(json.dumps(record, indent=1) + "\n")
