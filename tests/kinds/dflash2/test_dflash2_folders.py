"""DFlash 2 in other projects' folders: round trips, the published form, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kinds.test_layer_folders import DFLASH, DFLASH2, FACTORS, SELECTING, TARGET, change, dflash, dflash2, record_in
from support.layer_heads import random_head, target
from truedraft.drafters.heads.head import HeadRecord
from truedraft.drafters.kinds import kind_in
from truedraft.errors import CompositionError, ModelError, OptionError
from truedraft.kinds.block.folders import write_dflash_folder
from truedraft.kinds.block.module import DFlashHead
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.folders import write_dflash2_folder, write_speculators
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Head
from truedraft.models.lm_head import LogitFinish

WRITE = {"flat": write_dflash2_folder, "speculators": write_speculators}
TENSORS = {
    *("fc.weight", "hidden_norm.weight", "norm.weight", "candidate_selector.hidden_projection.weight"),
    *(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")),
    *(
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in (
            *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
            *(f"self_attn.{each}_norm.weight" for each in "qk"),
            *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
            *(f"{each}.weight" for each in ("input_layernorm", "post_attention_layernorm")),
            *(f"{each}_conv.base_kernel" for each in ("attention", "mlp")),
            *(f"{each}_conv.kernel_projection.weight" for each in ("attention", "mlp")),
        )
    ),
}
"""Of vLLM's qwen3_dflash2.py, in August 2026, and of `speculators` (models/dflash2)."""


@pytest.mark.parametrize("name", WRITE)
def test_what_is_written_is_as_the_projects_have_it(name: str, tmp_path: Path) -> None:
    WRITE[name](dflash2(DFLASH2), tmp_path, TARGET)
    assert load_file(tmp_path / "model.safetensors").keys() == TENSORS
    about = record_in(tmp_path)
    assert about["architectures"] == ["DFlash2DraftModel"] and kind_in(tmp_path) == "dflash2"
    assert (about if name == "speculators" else about["dflash_config"]).items() >= SELECTING.items()


def test_a_published_folder_is_read(tmp_path: Path) -> None:
    """As that for Qwen3.8-27B, with windows; block_size is inside alone."""
    rope = {"rope_type": "default", "rope_theta": 1e7}
    made = dflash2(replace(DFLASH2, rope=rope, most_positions=262_144, windows=(2048, 2048)))
    about = {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False, "dtype": "bfloat16", "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 64, "is_causal": False,
        "layer_types": ["sliding_attention"] * 2, "max_position_embeddings": 262_144, "model_type": "qwen3",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": 64,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "sliding_window": 2048,
        "tie_word_embeddings": False, "vocab_size": 97,
        "dflash_config": {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2, 5], **SELECTING},
    }  # fmt: skip
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert DFlash2Head.load(tmp_path).config == made.config
    inside = about["dflash_config"] | {"output_multiplier": 1.0, "input_embedding_scale": 1.0}  # type: ignore[operator]
    change(tmp_path, dflash_config=inside, block_size=4)
    assert DFlash2Head.load(tmp_path).config == made.config


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    """Also a folder whose architecture is DFlash's with the entries or the tensors of DFlash 2."""
    for name, write in WRITE.items():
        write(dflash2(DFLASH2), tmp_path / name, TARGET)
        for other in (DFlashHead, Eagle3Head):
            with pytest.raises(ModelError, match=f"holds a DFlash 2 head, not {other.noun}; use dflash2:.*{name}"):
                other.load(tmp_path / name)
    write_dflash_folder(dflash(DFLASH), tmp_path / "dflash", TARGET)
    with pytest.raises(ModelError, match="holds a DFlash head, not a DFlash 2 head; use dflash:"):
        DFlash2Head.load(tmp_path / "dflash")
    dflash2(DFLASH2).save(tmp_path / "ours", HeadRecord("tiny", None))
    with pytest.raises(ModelError, match="holds a DFlash 2 head, not a DFlash head; use dflash2:"):
        DFlashHead.load(tmp_path / "ours")
    change(tmp_path / "flat", architectures=["DFlashDraftModel"])
    with pytest.raises(ModelError, match="conv_kernel_size is 3, and heads are read where it is None"):
        DFlashHead.load(tmp_path / "flat")
    inside = {"mask_token_id": 96, "target_layer_ids": [0, 2, 5]}
    change(tmp_path / "flat", dflash_config=inside)
    with pytest.raises(ModelError, match=r"holds candidate_selector\.hidden_projection\.weight.* unknown to heads"):
        DFlashHead.load(tmp_path / "flat")


@pytest.mark.parametrize("changes", [{"markov": 4}, {"confidence": True}], ids=str)
def test_parts_of_other_heads_are_refused(changes: Any) -> None:
    with pytest.raises(OptionError, match="neither a Markov head nor a confidence head"):
        replace(DFLASH2, **changes)


def test_factors_are_those_of_the_target_or_refused() -> None:
    """Embeddings of the block are scaled; the target's own factors on logits are already in its logits."""
    made = random_head(DFlash2Head, replace(DFLASH2, layers=(0, 1), **FACTORS))
    table = torch.randn(97, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.inputs(torch.tensor([5]), lambda ids: table[ids])[0, :2], 2.5 * table[[5, 96]])
    model = target()
    with pytest.raises(CompositionError, match=r"for logits times 0\.5 with the cap 30\.0, and tiny has others"):
        DFlash2(made).check(model)
    model._finish = LogitFinish(0.5, 30.0)
    DFlash2(made).check(model)


@torch.no_grad()
def test_fresh_convolutions_and_selectors_change_nothing() -> None:
    """A new head drafts as DFlash with its layers does, among its candidates."""
    torch.manual_seed(0)
    made, generator = DFlash2Head(DFLASH2), torch.Generator().manual_seed(1)
    plain = DFlashHead(replace(DFLASH, layers=DFLASH2.layers))
    plain.load_state_dict(made.state_dict(), strict=False)
    embedded, table = torch.randn(2, 4, 48, generator=generator), made.rotary(torch.zeros(1))
    output = torch.randn(97, 48, generator=generator)

    def own_alone(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.flatten(1) + value.repeat_interleave(2, 1).flatten(1)

    rotation = table.at(torch.arange(8))
    x, expected = (each.vectors(embedded, rotation, own_alone).flatten(0, 1) for each in (made, plain))
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    logits = made.logits(made.leaving_after(x, torch.arange(6)), lambda rows: rows @ output.T)
    whole = x @ output.T
    kept = logits > -torch.inf
    assert kept.sum(-1).tolist() == [5] * 6 and torch.equal(logits[kept], whole[kept])
    assert (whole.masked_fill(kept, -torch.inf).amax(-1) <= logits.masked_fill(~kept, torch.inf).amin(-1)).all()
