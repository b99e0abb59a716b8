"""The whole recipe with tiny models on a planted corpus: every stage, skipped when done, published with cards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from recipes.stdlib import build, publish, settings
from recipes.stdlib.sources import Source

from truedraft import load_model
from truedraft.errors import DataError
from truedraft.machine import describe_machine
from truedraft.models.architecture import LlamaShape
from truedraft.training.texts.data import Curriculum

TINY = LlamaShape(vocab_size=400, width=32, layers=1, heads=2, kv_heads=1, intermediate=32, context=128, head_size=16)


@pytest.fixture
def tiny_recipe(tmp_path, monkeypatch):
    """The real stages; only the corpus, the shapes and the lengths are small."""
    corpus = [
        Source(
            path=f"file_{n}.py",
            text="".join(f"def call_{n}_{i}(value):\n    return value * {i} + {n}\n\n\n" for i in range(40)),
            sha256=f"{n:064x}",
            held_out=n % 2 == 0,
        )
        for n in range(70)
    ]
    for module in (build, settings):
        monkeypatch.setattr(module, "VOCAB_SIZE", 400)
    monkeypatch.setattr(build, "load_sources", lambda: corpus)
    monkeypatch.setattr(settings, "TARGET_SHAPE", TINY)
    monkeypatch.setattr(settings, "DRAFT_SHAPE", TINY)
    monkeypatch.setattr(publish, "LOGS", tmp_path / "logs")
    small = Curriculum(stable_length=32, decay_length=64, tokens_per_step=256, tokens_per_pass=256)
    monkeypatch.setattr(settings, "CURRICULUM", small)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    lines: list[str] = []
    yield build.Recipe(tmp_path / "run", settings.Settings(6, 2, 3, 2, 3, 2, 2, 2, 2), say=lines.append, every=1)
    torch.set_num_threads(before)


def run(recipe, out):
    recipe.data()
    first_target = recipe.first_target()
    first_draft = recipe.first_draft(first_target, recipe.draft_start())
    target = recipe.target()
    return recipe.publish(target, recipe.draft(target, first_draft), out)


def test_all_stages_then_nothing_left_to_do(tiny_recipe, tmp_path):
    result = run(tiny_recipe, tmp_path / "out")
    assert 0 < result["alpha"] <= 1
    assert 0 <= result["greedy_agreement"] <= 1
    for name in ("target", "draft"):
        folder = tmp_path / "out" / name
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
        assert not names & {"checkpoint.pt", "log.jsonl", "run.json", "work", "progress.json"}
        card = (folder / "README.md").read_text()
        assert "bits per byte" in card and f"| machine | {describe_machine()} |" in card
    record = json.loads((tmp_path / "out" / "draft" / "drafter.json").read_text())
    assert record["target"]["fingerprint"] == load_model(tmp_path / "out" / "target", dtype="float32").fingerprint
    assert record["figures"]["alpha"] == result["alpha"] and len(record["figures"]["served"]) == 2
    assert len((tmp_path / "out" / "heldout_prompts.jsonl").read_text().splitlines()) == 32
    lines = [json.loads(line) for line in (tmp_path / "logs" / "target.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))

    tiny_recipe.say.__self__.clear()
    again = run(tiny_recipe, tmp_path / "again")
    assert again == result
    assert [line for line in tiny_recipe.say.__self__ if "step" in line] == []


def test_the_early_target_is_a_branch_of_the_final_one(tiny_recipe):
    tiny_recipe.data()
    tiny_recipe.first_target()
    tiny_recipe.target()

    def log(path):
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]

    trunk = log(tiny_recipe.run / "target" / "log.jsonl")
    assert len(trunk) == 8
    branch = json.loads((tiny_recipe.run / "first-target" / "progress.json").read_text())
    assert branch["step"] == 5


def test_going_on_with_another_split_is_refused(tiny_recipe, monkeypatch):
    tiny_recipe.data()
    tiny_recipe.data()
    others = [replace(source, held_out=not source.held_out) for source in build.load_sources()]
    monkeypatch.setattr(build, "load_sources", lambda: others)
    with pytest.raises(DataError, match="made from another manifest: name a new --run folder"):
        tiny_recipe.data()


def test_a_refusal_is_one_line_and_status_1(monkeypatch, capsys, tmp_path):
    def refuse(_):
        raise DataError("1 files differ")

    monkeypatch.setattr(build.Recipe, "data", refuse)
    assert build.main(["--run", str(tmp_path), "--threads", "1"]) == 1
    assert capsys.readouterr().err == "error: 1 files differ\n"


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Recipe, "data", interrupt)
    assert build.main(["--run", str(tmp_path), "--threads", "1"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on from the last checkpoint\n"
