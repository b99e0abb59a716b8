"""What decides the training of heads of any kind, but for the target and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from truedraft.errors import OptionError
from truedraft.options import check_whole
from truedraft.training.checkpoints import CHECKPOINT_EVERY_S
from truedraft.training.optimizer import OptimizerConfig
from truedraft.training.prompts import PromptCounts
from truedraft.training.schedule import WarmupStableDecay
from truedraft.training.self_writing import SelfTextConfig

_WARMUP_STEPS = 20


@dataclass(frozen=True)
class HeadTrainingConfig:
    """What all kinds of heads have in common.

    Attributes:
        tied: whether heads end in the target's own LM head.
        tokens: about how many tokens the target writes to train on.
        prompt_tokens: of a prompt.
        writing: how the target writes.
        tree_prompts: held-out prompts whose answers trees are counted on, and accuracy is measured on.
        test_prompts: held-out prompts that acceptance is measured on.
        place_decay: by how much each place counts less than the one before; see `HeadLoss`.
        optimizer: peak rates and decays.
        epochs: passes over what the target wrote; fractions are possible.
        steps: updates; None counts them by `epochs`.
        decay_share: of the steps, at the end, in which the rate decays.
        positions_per_step: positions of one update, about.
        window: neighbouring positions that are read together; they share laws, but say less than scattered ones.
        evaluate_every: steps between two measurements on held-out answers.
        evaluated_positions: of such a measurement, about.
        start_from: a folder with heads for this target, to begin with.
        seed: of the order of the data, of new weights, and of what the target writes.
        device: where training runs.
        checkpoint_every_s: seconds between two checkpoints.

    Raises:
        OptionError: a value out of its range.
    """

    decisive: ClassVar[frozenset[str]] = frozenset(
        {"tied", "place_decay", "optimizer", "positions_per_step", "window", "seed"}
    )
    """Fields that decide the heads, beside the text, whose hash counts, and the schedule."""

    tied: bool = True
    tokens: int = 400_000
    prompt_tokens: int = 64
    writing: SelfTextConfig = field(default_factory=SelfTextConfig)
    tree_prompts: int = 64
    test_prompts: int = 32
    place_decay: float = 0.8
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(0.01, 0.01))
    epochs: float = 2.5
    steps: int | None = None
    decay_share: float = 0.7
    positions_per_step: int = 2048
    window: int = 8
    evaluate_every: int = 50
    evaluated_positions: int = 2000
    start_from: Path | None = None
    seed: int = 0
    device: str = "cpu"
    checkpoint_every_s: float = CHECKPOINT_EVERY_S

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded or written."""
        for name in _POSITIVE:
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        if self.steps is not None:
            check_whole("steps", self.steps, 1)
        if not 0.0 < self.epochs < math.inf:
            raise OptionError(f"must be a number above 0, got {self.epochs}", field="epochs")
        check_share("decay_share", self.decay_share)
        if not 0.0 < self.place_decay <= 1.0:
            raise OptionError(f"must lie in (0, 1], got {self.place_decay}", field="place_decay")

    @property
    def law_bytes(self) -> int:
        """What is kept on disk of each token's distribution, beside its vector."""
        return 0

    @property
    def prompts(self) -> PromptCounts:
        """How many prompts of each side are cut from the data."""
        wanted = math.ceil(self.tokens / self.writing.answer_tokens)
        return PromptCounts(wanted, self.tree_prompts, self.test_prompts)

    @property
    def windows_per_step(self) -> int:
        """Windows of one update."""
        return max(1, self.positions_per_step // self.window)

    def schedule(self, windows: int) -> WarmupStableDecay:
        """Of a training on so many windows."""
        steps = self.steps or max(1, math.ceil(self.epochs * windows / self.windows_per_step))
        return schedule_of(steps, self.decay_share)


def schedule_of(steps: int, decay_share: float) -> WarmupStableDecay:
    """A short warm-up, a constant stretch, and a decay over a share of the steps."""
    decay = min(steps - 1, round(steps * decay_share))
    return WarmupStableDecay(min(_WARMUP_STEPS, steps - decay), steps - decay, decay)


_POSITIVE = (
    "tokens", "prompt_tokens", "tree_prompts", "test_prompts", "positions_per_step", "window", "evaluate_every",
    "evaluated_positions",
)  # fmt: skip


def check_share(name: str, value: float) -> None:
    """Refuse what does not lie in [0, 1].

    Raises:
        OptionError: names it.
    """
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"must lie in [0, 1], got {value}", field=name)
