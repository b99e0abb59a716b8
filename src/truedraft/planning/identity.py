"""What a measured cost belongs to: when one of these changes, it must be measured again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel

_NOT_OF_THE_MODEL = {"transformers_version", "dtype", "torch_dtype"}


def versions() -> dict[str, str]:
    """Versions of the libraries that costs depend on."""
    return {
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "truedraft": metadata.version("truedraft"),
    }


def model_identity(model: LanguageModel) -> dict[str, Any]:
    """A model by its sizes and its configuration; what its weights are does not change what they cost."""
    config = getattr(getattr(model, "module", None), "config", None)
    return {
        "class": type(model).__qualname__,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "config": None if config is None else _digest(_plain(config.to_dict())),
    }


def drafter_identity(drafter: Drafter, params: SamplingParams) -> dict[str, Any]:
    """A drafter by its limits, its public options and the models in it, and how its tokens are drawn."""
    return _drafter(drafter) | {"law": list(params.law_key), "coupled": params.coupled}


def _drafter(drafter: Drafter) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in sorted(getattr(drafter, "__dict__", {}).items()):
        if name.startswith("_") or name == "limits":
            continue
        if isinstance(value, LanguageModel):
            options[name] = model_identity(value) | {"name": value.name, "dtype": str(value.dtype)}
        elif isinstance(value, Drafter):
            options[name] = _drafter(value)
        elif value is None or isinstance(value, bool | int | float | str):
            options[name] = value
        elif isinstance(value, tuple | list) and all(isinstance(item, int | float | str) for item in value):
            options[name] = list(value)
    return {"class": type(drafter).__qualname__, "limits": asdict(drafter.limits), "options": options}


def _plain(value: Any) -> Any:
    """A configuration without what loading it left there."""
    if isinstance(value, dict):
        kept = {str(name): _plain(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if name[:1] != "_" and name not in _NOT_OF_THE_MODEL}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
