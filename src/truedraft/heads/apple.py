"""Recurrent heads that Apple's recurrent-drafting project wrote, in its `Drafter` format: weights only.

config.json has `model_type` "recurrent_drafting_drafter", `hidden_size`, `exit_dim`, `num_draft_layers`, `rnn` and
`vocab_size`. The weights are `input_proj` (where twice the hidden size is not `exit_dim`), `lm_head.{i}.linear` of each
residual block, `lm_head.{num_draft_layers}.weight` of the output, and, of a recurrent one, `rnn_u` and `rnn_w.weight`.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead

_TYPE = "recurrent_drafting_drafter"
_CONFIG, _SAFE, _PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"


def is_apple(path: Path) -> bool:
    """Whether a folder's config.json says that it is of this format."""
    try:
        record = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("model_type") == _TYPE


def load_apple(path: Path) -> tuple[RedrafterHead, str, None, dict[str, Any], str]:
    """Read a head of this format; only tensors are read, no code that a file may hold.

    Returns:
        The head, with an output of its own; no name of its target, no fingerprint and no facts; and a note on what
        could not be checked.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, or the weights are not those that config.json names.
    """
    config = _sizes(path / _CONFIG)
    file = next((path / name for name in (_SAFE, _PICKLED) if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {_SAFE} nor {_PICKLED}; fetch one of them")
    state, names = _read(file), _names(config)
    with torch.device("meta"):
        head = RedrafterHead(config)
    _refuse_others(state, {theirs: head.state_dict()[ours].shape for theirs, ours in names.items()}, file)
    head.load_state_dict({ours: state[theirs] for theirs, ours in names.items()}, strict=True, assign=True)
    note = (
        f"{file.name} is of Apple's recurrent-drafting project and does not say which weights it was trained for; it "
        "is used because its sizes fit"
    )
    return head.eval().requires_grad_(False), "", None, {}, note


def _sizes(path: Path) -> RedrafterConfig:
    record = json.loads(path.read_text(encoding="utf-8"))
    try:
        width, rnn = record["hidden_size"], record["rnn"]
        if not isinstance(rnn, bool):
            raise TypeError(f"rnn is {rnn!r}")
        return RedrafterConfig(
            width=width,
            vocab_size=record["vocab_size"],
            state=width,
            exit_width=record["exit_dim"],
            layers=record["num_draft_layers"],
            tied=False,
            rnn=rnn,
            scaled=False,
        )
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names sizes that make no head ({error}); fetch it again") from error


def _names(config: RedrafterConfig) -> dict[str, str]:
    """The name of each of their weights in our head."""
    names = {f"lm_head.{config.layers}.weight": "output.weight"}
    for layer in range(config.layers):
        for part in ("weight", "bias"):
            names[f"lm_head.{layer}.linear.{part}"] = f"blocks.{layer}.linear.{part}"
    if 2 * config.width != config.exit_width:
        names |= {"input_proj.weight": "entry.weight", "input_proj.bias": "entry.bias"}
    if config.rnn:
        names |= {"rnn_w.weight": "token.weight", "rnn_u.weight": "recurrent.weight", "rnn_u.bias": "recurrent.bias"}
    return names


def _read(file: Path) -> dict[str, Tensor]:
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot read {str(file)!r} as tensors ({reason}); fetch the file again") from error
    if not isinstance(state, dict) or not all(isinstance(weight, Tensor) for weight in state.values()):
        raise ModelError(f"{str(file)!r} is no dictionary of tensors; fetch the file again")
    return state


def _refuse_others(state: dict[str, Tensor], expected: dict[str, torch.Size], file: Path) -> None:
    """Refuse weights that are missing, unknown, or of other shapes than config.json names."""
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing:
        raise ModelError(f"{str(file)!r} lacks {', '.join(missing)}, which its {_CONFIG} asks for; fetch both again")
    if unknown:
        raise ModelError(f"{str(file)!r} holds {', '.join(unknown)}, unknown to its {_CONFIG}; fetch both again")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise ModelError(
                f"{name} in {str(file)!r} has the shape {list(state[name].shape)}, and its {_CONFIG} asks for "
                f"{list(shape)}; fetch both again"
            )
    if len({weight.dtype for weight in state.values()}) != 1 or not next(iter(state.values())).is_floating_point():
        raise ModelError(f"{str(file)!r} holds numbers of several kinds; fetch the file again")
