"""EAGLE-3 heads in other projects' folders: what is read, round trips, and each kind of damage in one sentence."""

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

from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.heads import Eagle3Config, Eagle3Head
from truedraft.heads.eagle_folders import write_eagle_folder, write_speculators_folder

SIZES = Eagle3Config(48, 97, (0, 2, 5), heads=4, kv_heads=2, head=16, inner=64, draft_vocab=40)


def head(config: Eagle3Config = SIZES) -> Eagle3Head:
    made, generator = Eagle3Head(config), torch.Generator().manual_seed(5)
    for weight in made.parameters():
        weight.data.normal_(0.0, 0.2, generator=generator)
    if made.draft_ids is not None:
        made.draft_ids.copy_(torch.arange(40) * 2 + 1)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_eagle_folder(head(), tmp_path / "flat", target="tiny")
    return tmp_path / "flat"


def change(folder: Path, weights: Callable[[dict[str, Tensor]], object] = lambda each: None, **record: Any) -> None:
    """Write a folder again with other weights, or other words in its config.json; None takes one away."""
    found = load_file(folder / "model.safetensors")
    weights(found)
    save_file(found, folder / "model.safetensors")
    about = json.loads((folder / "config.json").read_text()) | record
    about = {name: each for name, each in about.items() if each is not None}
    (folder / "config.json").write_text(json.dumps(about))


def test_a_round_trip_is_bit_for_bit(folder: Path) -> None:
    kept, made = Eagle3Head.load(folder), head()
    assert kept.config == SIZES
    assert {name: each.tolist() for name, each in kept.state_dict().items()} == {
        name: each.tolist() for name, each in made.state_dict().items()
    }
    assert json.loads((folder / "config.json").read_text())["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6]
    }
    assert load_file(folder / "model.safetensors")["d2t"][:3].tolist() == [1, 2, 3]
    assert not kept.training and not any(each.requires_grad for each in kept.parameters())
    assert "it is used because its sizes fit" in (kept.record.note or "")


def test_layers_that_nobody_names_are_the_usual_ones_of_the_target(folder: Path) -> None:
    change(folder, eagle_config=None)
    config = Eagle3Head.load(folder).config
    assert config.layers == () and config.merged == 3
    assert config.at_usual_layers(32).layers == (1, 15, 28), "what enters layers 2, 16 and 29"
    assert SIZES.at_usual_layers(32) is SIZES
    with pytest.raises(OptionError, match="of a target with 6 layers there are no 3"):
        config.at_usual_layers(6)


def test_a_head_of_speculators_counts_from_one_and_brings_copies(folder: Path) -> None:
    """Its layer is called otherwise, its configuration is nested, and what it is trained beside is left out."""

    def renamed(weights: dict[str, Tensor]) -> None:
        for name in [each for each in weights if each.startswith("midlayer.")]:
            weights[name.replace("midlayer.", "layers.0.")] = weights.pop(name)
        weights["embed_tokens.weight"] = torch.ones(97, 48)
        weights["verifier_norm.weight"] = torch.ones(48)
        weights["input_norm.weight"] = torch.ones(144)

    about = json.loads((folder / "config.json").read_text())
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    change(
        folder, renamed, architectures=["Eagle3Speculator"], speculators_model_type="eagle3",
        transformer_layer_config=about, norm_before_residual=True, norm_before_fc=True,
        eagle_aux_hidden_state_layer_ids=[1, 3, 6], speculators_config={"verifier": verifier}, eagle_config=None,
        hidden_size=None,
    )  # fmt: skip
    kept = Eagle3Head.load(folder)
    config = kept.config
    assert config.layers == (0, 2, 5) and config.rope_start == 1 and config.own_embedding
    assert config.norm_before_residual and config.norm_before_fc
    assert kept.record.target_name == "org/target"
    assert kept.midlayer.mlp.up_proj.weight.equal(head().midlayer.mlp.up_proj.weight)
    with pytest.raises(ModelError, match="this format is of heads"):
        write_eagle_folder(kept, folder / "again")


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def put(name: str, weight: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({name: weight})


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = {
    "a tensor is missing": (without("midlayer.mlp.up_proj.weight"), {}, "lacks midlayer.mlp.up_proj.weight"),
    "one is too many": (put("midlayer.extra", torch.ones(3)), {}, "holds midlayer.extra, unknown"),
    "another shape": (put("fc.weight", torch.ones(48, 96)), {}, r"fc.weight .* has the shape \[48, 96\]"),
    "ids for offsets": (put("d2t", torch.arange(40) * 2 + 1), {}, "it holds offsets"),
    "two tables that differ": (put("t2d", torch.ones(97, dtype=torch.bool)), {}, "d2t and t2d .* name different ids"),
    "too few offsets": (put("d2t", torch.ones(3, dtype=torch.int64)), {}, "no list of 40 whole numbers"),
    "no width": (lambda each: None, {"hidden_size": None}, "does not name 'hidden_size'"),
    "another activation": (lambda each: None, {"hidden_act": "gelu"}, "activation is 'gelu'"),
    "another width than the target's": (lambda each: None, {"target_hidden_size": 64}, "48 wide, and its target 64"),
    "numbers of several kinds": (put("fc.weight", torch.ones(48, 144).half()), {}, "numbers of several kinds"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_in_a_sentence(name: str, folder: Path) -> None:
    weights, record, said = DAMAGES[name]
    change(folder, weights, **record)
    with pytest.raises(ModelError, match=said) as caught:
        Eagle3Head.load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_says_which(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor"):
        Eagle3Head.load(folder)


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True, "norm_before_fc": True, "own_embedding": True}, {"draft_vocab": 0},
     {"fc_norm": True, "norm_output": True, "query_norms": True, "rope": {"rope_type": "default", "rope_theta": 7e5}}],
    ids=["plain", "norms before, an embedding", "all ids", "EAGLE-3.1"],
)  # fmt: skip
def test_a_round_trip_by_speculators_format_is_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    made = head(replace(SIZES, rope_start=1, reach=7, **changes))
    write_speculators_folder(made, tmp_path, target="org/target", family="LlamaForCausalLM")
    kept = Eagle3Head.load(tmp_path)
    assert kept.config == made.config and kept.record.target_name == "org/target"
    for name, weight in made.state_dict().items():
        assert kept.state_dict()[name].equal(weight), name
    with pytest.raises(ModelError, match="LM head of their own"):
        write_speculators_folder(head(replace(SIZES, own_output=False, draft_vocab=0)), tmp_path / "other")
