"""Heads on disk: what is written is read again, and anything else is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads

TREES = {"greedy": RankTree(((0,), (0, 0), (1,)), (0.5, 0.25, 0.125)), "sampled": RankTree(((0,), (1,)))}


def some_heads(**sizes: int | bool) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(**{"width": 16, "vocab_size": 23, "heads": 3} | sizes))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for weight in heads.parameters():
        weight.data.normal_(generator=generator)
    return heads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    some_heads().save(tmp_path / "heads", HeadRecord("some/target", "abc", TREES, {"top_1": [0.5, 0.25]}))
    return tmp_path / "heads"


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, tied: bool, layers: int) -> None:
    heads = some_heads(tied=tied, layers=layers)
    heads.save(tmp_path, HeadRecord("some/target", "abc", TREES, {"top_1": [0.5]}, sample="ab" * 16))
    kept = MedusaHeads.load(tmp_path)
    record = kept.record
    assert record.sample == "ab" * 16
    assert (record.target_name, record.fingerprint, record.note) == ("some/target", "abc", None)
    assert record.facts == {"top_1": [0.5]}
    assert kept.record.trees == TREES
    assert kept.config == heads.config
    assert not kept.training
    for name, weight in kept.state_dict().items():
        assert weight.dtype is torch.bfloat16
        assert not weight.requires_grad
        assert weight.equal(heads.state_dict()[name].bfloat16())


def test_dtype_and_a_second_save(tmp_path: Path) -> None:
    some_heads(heads=4).save(tmp_path, HeadRecord("old", "1"))
    some_heads().save(tmp_path, HeadRecord("new", "2"), dtype=torch.float32)
    kept = MedusaHeads.load(tmp_path)
    assert (kept.record.target_name, kept.config.heads, kept.record.trees) == ("new", 3, {})
    for name, weight in some_heads().state_dict().items():
        assert kept.state_dict()[name].equal(weight)


def test_tied_heads_are_small(folder: Path) -> None:
    assert (folder / "heads.safetensors").stat().st_size < 3 * (16 * 16 + 16) * 2 + 1000


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(record | changes))

    return apply


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "heads.safetensors")
    weights.pop("heads.1.blocks.0.linear.bias")
    save_file(weights, folder / "heads.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], type[ModelError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFoundError, "no config.json"),
    "no weights": (lambda f: (f / "heads.safetensors").unlink(), ModelNotFoundError, "heads.safetensors.*missing"),
    "no trees": (lambda f: (f / "trees.json").unlink(), ModelNotFoundError, "trees.json.*missing"),
    "config cut off": (lambda f: (f / "config.json").write_text('{"kind": "med'), ModelError, "cannot read"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ModelError, "JSON object"),
    "another kind": (edit("config.json", kind="redrafter"), ModelError, "drafter, not Medusa heads; use redrafter:"),
    "a model": (edit("config.json", kind=None), ModelError, "not of Medusa heads"),
    "another version": (edit("config.json", version=2), ModelError, "version 2"),
    "no target": (edit("config.json", target=None), ModelError, "damaged"),
    "no width": (edit("config.json", width=0), ModelError, "damaged"),
    "a dtype nobody knows": (edit("config.json", dtype="float4"), ModelError, "damaged"),
    "other sizes": (edit("config.json", heads=4), ModelError, r"lacks heads\.3"),
    "wider": (edit("config.json", width=32), ModelError, "has the shape"),
    "weights cut off": (
        lambda f: (f / "heads.safetensors").write_bytes((f / "heads.safetensors").read_bytes()[:100]),
        ModelError,
        "cannot read",
    ),
    "a tensor missing": (drop_a_tensor, ModelError, "linear.bias"),
    "an orphan in a tree": (edit("trees.json", greedy={"paths": [[1, 0]]}), ModelError, "damaged"),
    "no tree": (edit("trees.json", greedy=3), ModelError, "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_in_one_sentence(folder: Path, damage: str) -> None:
    apply, kind, words = DAMAGE[damage]
    apply(folder)
    with pytest.raises(kind, match=words) as caught:
        MedusaHeads.load(folder)
    assert "\n" not in str(caught.value)


def test_places_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        MedusaHeads.load(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="the home folder of nobody"):
        MedusaHeads.load("~nobody-is-called-so/heads")
    with pytest.raises(ModelNotFoundError, match="does not hold Medusa heads"):
        MedusaHeads.load(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the heads"):
        some_heads().save(tmp_path / "file", HeadRecord("t", "f"))


def test_half_a_checkpoint_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the trees are written leaves nothing that could be taken for heads."""

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelError, match="No space left on device"):
        some_heads(heads=2).save(folder, HeadRecord("t", "f", TREES))
    monkeypatch.undo()
    with pytest.raises(ModelNotFoundError, match="does not hold Medusa heads"):
        MedusaHeads.load(folder)
