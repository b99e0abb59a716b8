"""Make the embedded pair: `python -m recipes.stdlib.build`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipes.common import ROOT, command, say
from recipes.stdlib.settings import Settings
from recipes.stdlib.stages import Recipe


def main(arguments: list[str] | None = None) -> int:
    """Run all stages; what is already done is skipped, what was interrupted goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "stdlib", help="checkpoints, streams, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stdlib" / "out", help="the finished pair")
    parser.add_argument("--device", default="cpu")
    return command(parser, _build, arguments)


def _build(options: argparse.Namespace) -> None:
    recipe = Recipe(options.run, Settings.load(), device=options.device, say=say)
    recipe.data()
    first_target = recipe.first_target()
    first_draft = recipe.first_draft(first_target, recipe.draft_start())
    target = recipe.target()
    draft = recipe.draft(target, first_draft)
    recipe.publish(target, draft, options.out)


if __name__ == "__main__":
    sys.exit(main())
