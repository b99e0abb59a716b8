"""Heads of every kind on disk: what is written is read again, and anything else is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import Head, HeadRecord
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead

TREES = {"greedy": RankTree(((0,), (0, 0), (1,)), (0.5, 0.25, 0.125)), "sampled": RankTree(((0,), (1,)))}
MEDUSA = MedusaConfig(16, 23, heads=3)
RECURRENT = RedrafterConfig(16, 23, state=12, exit_width=16)
LAYERS: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head": 8, "inner": 24}
BLOCK = BlockConfig(16, 23, (0, 1), **LAYERS, block=4, mask_id=9, depth=1)
REDUCED: dict[str, Any] = {"draft_vocab": 10, "own_output": True}
HEADS: dict[str, tuple[Any, Any]] = {
    "medusa": (MedusaHeads, MEDUSA),
    "medusa, free": (MedusaHeads, replace(MEDUSA, tied=False, layers=2)),
    "redrafter": (RedrafterHead, RECURRENT),
    "redrafter, free": (RedrafterHead, replace(RECURRENT, tied=False, exit_width=20, layers=0)),
    "redrafter, sum": (RedrafterHead, replace(RECURRENT, rnn=False, state=16, length=3, scaled=False)),
    "eagle": (Eagle3Head, Eagle3Config(16, 23, (0, 1), **LAYERS, draft_vocab=10)),
    "p-eagle": (PEagleHead, PEagleConfig(16, 23, (0, 1), **LAYERS, mask_token=3)),
    "dflash": (DFlashHead, BLOCK),
    "dflash2": (DFlash2Head, DFlash2Config(16, 23, (0, 1), **LAYERS, block=4, mask_id=9, depth=1, group=8, rank=4)),
    "dspark": (DSparkHead, replace(BLOCK, **REDUCED, markov=4, confidence=True)),
}


def made(name: str, **changes: Any) -> Any:
    kind, config = HEADS[name]
    head, generator = kind(replace(config, **changes)), torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    return head


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    head, trees = made(name), TREES if "medusa" in name else {}
    kind: type[Head] = type(head)
    if dtype is torch.float32:  # replaces an earlier one
        made(name, vocab_size=24).save(tmp_path, HeadRecord("old", "1", trees, {"steps": 3}))
    facts = {"top_1": [0.5]} if dtype is torch.bfloat16 else {}
    head.save(tmp_path, HeadRecord("some/target", "abc", trees, facts, sample="ab" * 16), dtype=dtype)
    kept = kind.load(tmp_path)
    assert kept.record == HeadRecord("some/target", "abc", trees, facts, sample="ab" * 16)
    assert kept.config == head.config and not kept.training
    assert kept.state_dict().keys() == head.state_dict().keys()
    for key, weight in kept.state_dict().items():
        expected = head.state_dict()[key]
        assert weight.equal(expected.to(dtype) if expected.is_floating_point() else expected)
        assert not weight.requires_grad and weight.dtype in (dtype, torch.int64)
    if name == "medusa" and dtype is torch.bfloat16:
        assert (tmp_path / "heads.safetensors").stat().st_size < 3 * (16 * 16 + 16) * 2 + 1000, "tied ones are small"


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    for name, said in (("redrafter", "a recurrent drafter"), ("medusa", "Medusa heads")):
        made(name).save(tmp_path / name, HeadRecord("t", "f"))
        other = MedusaHeads if name == "redrafter" else RedrafterHead
        with pytest.raises(ModelError, match=rf"holds {said}, not {other.noun}; use {name}:.*{name}$"):
            other.load(tmp_path / name)


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(record | changes))

    return apply


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "heads.safetensors")
    weights.pop("heads.1.blocks.0.linear.bias")
    save_file(weights, folder / "heads.safetensors")


def cut_off(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


DAMAGE: list[tuple[str, Callable[[Path], object], type[ModelError], str]] = [
    ("medusa", gone("config.json"), ModelNotFoundError, "no config.json"),
    ("medusa", gone("heads.safetensors"), ModelNotFoundError, "heads.safetensors.*missing"),
    ("medusa", gone("trees.json"), ModelNotFoundError, "trees.json.*missing"),
    ("redrafter", gone("facts.json"), ModelNotFoundError, "facts.json.*missing"),
    ("medusa", cut_off("config.json"), ModelError, "cannot read"),
    ("medusa", cut_off("heads.safetensors"), ModelError, "cannot read"),
    ("medusa", lambda folder: (folder / "config.json").write_text("[]"), ModelError, "JSON object"),
    ("medusa", edit("config.json", kind=None), ModelError, "not of Medusa heads"),
    ("medusa", edit("config.json", version=2), ModelError, "version 2"),
    ("medusa", edit("config.json", target=None), ModelError, "damaged"),
    ("medusa", edit("config.json", width=0), ModelError, "damaged"),
    ("redrafter", edit("config.json", exit_width=5), ModelError, "damaged.*exit width of 5"),
    ("medusa", edit("config.json", dtype="float4"), ModelError, "damaged"),
    ("medusa", edit("config.json", heads=4), ModelError, r"lacks heads\.3"),
    ("medusa", edit("config.json", width=32), ModelError, "has the shape"),
    ("medusa", drop_a_tensor, ModelError, "linear.bias"),
    ("medusa", edit("trees.json", greedy={"paths": [[1, 0]]}), ModelError, "damaged"),
    ("medusa", edit("trees.json", greedy=3), ModelError, "damaged"),
]


@pytest.mark.parametrize(("name", "apply", "kind", "said"), DAMAGE)
def test_damage_is_told_in_a_sentence(
    name: str, apply: Callable[[Path], object], kind: type[ModelError], said: str, tmp_path: Path
) -> None:
    made(name).save(tmp_path, HeadRecord("t", "f", TREES))
    apply(tmp_path)
    with pytest.raises(kind, match=said) as caught:
        HEADS[name][0].load(tmp_path)
    assert "\n" not in str(caught.value)


def test_places_without_heads_are_refused(tmp_path: Path) -> None:
    for kind in (MedusaHeads, RedrafterHead):
        for place, said in (
            (tmp_path / "nowhere", f"there is no folder .* with {kind.noun}"),
            ("~nobody-is-called-so/heads", "the home folder of nobody"),
            (tmp_path, f"does not hold {kind.noun}; name one that `truedraft train {kind.kind}` wrote"),
        ):
            with pytest.raises(ModelNotFoundError, match=said):
                kind.load(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the heads"):
        made("medusa").save(tmp_path / "file", HeadRecord("t", "f"))


@pytest.mark.parametrize("name", ["medusa", "redrafter"])
def test_a_full_disk_leaves_nothing_that_could_be_taken_for_heads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    made(name).save(tmp_path, HeadRecord("t", "f", TREES))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelError, match="No space left on device"):
        made(name).save(tmp_path, HeadRecord("t", "f", TREES))
    monkeypatch.undo()
    with pytest.raises(ModelNotFoundError, match=f"does not hold {HEADS[name][0].noun}"):
        HEADS[name][0].load(tmp_path)
