"""Block drafters in other projects' folders: what is read, round trips, and each kind of damage in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.block_reference import random_block
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.heads import BlockConfig, BlockHead, DFlashHead, DSparkHead, Eagle3Head
from truedraft.heads.block_folders import write_dflash_folder, write_dspark_folder, write_speculators_folder

SIZES = BlockConfig(48, 97, (0, 2, 5), block=4, mask_id=96, depth=2, heads=4, kv_heads=2, head=16, inner=64)
MARKOV = replace(SIZES, from_anchor=True, markov=8, confidence=True, confidence_reads_token=True)
REDUCED: dict[str, Any] = {"draft_vocab": 40, "own_output": True}
HEADS: dict[str, tuple[type[BlockHead], BlockConfig, Callable[[Any, Path], None]]] = {
    "z-lab": (DFlashHead, SIZES, lambda head, folder: write_dflash_folder(head, folder, target_layers=9)),
    "DeepSpec": (
        DSparkHead, replace(MARKOV, own_output=True, own_embedding=True, markov_kind="gated"),
        lambda head, folder: write_dspark_folder(head, folder, target_layers=9),
    ),
    "speculators, dflash": (DFlashHead, replace(SIZES, **REDUCED), write_speculators_folder),
    "speculators, all ids": (DFlashHead, SIZES, write_speculators_folder),
    "speculators, dspark": (DSparkHead, replace(MARKOV, markov_kind="rnn", **REDUCED), write_speculators_folder),
}  # fmt: skip


def written(name: str, folder: Path) -> tuple[BlockHead, Path]:
    kind, config, write = HEADS[name]
    head = random_block(kind, config)
    write(head, folder)
    return head, folder


def change(folder: Path, weights: Callable[[dict[str, Tensor]], object] = lambda each: None, **record: Any) -> None:
    """Write a folder again with other weights, or other words in its config.json; None takes one away."""
    found = load_file(folder / "model.safetensors")
    weights(found)
    save_file(found, folder / "model.safetensors")
    about = json.loads((folder / "config.json").read_text()) | record
    about = {name: each for name, each in about.items() if each is not None}
    (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("name", HEADS)
def test_a_round_trip_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    head, folder = written(name, tmp_path / "once")
    kept = type(head).load(folder)
    assert kept.config == head.config
    assert {key: each.tolist() for key, each in kept.state_dict().items()} == {
        key: each.tolist() for key, each in head.state_dict().items()
    }
    assert not kept.training and not any(each.requires_grad for each in kept.parameters())
    assert "it is used because its sizes fit" in (kept.record.note or "")
    HEADS[name][2](kept, tmp_path / "again")
    assert all(
        (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
        for file in ("config.json", "model.safetensors")
    )


def test_layers_are_numbered_by_what_they_give_and_by_what_enters_them(tmp_path: Path) -> None:
    """z-lab's and DeepSpec's numbers are those of outputs, as here; in `speculators` 2 is what layer 1 gives."""
    numbers = {}
    for name in HEADS:
        about = json.loads((written(name, tmp_path / name)[1] / "config.json").read_text())
        numbers[name] = about.get("aux_hidden_state_layer_ids") or about.get("dflash_config", about)["target_layer_ids"]
    assert numbers == {
        "z-lab": [0, 2, 5], "DeepSpec": [0, 2, 5], "speculators, dflash": [1, 3, 6], "speculators, all ids": [1, 3, 6],
        "speculators, dspark": [1, 3, 6],
    }  # fmt: skip


def test_what_a_configuration_may_leave_out_is_what_its_project_takes(tmp_path: Path) -> None:
    folder = written("speculators, dspark", tmp_path / "nested")[1]
    about = json.loads((folder / "config.json").read_text())
    layer = about["transformer_layer_config"]
    del layer["rms_norm_eps"], layer["max_position_embeddings"], layer["rope_parameters"]
    copies = {"verifier_norm.weight": torch.ones(48), "verifier_lm_head.weight": torch.ones(40, 48)}
    verifier = {"verifier": {"name_or_path": "org/target"}}
    change(
        folder, lambda weights: weights.update(copies), transformer_layer_config=layer, sample_from_anchor=None,
        confidence_head_with_markov=None, enable_confidence_head=None, speculators_config=verifier,
    )  # fmt: skip
    kept = DSparkHead.load(folder)
    assert kept.config.eps == 1e-6 and kept.config.most_positions == 32768 and kept.config.rope["rope_theta"] == 10000.0
    assert kept.config.from_anchor and kept.config.confidence_reads_token and kept.record.target_name == "org/target"
    newer = written("z-lab", tmp_path / "flat")[1]
    inside = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2, 5]}
    change(newer, block_size=None, dflash_config=inside, rope_parameters=None, rope_theta=1e6)
    assert DFlashHead.load(newer).config.block == 4 and DFlashHead.load(newer).config.rope["rope_theta"] == 1e6


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def put(name: str, weight: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({name: weight})


def nothing(weights: dict[str, Tensor]) -> None:
    del weights


ZLAB, NESTED = "z-lab", "speculators, dspark"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = {
    "a tensor is missing": (ZLAB, without("layers.1.mlp.up_proj.weight"), {}, "lacks layers.1.mlp.up_proj.weight"),
    "one is too many": (ZLAB, put("layers.2.extra", torch.ones(3)), {}, "holds layers.2.extra, unknown"),
    "another shape": (ZLAB, put("fc.weight", torch.ones(48, 96)), {}, r"fc.weight .* has the shape \[48, 96\]"),
    "numbers of several kinds": (ZLAB, put("norm.weight", torch.ones(48).half()), {}, "numbers of several kinds"),
    "no width": (ZLAB, nothing, {"hidden_size": None}, "does not name 'hidden_size'"),
    "no block": (ZLAB, nothing, {"block_size": None}, "does not name 'block_size'"),
    "another activation": (ZLAB, nothing, {"hidden_act": "gelu"}, "activation is 'gelu'"),
    "biases": (ZLAB, nothing, {"attention_bias": True}, "attention has biases"),
    "windows": (ZLAB, nothing, {"layer_types": ["sliding_attention"] * 2}, "a window of the context"),
    "the last layer": (ZLAB, nothing, {"num_target_layers": 6}, "reads layer 5 of 6, the last"),
    "no Markov head": (NESTED, without("markov_head.markov_w2.weight"), {}, "lacks markov_head.markov_w2.weight"),
    "another Markov head": (NESTED, nothing, {"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
    "ids for offsets": (NESTED, put("d2t", torch.arange(40) * 2 + 1), {}, "it holds offsets"),
    "two tables that differ": (NESTED, put("t2d", torch.ones(97, dtype=torch.bool)), {}, "name different ids"),
    "the embedding as a layer": (NESTED, nothing, {"aux_hidden_state_layer_ids": [0, 1, 2]}, r"got \[-1, 0, 1\]"),
    "another width than the target's": (NESTED, nothing, {"target_hidden_size": 64}, "48 wide, and its target 64"),
    "no mask": (NESTED, nothing, {"mask_token_id": None}, "does not name 'mask_token_id'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_in_a_sentence(name: str, tmp_path: Path) -> None:
    made, weights, record, said = DAMAGES[name]
    head, folder = written(made, tmp_path / "head")
    change(folder, weights, **record)
    with pytest.raises(ModelError, match=said) as caught:
        type(head).load(folder)
    assert "\n" not in str(caught.value)


def test_another_kind_is_named(tmp_path: Path) -> None:
    folder = written("speculators, dspark", tmp_path / "head")[1]
    with pytest.raises(ModelError, match="holds a DSpark head, not a DFlash head; use dspark:"):
        DFlashHead.load(folder)
    with pytest.raises(ModelError, match="is not of an EAGLE-3 head"):
        Eagle3Head.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no model\.safetensors"):
        DSparkHead.load(folder)


def test_a_format_without_a_place_for_something_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="train with --draft-vocab 0"):
        write_dflash_folder(random_block(DFlashHead, replace(SIZES, **REDUCED)), tmp_path, target_layers=9)
    with pytest.raises(ModelError, match="copies of the target's embedding"):
        write_dspark_folder(random_block(DSparkHead, MARKOV), tmp_path, target_layers=9)
    with pytest.raises(ModelError, match="as DeepSpec reads it"):
        write_speculators_folder(random_block(DSparkHead, replace(MARKOV, own_output=True)), tmp_path)
    assert not list(tmp_path.iterdir())
