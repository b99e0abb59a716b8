"""Medusa heads in vLLM's folders: what is read, held to what vLLM computes; round trips; damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import PROMPTS, VOCAB, packed
from truedraft import Engine, SamplingParams
from truedraft.drafters import Medusa
from truedraft.errors import CompositionError, ModelError, ModelNotFoundError
from truedraft.kinds.medusa.folders import write_vllm_medusa
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads, MedusaRunner

WIDTH, HEADS, LAYERS, FEW = 48, 3, 2, 30
VARIANTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases": {"medusa_fc_bias": True},
    "one LM head": {"original_lm_head": True},
    "fewer ids": {"truncated_vocab_size": FEW},
    "fewer ids, one LM head": {"truncated_vocab_size": FEW, "original_lm_head": True, "medusa_fc_bias": True},
}


def theirs(folder: Path, **said: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A folder with random weights."""
    about = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH, "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB, "num_heads": HEADS, "num_hidden_layers": LAYERS, "original_lm_head": False,
        "medusa_fc_bias": False,
    } | said  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    ids = about["truncated_vocab_size"]
    weights = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            weights[f"blocks.{head}.layers.{layer}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.2
            if about["medusa_fc_bias"]:
                weights[f"blocks.{head}.layers.{layer}.bias"] = torch.randn(WIDTH, generator=generator)
        if not about["original_lm_head"]:
            weights[f"lm_heads.{head}.weight"] = torch.randn(ids, WIDTH, generator=generator)
    if about["original_lm_head"]:
        weights["lm_head.weight"] = torch.randn(ids, WIDTH, generator=generator)
    if ids < about["vocab_size"]:
        weights["token_map"] = torch.randperm(about["vocab_size"], generator=generator)[:ids]
    write(folder, about, weights)
    return about, weights


def write(folder: Path, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))


def by_hand(about: dict[str, Any], weights: dict[str, Tensor], head: int, h: Tensor) -> int:
    """The token that vLLM drafts by a head, of one vector."""
    for layer in range(LAYERS):
        inner = weights[f"blocks.{head}.layers.{layer}.weight"] @ h
        inner = inner + weights.get(f"blocks.{head}.layers.{layer}.bias", 0.0)
        h = h + inner * torch.sigmoid(inner)
    place = int((weights.get("lm_head.weight", weights.get(f"lm_heads.{head}.weight")) @ h).argmax())
    return int(weights["token_map"][place]) if "token_map" in weights else place


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_heads_guess_what_vllm_drafts_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    about, weights = theirs(tmp_path / "theirs", **VARIANTS[name])
    heads = MedusaHeads.load(tmp_path / "theirs")
    assert "it is used because its sizes fit" in (heads.record.note or "")
    vectors = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    model = packed("llama")
    guesses = MedusaRunner(heads, model, HEADS).likeliest(vectors, HEADS, 2).ids
    for head in range(HEADS):
        for row, vector in enumerate(vectors):
            assert int(guesses[head, row, 0]) == by_hand(about, weights, head, vector)
    write_vllm_medusa(heads, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys() and all(again[each].equal(weights[each]) for each in weights)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == about
    heads.save(tmp_path / "ours", heads.record, dtype=torch.float32)
    kept = MedusaHeads.load(tmp_path / "ours")
    assert kept.config == heads.config
    assert all(each.equal(kept.state_dict()[key]) for key, each in heads.state_dict().items())


def test_what_is_answered_with_fewer_ids_is_what_the_target_says(tmp_path: Path) -> None:
    theirs(tmp_path, truncated_vocab_size=FEW)
    model, prompts = packed("llama"), [list(each) for each in PROMPTS]
    for params in (SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=1.0, seed=5)):
        drafted = Engine(model, Medusa(MedusaHeads.load(tmp_path)), controller="fixed").generate(prompts, params)
        plain = Engine(model).generate(prompts, params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_whole_outputs_are_cut_and_a_prefix_is_left_out(tmp_path: Path) -> None:
    about, weights = theirs(tmp_path, truncated_vocab_size=FEW)
    cut = MedusaHeads.load(tmp_path).state_dict()
    for head in range(HEADS):
        whole = torch.ones(VOCAB, WIDTH)
        whole[weights["token_map"]] = weights[f"lm_heads.{head}.weight"]
        weights[f"lm_heads.{head}.weight"] = whole
    write(tmp_path, about, {f"medusa_heads.{name}": each for name, each in weights.items()})
    found = MedusaHeads.load(tmp_path).state_dict()
    assert all(found[name].equal(each) for name, each in cut.items())


def test_heads_that_end_in_the_targets_lm_head_bring_it_along(tmp_path: Path) -> None:
    made = MedusaHeads(MedusaConfig(WIDTH, VOCAB, heads=2))
    with pytest.raises(ModelError, match="or name the target"):
        write_vllm_medusa(made, tmp_path)
    with pytest.raises(ModelError, match="read no tokens"):
        write_vllm_medusa(MedusaHeads(MedusaConfig(WIDTH, VOCAB, reads_token=True)), tmp_path)
    weight = torch.randn(VOCAB, WIDTH)
    write_vllm_medusa(made, tmp_path, lm_head=weight)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].equal(weight)
    outputs = [each.weight for each in MedusaHeads.load(tmp_path).outputs if each is not None]
    assert len(outputs) == 2 and all(each.equal(weight) for each in outputs)


@pytest.mark.parametrize(
    ("said", "weights", "message"),
    [
        ({}, {"blocks.1.layers.0.weight": None}, r"lacks blocks\.1\.layers\.0\.weight"),
        ({}, {"blocks.3.layers.0.weight": torch.ones(WIDTH, WIDTH)}, r"holds blocks\.3\.layers\.0\.weight, unknown"),
        ({}, {"lm_heads.2.weight": torch.ones(VOCAB, 9)}, r"lm_heads\.2\.weight .* has the shape \[97, 9\]"),
        ({}, {"token_map": torch.arange(4)}, "holds token_map, unknown"),
        ({"medusa_fc_bias": True}, {}, r"lacks blocks\.0\.layers\.0\.bias"),
        ({"truncated_vocab_size": FEW}, {}, "lacks token_map"),
        ({"truncated_vocab_size": FEW}, {"token_map": torch.arange(FEW) + 80}, "does not name 30 different ids"),
        ({"truncated_vocab_size": FEW}, {"token_map": torch.zeros(FEW, dtype=torch.int64)}, "does not name 30"),
        ({"num_heads": "3"}, {}, "names sizes that make no heads"),
        ({"logit_scale": 2.0}, {}, "its logits are scaled by 2.0"),
        ({"hidden_size": None}, {}, "names sizes that make no heads"),
    ],
)
def test_damage_is_told_in_a_sentence(
    said: dict[str, Any], weights: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    about, whole = theirs(tmp_path)
    kept = {name: each for name, each in (whole | weights).items() if each is not None}
    write(tmp_path, about | said, kept)
    with pytest.raises(ModelError, match=message) as caught:
        MedusaHeads.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_and_ids_of_another_target_are_refused(tmp_path: Path) -> None:
    theirs(tmp_path, vocab_size=200, truncated_vocab_size=150)
    with pytest.raises(CompositionError, match=r"guesses the id .*and llama has 97 ids"):
        Medusa(MedusaHeads.load(tmp_path)).check(packed("llama"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor"):
        MedusaHeads.load(tmp_path)
