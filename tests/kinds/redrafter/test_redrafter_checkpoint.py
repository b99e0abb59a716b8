"""A recurrent head on disk: what is written is read again, and anything else is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead


def some_head(**sizes: int | bool) -> RedrafterHead:
    usual = {"width": 16, "vocab_size": 23, "state": 12, "exit_width": 16}
    head = RedrafterHead(RedrafterConfig(**(usual | sizes)))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    return head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    some_head().save(tmp_path / "head", HeadRecord("some/target", "abc", facts={"steps": 3}))
    return tmp_path / "head"


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tied": False, "exit_width": 20, "layers": 0}, {"rnn": False, "state": 16, "length": 3}, {"scaled": False}],
)
def test_round_trip(tmp_path: Path, sizes: dict[str, int | bool]) -> None:
    head = some_head(**sizes)
    head.save(tmp_path, HeadRecord("some/target", "abc", facts={"top_1": [0.5]}))
    kept = RedrafterHead.load(tmp_path)
    record = kept.record
    assert (record.target_name, record.fingerprint, record.note) == ("some/target", "abc", None)
    assert record.facts == {"top_1": [0.5]}
    assert kept.config == head.config and not kept.training
    assert kept.state_dict().keys() == head.state_dict().keys()
    for name, weight in kept.state_dict().items():
        assert weight.dtype is torch.bfloat16 and not weight.requires_grad
        assert weight.equal(head.state_dict()[name].bfloat16())


def test_dtype_and_a_second_save(tmp_path: Path) -> None:
    some_head(layers=4).save(tmp_path, HeadRecord("old", "1"))
    some_head().save(tmp_path, HeadRecord("new", "2"), dtype=torch.float32)
    kept = RedrafterHead.load(tmp_path)
    assert (kept.record.target_name, kept.config.layers, kept.record.facts) == ("new", 2, {})
    assert all(kept.state_dict()[name].equal(weight) for name, weight in some_head().state_dict().items())


def test_the_two_kinds_are_told_apart(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds a recurrent drafter, not Medusa heads; use redrafter:.*head$"):
        MedusaHeads.load(folder)
    MedusaHeads(MedusaConfig(8, 11)).save(tmp_path / "m", HeadRecord("t", "f"))
    with pytest.raises(ModelError, match=r"holds Medusa heads, not a recurrent drafter; use medusa:.*m$"):
        RedrafterHead.load(tmp_path / "m")


def edit(**changes: object) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(record | changes))

    return apply


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "heads.safetensors")
    weights.pop("recurrent.bias")
    save_file(weights, folder / "heads.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], type[ModelError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFoundError, "does not hold a recurrent drafter"),
    "no weights": (lambda f: (f / "heads.safetensors").unlink(), ModelNotFoundError, "heads.safetensors.*missing"),
    "no facts": (lambda f: (f / "facts.json").unlink(), ModelNotFoundError, "facts.json.*missing"),
    "config cut off": (lambda f: (f / "config.json").write_text('{"kind": "red'), ModelError, "cannot read"),
    "a model": (edit(kind=None), ModelError, "not of a recurrent drafter"),
    "another version": (edit(version=2), ModelError, "version 2"),
    "sizes of no head": (edit(exit_width=5), ModelError, "damaged.*exit width of 5"),
    "other sizes": (edit(state=13), ModelError, "has the shape"),
    "a tensor missing": (drop_a_tensor, ModelError, "recurrent.bias"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_in_one_sentence(folder: Path, damage: str) -> None:
    apply, kind, words = DAMAGE[damage]
    apply(folder)
    with pytest.raises(kind, match=words) as caught:
        RedrafterHead.load(folder)
    assert "\n" not in str(caught.value)


def test_places_without_a_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no folder .* with a recurrent drafter"):
        RedrafterHead.load(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="truedraft train redrafter"):
        RedrafterHead.load(tmp_path)
    with pytest.raises(ModelNotFoundError, match="the home folder of nobody"):
        RedrafterHead.load("~nobody-is-called-so/head")


def test_a_full_disk_leaves_nothing_that_could_be_taken_for_a_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelError, match="No space left on device"):
        some_head().save(folder, HeadRecord("t", "f"))
    monkeypatch.undo()
    with pytest.raises(ModelNotFoundError, match="does not hold a recurrent drafter"):
        RedrafterHead.load(folder)
