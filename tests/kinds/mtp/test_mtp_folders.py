"""MTP layers of checkpoints in folders of `speculators`: round trips, and each kind of damage in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kinds.test_layer_folders import put, without
from support.mtp_checkpoints import SHAPES, WEIGHTS, MtpReference
from truedraft import load_model
from truedraft.drafters import from_spec
from truedraft.drafters.kinds import kind_in
from truedraft.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from truedraft.kinds.mtp.module import MtpHead, write_mtp_folder

PREFIX = "mtp_layers.0."
NORM, UP = f"{PREFIX}final_layernorm.weight", f"{PREFIX}mlp.up_proj.weight"


@cache
def reference(name: str) -> MtpReference:
    return MtpReference(SHAPES[name])


def written(name: str, place: Path, **given: Any) -> tuple[str, Path]:
    model = str(reference(name).write(place / "model"))
    write_mtp_folder(place / "once", model, **given)
    return model, place / "once"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_round_trip_is_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In the dtype of the files; the layer drafts as that of the checkpoint, as far as the folder says."""
    model = reference(name).write(tmp_path / "model")
    found = {each: tensor.to(dtype) for each, tensor in load_file(model / WEIGHTS).items()}
    save_file(found, model / WEIGHTS, metadata={"format": "pt"})
    write_mtp_folder(tmp_path / "once", str(model), tokens=2, family="Family")
    write_mtp_folder(tmp_path / "again", str(model), str(tmp_path / "once"), family="Family")
    for file in ("config.json", WEIGHTS):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    kept = load_file(tmp_path / "once" / WEIGHTS)
    assert kept[NORM].equal(found["mtp.norm.weight"]) and kept[f"{PREFIX}input_proj.weight"].equal(
        found["mtp.fc.weight"]
    )
    if name == "qwen3_next":
        gates = kept[f"{PREFIX}mlp.experts.gate_up_proj"].chunk(2, 1)[0]
        assert gates[2].equal(found["mtp.layers.0.mlp.experts.2.gate_proj.weight"])
    assert kind_in(tmp_path / "once") == "mtp"
    target = load_model(model, dtype="float32")
    own, other = from_spec("mtp", target), from_spec(f"mtp:{tmp_path / 'once'}", target)
    assert (own.facts, own.limits.depth, other.limits.depth) == (other.facts, 3, 2)


BROKEN: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (without(NORM), r"lack mtp_layers\.0\.final_layernorm\.weight,"),
    (without(f"{PREFIX}input_proj.weight"), r"lack mtp_layers\.0\.input_proj\.weight,"),
    (without(UP), r"lack mtp_layers\.0\.mlp\.up_proj\.weight,"),
    (put(f"{PREFIX}mlp.extra", torch.ones(3)), r"hold mtp_layers\.0\.mlp\.extra,"),
    (put(UP, torch.ones(9, 48)), r"in another shape mtp_layers\.0\.mlp\.up_proj"),
    (put(f"{PREFIX}input_proj.weight", torch.ones(48, 48)), r"in another shape mtp_layers\.0\.input_proj"),
]


@pytest.mark.parametrize(("damage", "said"), BROKEN)
def test_damaged_weights_are_told_in_a_sentence(
    damage: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path
) -> None:
    """Where the folder is read, and where it is written again."""
    model, folder = written("qwen3", tmp_path)
    weights = load_file(folder / WEIGHTS)
    damage(weights)
    save_file(weights, folder / WEIGHTS)
    target = load_model(model, dtype="float32")
    for read in (
        lambda: MtpHead.for_target(str(folder), target),
        lambda: write_mtp_folder(tmp_path / "again", model, str(folder)),
    ):
        with pytest.raises(ModelError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_written_or_read_is_refused(tmp_path: Path) -> None:
    for name, said in (("glm4_moe", "is of glm4_moe; draft with it here"), ("deepseek_v3", "of deepseek_v3; draft")):
        with pytest.raises(UnsupportedModelError, match=f"speculators 0.9 has MTP layers of qwen3, .* {said}"):
            written(name, tmp_path / name)
    model, folder = written("qwen3", tmp_path)
    target, about = load_model(model, dtype="float32"), json.loads((folder / "config.json").read_text())
    about["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = "two"
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match=r"drafts 'two' tokens by its config\.json, not 1 to 1024"):
        MtpHead.for_target(str(folder), target)
    (folder / "config.json").write_text("{}")
    assert MtpHead.for_target(str(folder), target).reach == 3
    mixed = load_file(folder / WEIGHTS)
    mixed[NORM] = mixed[NORM].half()
    save_file(mixed, folder / WEIGHTS)
    with pytest.raises(ModelError, match="holds numbers of several kinds"):
        write_mtp_folder(tmp_path / "again", model, str(folder))
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        write_mtp_folder(tmp_path / "again", model, str(tmp_path / "none"))
