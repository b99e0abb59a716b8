"""The recipes of the embedded heads: where their prompts come from, and what they copy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipes.stdlib import heads as medusa
from recipes.stdlib import redrafter
from recipes.stdlib.heads import prompts, share_text

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import DataError, TrainingError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.models.embedded import heldout_prompts_file

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
    medusa.RECIPE.publish(trained, destination, tmp_path / "results.json", total_s=300.0, device="cpu")
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
    assert record["served"] == served and record["command"] == "recipes.stdlib.heads"
    assert 500 <= len((tmp_path / "medusa.jsonl").read_text().splitlines()) <= 600


def test_a_recurrent_head_is_published_by_the_same_code(tmp_path: Path, trained: Path) -> None:
    head = RedrafterHead(redrafter.settings().sizes(384, 8192))
    served = [{"temperature": 1.0, "nodes": 32, "mean_acceptance_length": 1.875}]
    head.save(trained, HeadRecord("some target", "f" * 32, facts=FACTS | {"served": served}))
    destination = tmp_path / "redrafter"
    redrafter.RECIPE.publish(trained, destination, tmp_path / "results.json", total_s=300.0, device="cpu")
    assert RedrafterHead.load(destination).record.facts["served"] == served
    assert "| tokens per target call, temperature 1, 32 nodes | 1.88 |" in (destination / "README.md").read_text()
    assert (destination / "heads.safetensors").stat().st_size < 4_000_000
    assert (tmp_path / "redrafter.jsonl").is_file()


def test_a_recipe_trains_on_the_text_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.stdlib.heads.prompts", lambda config: config.prompts)
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
    recipe = replace(redrafter.RECIPE, text=tmp_path / "written")
    arguments = ["--out", str(tmp_path / "out"), "--threads", str(torch.get_num_threads())]
    assert recipe.main(arguments) == 0
    assert seen == [("out", redrafter.settings(), "answers")]
    for name in ("writing", "prompts", "prompt_tokens"):
        assert getattr(redrafter.settings(), name) == getattr(medusa.settings(), name), "one text serves both"
    assert recipe.main(arguments) == 1


class Finished:
    def as_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.slow  # it reads the whole standard library; small texts: training/texts/test_medusa_prompts.py
def test_the_three_sides_share_no_prompt() -> None:
    try:
        sides = prompts(medusa.settings())
    except DataError as error:
        pytest.skip(f"another Python than the recipe's: {error}")
    train, tree, test = ({tuple(prompt) for prompt in side} for side in (sides.train, sides.tree, sides.test))
    assert len(train) > 3000 and len(tree) == 64 and len(test) == 32
    assert not train & tree and not train & test and not tree & test
    shipped = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()]
    assert len(shipped) == len(test)
    assert torch.tensor(sides.text.astype("int64")).max() < 8192


def test_text_is_shared_and_checkpoints_are_not(tmp_path: Path) -> None:
    (tmp_path / "a" / "work").mkdir(parents=True)
    for name in ("train.jsonl", "tree.hidden", "checkpoint.pt"):
        (tmp_path / "a" / "work" / name).write_text(name)
    share_text(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "b" / "work").iterdir()} == {"train.jsonl", "tree.hidden"}
    share_text(tmp_path / "nowhere", tmp_path / "c")
    assert not list((tmp_path / "c" / "work").iterdir())
