"""Trainings of every objective that a test runs in one process, and in two that are interrupted and go on.

Run as a program it is one of the two: TARGET DATA OUT, and what launchers leave in the environment.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import _muon

from truedraft.training import evaluate
from truedraft.training.block import DSparkTrainingConfig
from truedraft.training.drafts import DraftConfig, train_draft
from truedraft.training.eagle import Eagle3TrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.loop import TrainingLoop, checkpoint_of
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.processes import Processes, joined
from truedraft.training.redrafter import RedrafterTrainingConfig
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.prompts import PromptSets

STEPS, INTERRUPTED_AT = 6, 3
_CURRICULUM = Curriculum(stable_length=16, decay_length=16, tokens_per_step=80, tokens_per_pass=80)  # five sequences
_HEADS: dict[str, Any] = {
    "tokens": 300, "writing": WritingConfig(answer_tokens=16, batch=8), "steps": STEPS, "learning_rate": 1e-2,
    "length": 2, "positions_per_step": 72, "evaluate_every": 3,
}  # fmt: skip
_LAYERS = {"layers": (0, 1), "draft_vocab": 64}
CONFIGS: dict[str, Any] = {
    "draft": DraftConfig(
        width=16, layers=1, heads=2, kv_heads=1, intermediate=32, schedule=WarmupStableDecay(2, STEPS - 2, 2),
        curriculum=_CURRICULUM, on_policy=0.5,
    ),
    "redrafter": RedrafterTrainingConfig(**_HEADS, state=24, layers=1, self_fed=0.3),
    "eagle": Eagle3TrainingConfig(**_HEADS | {"positions_per_step": 16}, **_LAYERS),  # an answer, of which one has none
    "dspark": DSparkTrainingConfig(**_HEADS, **_LAYERS, by_acceptance=True, anchors=8, markov=8),
}  # fmt: skip


def train(kind: str, target: Path, data: Path, out: Path) -> Any:
    """A training of a kind, on the ids of a file."""
    if kind == "draft":
        return train_draft(target, [data.with_suffix(".txt")], out / kind, CONFIGS[kind])
    stream = np.load(data)
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    prompts = PromptSets(pieces[:20], pieces[20:23], pieces[23:26], stream[900:1000])
    return train_heads(target, prompts, out / kind, CONFIGS[kind])


@contextmanager
def in_float32(patch: Callable[[object, str, Any], None]) -> Iterator[None]:
    """Trainings compute in float32, and answers are short.

    Muon's iteration is in bfloat16, and lifts what is next to nothing in a matrix: what stands for it here does not
    let rounding grow, and all else of an update is as it is.
    """
    step = TrainingLoop._step

    def exact(loop: TrainingLoop) -> Any:
        loop.autocast = False
        return step(loop)

    patch(TrainingLoop, "_step", exact)
    patch(_muon, "_zeropower_via_newtonschulz", lambda gradient, *_: gradient / (gradient.norm() + 1e-7))
    patch(evaluate, "_TOKENS", 4)
    yield


def _interrupted(target: Path, data: Path, out: Path) -> None:
    """Each training, which Ctrl-C in the second process ends in both, and then again to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, step = Processes.here().rank, TrainingLoop._step
    said: dict[str, Any] = {}
    for kind in CONFIGS:

        def interrupting(loop: TrainingLoop) -> Any:
            if rank == 1 and loop.progress.step == INTERRUPTED_AT - 1:
                signal.raise_signal(signal.SIGINT)
            return step(loop)

        setattr(TrainingLoop, "_step", interrupting)  # noqa: B010
        try:
            train(kind, target, data, out)
        except KeyboardInterrupt:
            said[f"{kind} interrupted"] = True
        setattr(TrainingLoop, "_step", step)  # noqa: B010
        if rank == 0:
            said[f"{kind} at"] = checkpoint_of(out / kind / "work")[0]
        said[kind] = train(kind, target, data, out).as_dict()
    (out / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu"), in_float32(setattr):
        _interrupted(*map(Path, sys.argv[1:]))
