"""The embedded pair and Medusa heads, and what `auto` finds for its target, whatever that is called."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.codes import logits
from support.embedded_models import embedded
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.probs import overlap
from truedraft.core.stats import Counters
from truedraft.drafters import Medusa, from_spec, registry, specs
from truedraft.drafters.registry import TrainedDrafter, find_drafters
from truedraft.errors import CompositionError, UnknownOptionError
from truedraft.models import LanguageModel, export_model
from truedraft.models.embedded import EMBEDDED, embedded_folder, embedded_heads, heldout_prompts_file

ALL = ["draft", "redrafter", "medusa", "prompt-lookup"]


@pytest.fixture(autouse=True)
def registry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", str(tmp_path / "registry.json"))


def members_of(target: LanguageModel) -> list[str]:
    return list(from_spec("auto", target, tell=lambda sentence: pytest.fail(sentence)).members)


def test_it_finds_what_was_trained_for_the_target() -> None:
    assert members_of(embedded(device="cpu")) == ALL
    assert members_of(embedded("draft", device="cpu")) == ["prompt-lookup"], "other weights"


@pytest.mark.slow
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


def test_names() -> None:
    assert EMBEDDED == ("target", "draft")
    with pytest.raises(UnknownOptionError, match="did you mean 'target'"):
        embedded_folder("targt")


def test_sizes_and_cards() -> None:
    for name, low, high in (("target", 15e6, 17e6), ("draft", 1e6, 2e6)):
        model = embedded(name, dtype="float32", device="cpu")
        assert low <= model.parameters <= high
        assert model.context_length == 2048
        card = (embedded_folder(name) / "README.md").read_text()
        assert "icen" in card and "bits per byte" in card


def test_the_draft_agrees_with_the_target_on_held_out_text() -> None:
    """alpha = E[sum min(p, q)] of at least 0.6, on the shipped held-out prompts (the cards hold the whole split)."""
    target, draft = (embedded(name, dtype="float32", device="cpu") for name in ("target", "draft"))
    assert target.tokenizer is not None
    overlaps = []
    for line in heldout_prompts_file().read_text().splitlines():
        ids = target.tokenizer.encode(json.loads(line)["text"])
        overlaps.append(overlap(*(logits(model, ids).softmax(dim=-1) for model in (target, draft))))
    assert torch.cat(overlaps).mean() >= 0.6


def test_auto_has_this_draft_and_speculation_shortens_the_work() -> None:
    target = embedded(device="cpu")
    engine = Engine(target, "auto", controller="fixed")
    stats = engine.generate("def quicksort(items):", SamplingParams(max_tokens=64)).stats
    assert next(iter(engine.drafter.members)) == "draft"
    assert stats.mean_acceptance_length > 1.5


PROMPTS = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()][:8]


def test_they_are_found_by_name_and_small() -> None:
    target = embedded(device="cpu")
    drafter = from_spec("medusa", target)
    assert isinstance(drafter, Medusa) and not drafter.nodes_chosen
    assert from_spec("medusa:embedded:medusa,nodes=8", target).limits.nodes == 8
    folder = embedded_heads("medusa")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
    assert "icen" in (folder / "README.md").read_text()
    with pytest.raises(UnknownOptionError, match="did you mean 'medusa'"):
        from_spec("medusa:embedded:medsua", target)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"pad_to": "110M"}, {"fast_paths": False}])
def test_they_fit_the_target_in_every_guise(options: dict[str, object]) -> None:
    target = load_model("embedded:target", device="cpu", **options)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answer = Engine(target, from_spec("medusa,nodes=16", target), controller="fixed").generate(PROMPTS[0], params)
    assert answer.warnings == ()
    assert answer.token_ids == Engine(target).generate(PROMPTS[0], params).token_ids
    assert answer.stats.accepted_tokens > 0


def test_they_are_refused_for_the_draft() -> None:
    draft = embedded("draft", device="cpu")
    with pytest.raises(CompositionError, match=r"heads for embedded:target read 384 .* embedded:draft has 128"):
        from_spec("medusa:embedded:medusa", draft)
    for kind in ("medusa", "redrafter"):
        told = f"no '{kind}' drafter was trained for 'embedded:draft'; train one by truedraft train {kind} --model "
        with pytest.raises(CompositionError, match=f"{told}embedded:draft, .* or name one as {kind}:DIR$"):
            from_spec(kind, draft)


@pytest.mark.parametrize(("temperature", "nodes", "least"), [(0.0, 32, 1.9), (1.0, 32, 1.4)])
def test_acceptance_on_shipped_prompts(temperature: float, nodes: int, least: float) -> None:
    """Far below what all 32 prompts gave (the card), for eight prompts scatter; a broken path gives hardly over 1."""
    target = embedded(device="cpu")
    engine = Engine(target, from_spec(f"medusa,nodes={nodes}", target), controller="fixed", entropy=0)
    params = SamplingParams(max_tokens=64, temperature=temperature, ignore_eos=True)
    answers = engine.generate(PROMPTS, params)
    stats = sum((answer.stats for answer in answers), Counters())
    assert stats.mean_acceptance_length >= least
    if temperature == 0.0:
        assert [a.token_ids for a in answers] == [a.token_ids for a in Engine(target).generate(PROMPTS, params)]
