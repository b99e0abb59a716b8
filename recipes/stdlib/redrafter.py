"""The embedded recurrent head: `python -m recipes.stdlib.redrafter`, from the root of the repository.

What the target wrote for the Medusa heads is taken where it is there.
"""

from __future__ import annotations

import sys

from recipes.common import ROOT
from recipes.stdlib.heads import TEXT, HeadRecipe
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig


def settings(device: str = "cpu") -> RedrafterTrainingConfig:
    """Every number that decides the head, of 1.4 M weights."""
    return RedrafterTrainingConfig(
        **TEXT,
        length=5,
        state=512,
        layers=4,
        loss="kl",
        steps=1000,
        decay_share=0.9,
        window=4,
        seed=0,
        device=device,
    )


RECIPE = HeadRecipe(
    "redrafter",
    "recipes.stdlib.redrafter",
    settings,
    title="truedraft embedded recurrent head",
    summary="A recurrent head on the embedded target's last vector (ReDrafter): `--drafter redrafter`.",
    files=("config.json", "heads.safetensors", "facts.json"),
    text=ROOT / "runs" / "stdlib" / "medusa",
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
