"""What makes a run that run: the values that decide its weights, and `run.json`, so that it can be made again.

Checkpoints hold these values; resuming compares them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from truedraft.errors import ChangedOptionsError
from truedraft.machine import describe_machine
from truedraft.training.workspace import writing

Identity: TypeAlias = Mapping[str, str | int | float | bool | None]
RUN_RECORD = "run.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")

_FREE = frozenset({"device", "checkpoint_every_s", "start_from"})  # the weights to start from count, not where they lie
WARMUP = "schedule.warmup_steps"
LENGTHS = ("schedule.stable_steps", "schedule.decay_steps")
"""What may differ until a decay begins."""
_SAMPLED_VALUES = 64


def identity_of(config: object, **more: str) -> dict[str, str | int | float | bool | None]:
    """The fields of a configuration under dotted names, and what else decides the weights (hashes of data, models)."""
    return {name: value for name, value in _flat(config, "") if name not in _FREE} | more


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A short hash of a sample of every parameter: other weights give another one, another place on disk does not."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:_SAMPLED_VALUES].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def refuse_another_run(before: Identity, now: Identity, *, step: int, folder: Path) -> None:
    """Refuse to go on with a checkpoint that was made by another configuration.

    The lengths of the schedule may differ as long as neither decay has begun: until then the runs are the same.

    Raises:
        ChangedOptionsError: names the fields that differ, with both values.
    """
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if all(step <= int(each.get(LENGTHS[0]) or 0) for each in (before, now)):
        differing = [name for name in differing if name not in LENGTHS]
    if differing:
        changes = {name: (before.get(name), now.get(name)) for name in differing}
        raise ChangedOptionsError(f"the training in {str(folder)!r}", changes)


def _flat(value: object, name: str) -> list[tuple[str, Any]]:
    """A dataclass as its leaves; what is no plain value, such as a loss, as its repr."""
    if is_dataclass(value) and not isinstance(value, type) and fields(value):
        prefix = f"{name}." if name else ""
        return [pair for each in fields(value) for pair in _flat(getattr(value, each.name), prefix + each.name)]
    plain = value is None or isinstance(value, (str, int, float))
    return [(name, value if plain else repr(value))]


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
