"""Make the embedded pair: `python -m recipes.stdlib.build`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from recipes.stdlib.settings import Settings
from recipes.stdlib.stages import Recipe
from truedraft.errors import TruedraftError

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run all stages; what is already done is skipped, what was interrupted goes on."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    recipe = Recipe(options.run, Settings.load(), device=options.device, say=_say)
    try:
        recipe.data()
        first_target = recipe.first_target()
        first_draft = recipe.first_draft(first_target, recipe.draft_start())
        target = recipe.target()
        draft = recipe.draft(target, first_draft)
        recipe.publish(target, draft, options.out)
    except TruedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "stdlib", help="checkpoints, streams, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stdlib" / "out", help="the finished pair")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


def _say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
