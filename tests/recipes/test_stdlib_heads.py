"""The recipes of the embedded heads: what they train on, and what they copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipes.stdlib import heads as recipe

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import TrainingError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead

FACTS = {
    "written_tokens": 1000,
    "steps": 7,
    "positions": 900,
    "elapsed_s": 12.5,
    "served": [{"temperature": 0.0, "nodes": 8, "mean_acceptance_length": 2.125, "promised": 2.25}],
}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for trained heads, with a log."""
    monkeypatch.setattr("recipes.stdlib.publish.LOGS", tmp_path)
    (tmp_path / "trained" / "work").mkdir(parents=True)
    log = "".join(f'{{"step": {step}}}\n' for step in range(1200))
    (tmp_path / "trained" / "work" / "log.jsonl").write_text(log)
    return tmp_path / "trained"


def test_what_is_published_is_what_was_trained(tmp_path: Path, trained: Path) -> None:
    heads, destination = MedusaHeads(MedusaConfig(8, 11, heads=2, reads_token=True)), tmp_path / "package" / "medusa"
    served = [FACTS["served"][0] | {"trees": trees} for trees in ("likeliest", "counted")]
    trees = {"greedy": RankTree.cartesian((2, 1))}
    heads.save(trained, HeadRecord("some target", "f" * 32, trees, FACTS | {"served": served}))
    recipe.publish("medusa", trained, destination, tmp_path / "results.json", total_s=300.0, device="cpu")
    assert {path.name for path in destination.iterdir()} == {
        "README.md", "config.json", "heads.safetensors", "trees.json",
    }  # fmt: skip
    found = MedusaHeads.load(destination)
    assert found.record.fingerprint == "f" * 32 and found.config == heads.config
    card = (destination / "README.md").read_text()
    assert "5 minutes" in card
    for kind in ("likeliest", "counted"):
        assert f"| tokens per target call, temperature 0, 8 nodes, {kind} trees | 2.12 (promised 2.25) |" in card
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["parameters"] == sum(weight.numel() for weight in heads.parameters())
    assert record["served"] == served and record["command"] == "recipes.stdlib.heads medusa"
    assert 500 <= len((tmp_path / "medusa.jsonl").read_text().splitlines()) <= 600


def test_a_recurrent_head_is_published_by_the_same_code(tmp_path: Path, trained: Path) -> None:
    head = RedrafterHead(recipe.RECIPES["redrafter"].config.sizes(384, 8192))
    served = [{"temperature": 1.0, "nodes": 32, "mean_acceptance_length": 1.875}]
    head.save(trained, HeadRecord("some target", "f" * 32, facts=FACTS | {"served": served}))
    destination = tmp_path / "redrafter"
    recipe.publish("redrafter", trained, destination, tmp_path / "results.json", total_s=300.0, device="cpu")
    assert RedrafterHead.load(destination).record.facts["served"] == served
    assert "| tokens per target call, temperature 1, 32 nodes | 1.88 |" in (destination / "README.md").read_text()
    assert (destination / "heads.safetensors").stat().st_size < 4_000_000
    assert (tmp_path / "redrafter.jsonl").is_file()


def test_a_recipe_trains_on_the_text_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "written" / "work"
    written.mkdir(parents=True)
    (written / "train.jsonl").write_text("answers")
    seen = []

    def train(target: str, asked: object, out: Path, config: object, **_: object) -> Finished:
        seen.append((out.name, config, (out / "work" / "train.jsonl").read_text()))
        if len(seen) == 2:
            raise TrainingError("no room")
        return Finished()

    monkeypatch.setattr("recipes.stdlib.heads.train_heads", train)
    folders = ["--out", str(tmp_path / "out"), "--text", str(tmp_path / "written")]
    arguments = ["redrafter", *folders, "--threads", str(torch.get_num_threads())]
    assert recipe.main(arguments) == 0
    medusa, redrafter = (recipe.RECIPES[kind].config for kind in ("medusa", "redrafter"))
    assert seen == [("out", redrafter, "answers")]
    for name in ("tokens", "writing", "prompts", "prompt_tokens"):
        assert getattr(redrafter, name) == getattr(medusa, name), "one text serves both"
    assert recipe.main(arguments) == 1


class Finished:
    def as_dict(self) -> dict[str, object]:
        return {}


def test_text_is_shared_and_checkpoints_are_not(tmp_path: Path) -> None:
    (tmp_path / "a" / "work").mkdir(parents=True)
    for name in ("train.jsonl", "tree.hidden", "checkpoint.pt"):
        (tmp_path / "a" / "work" / name).write_text(name)
    recipe.share_text(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "b" / "work").iterdir()} == {"train.jsonl", "tree.hidden"}
    recipe.share_text(tmp_path / "nowhere", tmp_path / "c")
    assert not list((tmp_path / "c" / "work").iterdir())
