"""The embedded Medusa heads: `python -m recipes.stdlib.heads`, from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.stdlib.head_recipe import TEXT, HeadRecipe
from recipes.stdlib.publish_heads import Published
from truedraft.heads import MedusaHeads
from truedraft.training.medusa import MedusaTrainingConfig


def settings(device: str = "cpu") -> MedusaTrainingConfig:
    """Every number that decides the heads."""
    return MedusaTrainingConfig(
        **TEXT,
        heads=4,
        layers=3,
        epochs=2.5,
        decay_share=0.9,
        window=4,
        seed=0,
        device=device,
    )


def published(folder: Path) -> Published:
    """Trained heads, with what is said about them."""
    checkpoint = MedusaHeads.load(folder)
    return Published(
        folder,
        name="medusa",
        command="recipes.stdlib.heads",
        title="truedraft embedded Medusa heads",
        summary="Heads on the embedded target's last vector, and trees of their guesses: `--drafter medusa`.",
        files=("config.json", "heads.safetensors", "trees.json"),
        parameters=sum(weight.numel() for weight in checkpoint.parameters()),
        facts=checkpoint.record.facts,
    )


RECIPE = HeadRecipe("medusa", settings, published)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
