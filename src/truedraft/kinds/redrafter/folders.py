"""Recurrent heads as Apple's recurrent-drafting project publishes them, in its `Drafter` format: only weights.

config.json has `model_type` "recurrent_drafting_drafter", `hidden_size`, `exit_dim`, `num_draft_layers`, `rnn` and
`vocab_size`. The weights are `input_proj` (if twice the hidden size is not `exit_dim`), `lm_head.{i}.linear` of each
residual block, `lm_head.{num_draft_layers}.weight` of the output, and, with `rnn`, `rnn_u` and `rnn_w.weight`.
"""

from __future__ import annotations

from pathlib import Path

from truedraft.drafters.exporting import Exports
from truedraft.drafters.heads.head import HeadRecord, published_tensors, reading_sizes, unnamed_target
from truedraft.files import object_of
from truedraft.kinds import INSTEAD
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead

_CONFIG, _TYPE = "config.json", "recurrent_drafting_drafter"

REDRAFTER = Exports({}, {"": INSTEAD})
"""No other engine runs recurrent heads."""


def kind_in(path: Path) -> str | None:
    """The kind of head in a folder; None if there is none."""
    return RedrafterHead.kind if object_of(path / _CONFIG).get("model_type") == _TYPE else None


def load_published(path: Path, kind: type[RedrafterHead], *, ids_in_d2t: bool = False) -> RedrafterHead | None:
    """Load a recurrent head of Apple's project, with its own output; None if there is none.

    Raises `ModelError` for missing, damaged or unfitting weights.
    """
    if kind_in(path) is None:
        return None
    record = object_of(path / _CONFIG)
    with reading_sizes(path / _CONFIG):
        if not isinstance(record["rnn"], bool):
            raise TypeError(f"rnn is {record['rnn']!r}")
        config = RedrafterConfig(
            width=record["hidden_size"],
            vocab_size=record["vocab_size"],
            state=record["hidden_size"],
            exit_width=record["exit_dim"],
            layers=record["num_draft_layers"],
            tied=False,
            rnn=record["rnn"],
            scaled=False,
        )
    file, weights = published_tensors(path)
    head = kind.with_weights(config, weights, file, _names(config))
    head.record = HeadRecord(note=unnamed_target(f"{file.name} is of Apple's recurrent-drafting project and"))
    return head


def _names(config: RedrafterConfig) -> dict[str, str]:
    names = {f"lm_head.{config.layers}.weight": "output.weight"}
    for layer in range(config.layers):
        for part in ("weight", "bias"):
            names[f"lm_head.{layer}.linear.{part}"] = f"blocks.{layer}.linear.{part}"
    if 2 * config.width != config.exit_width:
        names |= {"input_proj.weight": "entry.weight", "input_proj.bias": "entry.bias"}
    if config.rnn:
        names |= {"rnn_w.weight": "token.weight", "rnn_u.weight": "recurrent.weight", "rnn_u.bias": "recurrent.bias"}
    return names
