"""What `auto` finds for the embedded target, by its weights: whatever it is called, and whatever size it was given."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.embedded_models import embedded
from truedraft import load_model
from truedraft.drafters import from_spec, registry, specs
from truedraft.drafters.registry import TrainedDrafter, find_drafters
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import EMBEDDED, embedded_folder
from truedraft.models.export import export_model

ALL = ["draft", "redrafter", "medusa", "prompt-lookup"]


@pytest.fixture(autouse=True)
def registry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", str(tmp_path / "registry.json"))


def members_of(target: LanguageModel) -> list[str]:
    return list(from_spec("auto", target, tell=lambda sentence: pytest.fail(sentence)).members)


def test_it_finds_what_was_trained_for_the_target() -> None:
    assert members_of(embedded(device="cpu")) == ALL
    assert members_of(embedded("draft", device="cpu")) == ["prompt-lookup"], "other weights"


def test_it_finds_them_under_another_name_and_at_another_size(tmp_path: Path) -> None:
    shutil.copytree(embedded_folder("target"), tmp_path / "mine")
    assert members_of(load_model(tmp_path / "mine", device="cpu", pad_to="110M")) == ["self", *ALL]
    export_model("embedded:target", tmp_path / "large", pad_to="110M")
    assert members_of(load_model(tmp_path / "large", device="cpu")) == ["self", *ALL]


def test_other_weights_of_the_same_sizes_have_none_of_them(tmp_path: Path) -> None:
    shutil.copytree(embedded_folder("target"), tmp_path / "mine")
    shard = next((tmp_path / "mine").glob("*.safetensors"))
    weights = load_file(shard)
    name = next(iter(weights))
    weights[name] = weights[name] + torch.tensor(0.5).to(weights[name].dtype)
    save_file(weights, shard, metadata={"format": "pt"})
    assert members_of(load_model(tmp_path / "mine", device="cpu")) == ["self", "prompt-lookup"]


def test_the_shipped_drafters_name_the_target_that_ships() -> None:
    target = embedded(device="cpu")
    found = [TrainedDrafter.read(folder) for folder in sorted(embedded_folder("target").parent.iterdir())]
    kinds = {each.kind: each for each in found if each is not None}
    assert set(kinds) == {"draft", "medusa", "redrafter"}
    for each in kinds.values():
        assert (each.target_name, each.fingerprint) == ("embedded:target", target.fingerprint)
        assert {round_["temperature"] for round_ in each.figures["served"]} == {0.0, 1.0}
        assert all(round_["mean_acceptance_length"] > 1.5 for round_ in each.figures["served"])
    assert 0.7 < kinds["draft"].figures["alpha"] < 0.8
    assert [each.kind for each in find_drafters(target)] == ALL[:-1]


def test_no_name_of_an_embedded_model_decides() -> None:
    code = inspect.getsource(registry) + inspect.getsource(specs.auto_members)
    assert not any(f"embedded:{name}" in code for name in EMBEDDED)
