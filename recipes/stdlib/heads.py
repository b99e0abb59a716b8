"""The embedded Medusa heads: `python -m recipes.stdlib.heads`, from the root of the repository."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from recipes.stdlib.publish_heads import publish_heads
from recipes.stdlib.sources import load_sources
from truedraft.errors import TruedraftError
from truedraft.training.medusa import train_medusa
from truedraft.training.medusa_config import MedusaTrainingConfig
from truedraft.training.medusa_job import WORK
from truedraft.training.optimizer import OptimizerConfig
from truedraft.training.prompts import PromptSets, as_stream, cut_prompts
from truedraft.training.self_writing import SelfTextConfig
from truedraft.training.standard_library import shipped_prompts, without_pieces
from truedraft.training.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TARGET = "embedded:target"
RESULTS = ROOT / "benchmarks" / "results" / "medusa_heads.json"


def first_settings(device: str = "cpu") -> MedusaTrainingConfig:
    """Every number that decides the first pass."""
    return MedusaTrainingConfig(
        heads=4,
        layers=2,
        tokens=600_000,
        writing=SelfTextConfig(temperatures=(0.0, 1.0, 1.0)),
        optimizer=OptimizerConfig(0.01, 0.01),
        epochs=2.5,
        decay_share=0.7,
        window=8,
        seed=0,
        device=device,
    )


def settings(first: Path, device: str = "cpu") -> MedusaTrainingConfig:
    """Every number that decides the second pass, which goes on from the heads of the first at half its rate."""
    return replace(
        first_settings(device),
        start_from=first,
        optimizer=OptimizerConfig(0.005, 0.005),
        epochs=1.0,
        decay_share=0.9,
        window=4,
        seed=1,
    )


def share_text(first: Path, second: Path) -> None:
    """Let the second pass read what the target wrote for the first."""
    (second / WORK).mkdir(parents=True, exist_ok=True)
    for path in [*(first / WORK).glob("train.*"), *(first / WORK).glob("tree.*")]:
        if not (second / WORK / path.name).exists():
            shutil.copy(path, second / WORK / path.name)


def prompts(config: MedusaTrainingConfig) -> PromptSets:
    """Prompts from files that the target was trained on; for the tree from held-out files; the shipped ones as test."""
    tokenizer = load_tokenizer(TARGET)
    sources = sorted(load_sources(), key=lambda source: source.path)
    pieces = [str(record["text"]) for record in shipped_prompts()]
    seen = [source.text for source in sources if not source.held_out]
    held_out = [part for source in sources if source.held_out for part in without_pieces(source.text, pieces)]
    counts = config.prompts
    return PromptSets(
        cut_prompts(seen, tokenizer, counts.train, config.prompt_tokens),
        cut_prompts(held_out, tokenizer, counts.tree, config.prompt_tokens),
        [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces[: counts.test]],
        as_stream(held_out, tokenizer),
    )


def main(arguments: list[str] | None = None) -> int:
    """Train the heads; an interrupted run goes on from its last checkpoint."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    config = first_settings(options.device)
    first, started = options.out / "first", time.time()
    try:
        asked = prompts(config)
        train_medusa(TARGET, asked, first, config, on_progress=_Progress())
        share_text(first, options.out)
        result = train_medusa(TARGET, asked, options.out, settings(first, options.device), on_progress=_Progress())
    except TruedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    total_s = time.time() - started
    _say(f"finished after {total_s / 60:.1f} minutes: {result.as_dict()}")
    if options.publish is not None:
        publish_heads(options.out, first, options.publish, options.results, total_s=total_s, device=options.device)
    return 0


class _Progress:
    """A line every twenty seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int, remark: str) -> None:
        if done == total or time.time() - self._last > 20.0:
            self._last = time.time()
            _say(f"{what}: {done} of {total} {remark}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stdlib" / "medusa", help="heads and work")
    parser.add_argument("--publish", type=Path, help="the package's folder for the finished heads")
    parser.add_argument("--results", type=Path, default=RESULTS, help="what was measured, written with --publish")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


def _say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
