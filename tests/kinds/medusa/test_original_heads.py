"""Files of the original Medusa project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.errors import ModelError
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.medusa.original import published_tree

WIDTH, VOCAB = 6, 13


def state_of(heads: int, layers: int, prefix: str = "") -> dict[str, Tensor]:
    """As `torch.save(medusa_head.state_dict())` of the original has it: blocks, then an output without bias."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for head in range(heads):
        for layer in range(layers):
            state[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(WIDTH, WIDTH, generator=generator)
            state[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(WIDTH, generator=generator)
        state[f"{prefix}{head}.{layers}.weight"] = torch.randn(VOCAB, WIDTH, generator=generator)
    return state


def by_hand(state: dict[str, Tensor], head: int, layers: int, h: Tensor) -> Tensor:
    """What the original computes."""
    for layer in range(layers):
        inner = h @ state[f"{head}.{layer}.linear.weight"].T + state[f"{head}.{layer}.linear.bias"]
        h = h + torch.nn.functional.silu(inner)
    return h @ state[f"{head}.{layers}.weight"].T


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_folder_loads_and_computes_what_the_original_does(tmp_path: Path, layers: int, prefix: str) -> None:
    torch.save(state_of(3, layers, prefix), tmp_path / "medusa_lm_head.pt")
    # The project's published configurations count fewer heads than their files hold.
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = MedusaHeads.load(tmp_path)
    assert (kept.record.target_name, kept.record.fingerprint) == ("lmsys/vicuna-7b-v1.3", None)
    assert kept.record.note is not None
    assert "lmsys/vicuna-7b-v1.3" in kept.record.note
    assert (kept.config.heads, kept.config.layers, kept.config.tied) == (3, layers, False)
    h = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    logits = kept.logits(h, lambda vectors: vectors, lambda product: product)
    for head in range(3):
        torch.testing.assert_close(logits[head], by_hand(state_of(3, layers), head, layers, h))
    assert kept.record.trees["greedy"] == kept.record.trees["sampled"] == published_tree().within(3, 10)
    assert kept.record.trees["greedy"].depth == 3


def test_a_file_alone_loads_without_a_name(tmp_path: Path) -> None:
    torch.save(state_of(5, 1), tmp_path / "heads.pt")
    kept = MedusaHeads.load(tmp_path / "heads.pt")
    assert kept.record.target_name == ""
    assert "no target" in (kept.record.note or "")
    assert kept.record.trees["greedy"] == published_tree()
    assert isinstance(kept.record.trees["greedy"], RankTree)


class Payload:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, ("/nonexistent/should-not-run",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a file of torch", "cannot read"),
        (Payload(), "cannot read"),
        ([torch.zeros(2)], "no dictionary of tensors"),
        ({"weight": torch.zeros(2, 2)}, "no Medusa heads"),
        ({name: w for name, w in state_of(2, 1).items() if name != "1.0.linear.bias"}, r"lacks 1\.0\.linear\.bias"),
        (state_of(2, 1) | {"2.2.weight": torch.zeros(VOCAB, WIDTH)}, "no Medusa heads"),
        (state_of(2, 1) | {"embedding": torch.zeros(2)}, "embedding"),
        (state_of(2, 1) | {"1.1.weight": torch.zeros(VOCAB, WIDTH + 1)}, "has the shape"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, words: str) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ModelError, match=words) as caught:
        MedusaHeads.load(tmp_path)
    assert "\n" not in str(caught.value)
