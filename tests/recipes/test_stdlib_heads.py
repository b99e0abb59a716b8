"""The recipe of the embedded Medusa heads: where its prompts come from, and what it copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipes.stdlib.heads import first_settings, prompts, settings, share_text
from recipes.stdlib.publish_heads import publish_heads

from truedraft.core.rank_tree import RankTree
from truedraft.embedded import heldout_prompts_file
from truedraft.errors import DataError
from truedraft.heads import MedusaConfig, MedusaHeads
from truedraft.heads.checkpoint import load_medusa, save_medusa

FACTS = {
    "written_tokens": 1000,
    "steps": 7,
    "positions": 900,
    "elapsed_s": 12.5,
    "served": [{"temperature": 0.0, "nodes": 8, "mean_acceptance_length": 2.125, "promised": 2.25}],
}


def test_what_is_published_is_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.stdlib.publish.LOGS", tmp_path)
    heads = MedusaHeads(MedusaConfig(8, 11, heads=2, reads_token=True))
    trained, destination = tmp_path / "trained", tmp_path / "package" / "medusa"
    save_medusa(trained, heads, "some target", "f" * 32, {"greedy": RankTree.cartesian((2, 1))}, FACTS)
    (trained / "work").mkdir()
    (trained / "work" / "log.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1200)))
    publish_heads(trained, trained, destination, tmp_path / "results.json", total_s=300.0, device="cpu")
    assert {path.name for path in destination.iterdir()} == {
        "README.md", "config.json", "heads.safetensors", "trees.json",
    }  # fmt: skip
    found = load_medusa(destination)
    assert found.fingerprint == "f" * 32 and found.heads.config == heads.config
    card = (destination / "README.md").read_text()
    assert "| tokens per target call, temperature 0, 8 nodes | 2.12 (promised 2.25) |" in card and "5 minutes" in card
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["parameters"] == sum(weight.numel() for weight in heads.parameters())
    assert record["served"] == FACTS["served"]
    assert 500 <= len((tmp_path / "medusa.jsonl").read_text().splitlines()) <= 600


def test_the_three_sides_share_no_prompt() -> None:
    try:
        sides = prompts(first_settings())
    except DataError as error:
        pytest.skip(f"another Python than the recipe's: {error}")
    train, tree, test = ({tuple(prompt) for prompt in side} for side in (sides.train, sides.tree, sides.test))
    assert len(train) > 3000 and len(tree) == 64 and len(test) == 32
    assert not train & tree and not train & test and not tree & test
    shipped = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()]
    assert len(shipped) == len(test)
    assert torch.tensor(sides.text.astype("int64")).max() < 8192


def test_the_second_pass_goes_on_from_the_first_on_the_same_text(tmp_path: Path) -> None:
    first, second = first_settings(), settings(tmp_path)
    assert second.start_from == tmp_path and second.writing == first.writing and second.prompts == first.prompts
    assert (second.heads, second.layers, second.reads_token) == (first.heads, first.layers, True)
    (tmp_path / "a" / "work").mkdir(parents=True)
    for name in ("train.jsonl", "tree.hidden", "checkpoint.pt"):
        (tmp_path / "a" / "work" / name).write_text(name)
    share_text(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "b" / "work").iterdir()} == {"train.jsonl", "tree.hidden"}
