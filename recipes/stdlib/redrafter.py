"""The embedded recurrent head: `python -m recipes.stdlib.redrafter`, from the root of the repository.

What the target wrote for the Medusa heads is taken where it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.common import ROOT
from recipes.stdlib.head_recipe import TEXT, HeadRecipe
from recipes.stdlib.publish_heads import Published
from truedraft.heads import RedrafterHead
from truedraft.training.redrafter import RedrafterTrainingConfig


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


def published(folder: Path) -> Published:
    """A trained head, with what is said about it."""
    checkpoint = RedrafterHead.load(folder)
    return Published(
        folder,
        name="redrafter",
        command="recipes.stdlib.redrafter",
        title="truedraft embedded recurrent head",
        summary="A recurrent head on the embedded target's last vector (ReDrafter): `--drafter redrafter`.",
        files=("config.json", "heads.safetensors", "facts.json"),
        parameters=sum(weight.numel() for weight in checkpoint.parameters()),
        facts=checkpoint.record.facts,
    )


RECIPE = HeadRecipe("redrafter", settings, published, text=ROOT / "runs" / "stdlib" / "medusa")

if __name__ == "__main__":
    sys.exit(RECIPE.main())
