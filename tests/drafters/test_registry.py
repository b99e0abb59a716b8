"""Trained drafters on disk: which belong to a target, and where they are looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import LlamaConfig

from support.backends import fused_backend
from support.tiny_models import GROUPED, build
from truedraft.drafters import DraftModel, from_spec, registry
from truedraft.drafters.registry import TABLE, Registry, TrainedDrafter, find_drafters, list_drafters, write_record
from truedraft.drafters.specs import auto_members, draft_from_spec
from truedraft.errors import CompositionError, ModelError, OptionError
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.models import loading
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.testing import MarkovModel

OURS, OTHERS = "0" * 32, "1" * 32


class Weighty(MarkovModel):
    """A model with a fingerprint, and vectors that heads could read."""

    head_width = 8

    @property
    def fingerprint(self) -> str:
        return OURS


@pytest.fixture
def target() -> Weighty:
    return Weighty.random(6, seed=1)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafters of installed packages, and a registry of its own."""
    monkeypatch.setattr(registry, "_GROUP", "drafters of tests")
    monkeypatch.setattr(registry, "_REGISTRY", str(tmp_path / "cache" / "drafters.json"))


def draft(folder: Path, fingerprint: str = OURS, vocab: int = 6, age: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab}))
    write_record(folder, "draft", "some/model", fingerprint, {"alpha": 0.5})
    os.utime(folder / "drafter.json", (1e9 - age, 1e9 - age))
    return folder


def heads(folder: Path, kind: str = "medusa", fingerprint: str = OURS, width: int = 8) -> Path:
    folder.mkdir(parents=True)
    about = {"kind": kind, "target": {"name": "m", "fingerprint": fingerprint}, "width": width, "vocab_size": 6}
    (folder / "config.json").write_text(json.dumps(about))
    served = [{"temperature": 0.0, "nodes": 8, "mean_acceptance_length": 2.0}]
    (folder / "facts.json").write_text(json.dumps({"served": served}))
    return folder


def test_a_folder_says_what_it_is(tmp_path: Path) -> None:
    found = TrainedDrafter.read(draft(tmp_path / "a"), "here")
    assert found is not None
    assert (found.kind, found.target_name, found.fingerprint, found.vocab_size) == ("draft", "some/model", OURS, 6)
    assert (found.figures, found.width, found.source, found.modified) == ({"alpha": 0.5}, None, "here", 1e9)
    head = TrainedDrafter.read(heads(tmp_path / "b"))
    assert head is not None and (head.kind, head.width) == ("medusa", 8)
    assert head.figures["served"][0]["mean_acceptance_length"] == 2.0
    assert head.tokens_per_call == {0.0: 2.0}
    assert head.as_dict()["target"] == {"name": "m", "fingerprint": OURS}


def test_a_table_needs_no_configuration_and_its_file(tmp_path: Path) -> None:
    write_record(tmp_path, "ngram", "m", OURS, {"order": 2})
    assert TrainedDrafter.read(tmp_path) is None, "the table is gone"
    (tmp_path / TABLE).touch()
    found = TrainedDrafter.read(tmp_path)
    assert found is not None
    assert (found.kind, found.fingerprint, found.figures, found.vocab_size) == ("ngram", OURS, {"order": 2}, None)
    assert found.modified == (tmp_path / "drafter.json").stat().st_mtime
    write_record(tmp_path, "draft", "m", OURS, {})
    assert TrainedDrafter.read(tmp_path) is None, "a draft model has a configuration"


def test_a_draft_may_be_a_gguf_file_whose_sizes_the_record_has(tmp_path: Path) -> None:
    (tmp_path / "draft.gguf").touch()
    about = {"kind": "draft", "target": {"name": "m", "fingerprint": OURS}, "vocab_size": 6}
    (tmp_path / "drafter.json").write_text(json.dumps(about))
    found = TrainedDrafter.read(tmp_path)
    assert found is not None and (found.kind, found.vocab_size, found.width) == ("draft", 6, None)


def test_a_sample_of_the_weights_tells_whose_a_drafter_is_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sampled(Weighty):
        sample = "2" * 32

    target = Sampled.random(6, seed=1)
    for name, sample in (("ours", "2" * 32), ("theirs", "3" * 32)):
        write_record(draft(tmp_path / "all" / name), "draft", "some/model", OURS, {}, sample)
    assert [each.folder.name for each in find_drafters(target, [tmp_path / "all"])] == ["ours"]
    found = TrainedDrafter.read(tmp_path / "all" / "ours")
    assert found is not None and found.as_dict()["target"]["sample"] == "2" * 32
    monkeypatch.setattr(Weighty, "fingerprint", property(lambda self: pytest.fail("all weights are read")))
    assert len(find_drafters(target, [tmp_path / "all"])) == 1
    monkeypatch.undo()
    draft(tmp_path / "all" / "older")  # names the fingerprint alone
    draft(tmp_path / "all" / "another's", OTHERS)
    assert {each.folder.name for each in find_drafters(target, [tmp_path / "all"])} == {"ours", "older"}


def test_packages_bring_drafters_and_are_not_run(
    tmp_path: Path, target: Weighty, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "some_drafters"
    folder = draft(package / "draft")
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    about = package.parent / "some_drafters-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-drafters\nVersion: 1\n")
    lines = "one = some_drafters\ngone = no_such_package\nworse = no_such.package\nno = :\n"
    (about / "entry_points.txt").write_text(f"[drafters of tests]\n{lines}")
    assert find_drafters(target) == []
    monkeypatch.syspath_prepend(str(package.parent))
    assert [(each.folder, each.source) for each in find_drafters(target)] == [(folder, "the package some_drafters")]


def test_figures_are_what_others_wrote() -> None:
    served = [{"temperature": 0, "mean_acceptance_length": tokens} for tokens in (2, 2.5, "3")]
    made = TrainedDrafter(Path(), "draft", "", OURS, {"served": [*served, 7, {"temperature": 1}, {}]})
    assert made.tokens_per_call == {0: 2.5}
    for figures in ({}, {"served": 3}):
        assert TrainedDrafter(Path(), "draft", "", OURS, figures).tokens_per_call == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"model_type": "llama"}',
        '{"kind": "hydra", "target": {"fingerprint": "0"}}',
        '{"kind": "medusa"}',
        '{"kind": "medusa", "target": "x"}',
        '{"kind": "medusa", "target": {"fingerprint": null}}',
        '{"kind": ["medusa"], "target": {"fingerprint": "0"}}',
    ],
)
def test_what_is_no_drafter_is_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert TrainedDrafter.read(tmp_path) is None


def test_those_of_the_target_by_kind_the_newest_first(tmp_path: Path, target: Weighty) -> None:
    draft(tmp_path / "all" / "old", age=50)
    draft(tmp_path / "all" / "new", age=10)
    draft(tmp_path / "all" / "other", OTHERS)
    draft(tmp_path / "all" / "few-ids", vocab=5)
    heads(tmp_path / "all" / "a-medusa")
    heads(tmp_path / "all" / "recurrent", "redrafter")
    heads(tmp_path / "all" / "narrow", width=4)
    (tmp_path / "all" / "readme.md").touch()
    found = find_drafters(target, [tmp_path / "all"])
    assert [each.folder.name for each in found] == ["new", "old", "recurrent", "a-medusa"]
    assert len(list_drafters(None, [tmp_path / "all"])) == 7


def test_all_places_are_looked_into_and_each_folder_counts_once(
    tmp_path: Path, target: Weighty, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.name = str(tmp_path / "model") + " padded to 110M"
    own = draft(tmp_path / "model" / "drafters" / "own")
    alone = draft(tmp_path / "alone")
    kept = TrainedDrafter.read(draft(tmp_path / "kept"))
    assert kept is not None
    Registry().add(kept)
    monkeypatch.chdir(tmp_path)
    places = {each.folder.resolve(): each.source for each in find_drafters(target, ["alone", alone, alone.parent])}
    assert places[own] == "the model's own folder" and places[alone] == "--drafters-dir"
    assert places[kept.folder] == "--drafters-dir", "the folder above was given"
    assert {each.folder: each.source for each in find_drafters(target)} == {
        own: "the model's own folder",
        kept.folder: "trained here",
    }
    with pytest.raises(OptionError, match="drafters_dir must be a folder of drafters, and 'nowhere'") as refused:
        find_drafters(target, ["nowhere"])
    assert refused.value.field == "drafters_dir"


def test_weights_are_read_only_where_sizes_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dear(Weighty):
        @property
        def fingerprint(self) -> str:
            raise ModelError("unreadable")

    dear = Dear.random(6, seed=1)
    draft(tmp_path / "all" / "small", vocab=5)
    told: list[str] = []
    assert find_drafters(dear, [tmp_path / "all"], told.append) == [] == told
    draft(tmp_path / "all" / "fits")
    assert find_drafters(dear, [tmp_path / "all"], told.append) == []
    assert told == ["no trained drafter can be found: unreadable"]


def test_the_registry_keeps_each_folder_once_and_forgets_none(tmp_path: Path) -> None:
    kept = Registry()
    assert kept.drafters() == []
    made = [TrainedDrafter.read(draft(tmp_path / str(number))) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(Registry().add, (each for each in made if each is not None))) == {None}
    assert {each.folder.name for each in Registry().drafters()} == set("01234567")
    again = TrainedDrafter.read(tmp_path / "3")
    assert again is not None and Registry().add(again) is None
    assert len(Registry().drafters()) == 8
    (tmp_path / "5" / "drafter.json").unlink()
    assert {each.folder.name for each in Registry().drafters()} == set("0123467"), "what is gone is passed over"
    entry = json.loads(kept.file.read_text())["drafters"][0]
    assert set(entry) == {"folder", "kind", "target", "figures"}


def test_a_damaged_registry_is_an_empty_one_and_a_full_disk_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for content in ("{", "[]", '{"drafters": 3}', '{"drafters": [3, {"folder": 4}]}'):
        file.write_text(content)
        assert Registry(file).drafters() == []
    (tmp_path / "plain").touch()
    made = TrainedDrafter.read(draft(tmp_path / "a"))
    assert made is not None
    told = Registry(tmp_path / "plain" / "r.json").add(made)
    assert told is not None and "could not be noted in" in told and "--drafter" in told


def test_auto_takes_two_of_a_kind_and_leaves_what_cannot_be_used(
    tmp_path: Path, target: Weighty, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("broken", "small", "a", "b", "c")):
        draft(tmp_path / "all" / name, age=age)

    def load(name: str, **_: object) -> MarkovModel:
        if name.endswith("broken"):
            raise ZeroDivisionError("no such\nthing")
        return MarkovModel.random(5 if name.endswith("small") else 6, seed=2, name=name)

    monkeypatch.setattr(loading, "load_model", load)
    told: list[str] = []
    drafter = from_spec("auto", target, [tmp_path / "all"], tell=told.append)
    assert list(drafter.members) == ["draft", "draft-2", "prompt-lookup"]
    models = [each.model.name for each in drafter.members.values() if isinstance(each, DraftModel)]
    assert [Path(name).name for name in models] == ["a", "b"]
    assert told[0] == f"the drafter draft:{tmp_path / 'all' / 'broken'} is left out: no such thing"
    assert "'5 token ids" in told[1].replace("has 5", "'5") and len(told) == 2
    with pytest.warns(UserWarning, match="is left out"):
        from_spec("auto", target, [tmp_path / "all"])


def test_auto_shows_a_draft_no_more_of_a_text_than_its_training_did(
    tmp_path: Path, target: Weighty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its caches can drop tokens: models that run one text at a time have none that do."""
    made = build(LlamaConfig(**GROUPED | {"vocab_size": 6}), seed=3)
    packed = HuggingFaceModel(made, None, "packed", fused_backend)
    for age, (name, figures) in enumerate((("short", {"context": 512}), ("any", {}), ("states", {"context": 512}))):
        write_record(draft(tmp_path / "all" / name), "draft", "some/model", OURS, figures)
        os.utime(tmp_path / "all" / name / "drafter.json", (1e9 - age, 1e9 - age))
    states = HuggingFaceModel(
        build(LlamaConfig(**GROUPED | {"vocab_size": 6}), seed=3), None, "states", SequentialBackend
    )
    monkeypatch.setattr(loading, "load_model", lambda name, **_: states if name.endswith("states") else packed)
    found = auto_members(target, [tmp_path / "all"], most=3)[:3]
    contexts = {Path(str(words.path)).name: words.options.get("context") for words, _ in found}
    assert contexts == {"short": "512", "any": None, "states": None}
    assert [each.context for _, each in found if isinstance(each, DraftModel)] == [512, None, None]


def test_kinds_without_a_path_are_looked_for_where_auto_looks(
    tmp_path: Path, target: Weighty, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = draft(tmp_path / "all" / "made")
    headed = [heads(tmp_path / "all" / kind, kind) for kind in ("medusa", "redrafter")]
    loaded: list[Path] = []

    def load(name: str, **_: object) -> MarkovModel:
        loaded.append(Path(name))
        return MarkovModel.random(6, seed=2, name=name)

    def load_heads(folder: Path | str) -> None:
        loaded.append(Path(folder))
        raise ModelError("no weights")

    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(MedusaHeads, "load", load_heads)
    monkeypatch.setattr(RedrafterHead, "load", load_heads)
    for words in ("draft", "portfolio(draft;prompt-lookup)", "cascade(prompt-lookup;draft)", "draft,async=0"):
        from_spec(words, target, [tmp_path / "all"])
        assert loaded == [made], words
        loaded.clear()
    found = draft_from_spec("draft", target, [tmp_path / "all"])
    assert found is not None and loaded == [made]
    loaded.clear()
    for kind in ("medusa", "redrafter"):
        with pytest.raises(ModelError, match="no weights"):
            from_spec(kind, target, [tmp_path / "all"])
        with pytest.raises(CompositionError, match=f"no '{kind}' drafter was trained for .* truedraft train {kind} "):
            from_spec(kind, target)
    assert loaded == headed


def test_looking_for_drafters_loads_nothing_heavy() -> None:
    code = "import sys; import truedraft.drafters.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
