"""Recurrent heads as Apple's recurrent-drafting project publishes them, in its `Drafter` format: only weights.

config.json has `model_type` "recurrent_drafting_drafter", `hidden_size`, `exit_dim`, `num_draft_layers`, `rnn` and
`vocab_size`. The weights are `input_proj` (if twice the hidden size is not `exit_dim`), `lm_head.{i}.linear` of each
residual block, `lm_head.{num_draft_layers}.weight` of the output, and, with `rnn`, `rnn_u` and `rnn_w.weight`. It does
not identify the target's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from truedraft.drafters.heads.head import HeadRecord, tensors_in
from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead

_CONFIG = "config.json"
_APPLE_TYPE = "recurrent_drafting_drafter"
_APPLE_FILES = ("model.safetensors", "pytorch_model.bin")
_Redrafter = TypeVar("_Redrafter", bound=RedrafterHead)


def kind_in(path: Path) -> str | None:
    """The kind of head in a folder of this format; None if there is none."""
    return RedrafterHead.kind if object_of(path / _CONFIG).get("model_type") == _APPLE_TYPE else None


def load_apple(path: Path, kind: type[_Redrafter]) -> _Redrafter:
    """Load a recurrent head of Apple's project, with its own output.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, or the weights do not match config.json.
    """
    config = _apple_sizes(path / _CONFIG)
    file = next((path / name for name in _APPLE_FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {' nor '.join(_APPLE_FILES)}; fetch one of them")
    head = kind.with_weights(config, tensors_in(file, "fetch the file again"), file, _apple_names(config))
    note = (
        f"{file.name} is of Apple's recurrent-drafting project and does not say which weights it was trained for; it "
        "is used because its sizes fit"
    )
    head.record = HeadRecord(note=note)
    return head


def _apple_sizes(path: Path) -> RedrafterConfig:
    record = object_of(path)
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


def _apple_names(config: RedrafterConfig) -> dict[str, str]:
    names = {f"lm_head.{config.layers}.weight": "output.weight"}
    for layer in range(config.layers):
        for part in ("weight", "bias"):
            names[f"lm_head.{layer}.linear.{part}"] = f"blocks.{layer}.linear.{part}"
    if 2 * config.width != config.exit_width:
        names |= {"input_proj.weight": "entry.weight", "input_proj.bias": "entry.bias"}
    if config.rnn:
        names |= {"rnn_w.weight": "token.weight", "rnn_u.weight": "recurrent.weight", "rnn_u.bias": "recurrent.bias"}
    return names
