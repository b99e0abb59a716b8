"""The embedded Medusa heads: `python -m recipes.stdlib.heads`, from the root of the repository."""

from __future__ import annotations

import sys

from recipes.stdlib.head_recipe import TEXT, HeadRecipe
from truedraft.kinds.medusa.training import MedusaTrainingConfig


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


RECIPE = HeadRecipe(
    "medusa",
    "recipes.stdlib.heads",
    settings,
    title="truedraft embedded Medusa heads",
    summary="Heads on the embedded target's last vector, and trees of their guesses: `--drafter medusa`.",
    files=("config.json", "heads.safetensors", "trees.json"),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
