"""`run.json`: what a run was, so that its result can be made again."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

RUN_RECORD = "run.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def write_run_record(folder: Path, *, config: object, data_sha256: str) -> None:
    """Write the command, the versions, the hash of the token stream and the configuration."""
    record = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "data_sha256": data_sha256,
        "config": _plain(config),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_RECORD).write_text(json.dumps(record, indent=1, default=str) + "\n")


def _plain(value: object) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
