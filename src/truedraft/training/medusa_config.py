"""What decides the training of Medusa heads, but for the target and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from truedraft.errors import OptionError
from truedraft.training.optimizer import OptimizerConfig
from truedraft.training.prompts import PromptCounts
from truedraft.training.schedule import WarmupStableDecay
from truedraft.training.self_writing import SelfTextConfig

_WARMUP_STEPS = 20


@dataclass(frozen=True)
class JointConfig:
    """Stage 2: heads and target are trained together (Medusa-2, 2401.10774, section 2.2.2).

    The target keeps its own loss, the divergence KL(p0 || p) from its law before training, as that paper does for
    self-distilled text (section 2.3.2): a cross-entropy of its own answers would only sharpen it.

    Attributes:
        steps: updates.
        tokens_per_step: of one update.
        length: tokens of a sequence.
        heads: rates of the heads.
        backbone: rates of the target, smaller.
        heads_share: weight of the heads' loss beside the target's own, lambda_0 of the paper.
        decay_share: of the steps, at the end, in which the rates decay.
        lora_rank: rank of LoRA adapters, which are merged when the target is saved; 0 trains all weights; None decides
            by the number of weights.
    """

    steps: int = 300
    tokens_per_step: int = 4096
    length: int = 256
    heads: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-3, 5e-3))
    backbone: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-4, 5e-4, matrix_weight_decay=0.0))
    heads_share: float = 0.2
    decay_share: float = 0.3
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("steps", "tokens_per_step", "length"):
            _check_whole(f"joint.{name}", getattr(self, name), 1)
        if not 0.0 < self.heads_share < math.inf:
            raise OptionError(f"joint.heads_share must be a number above 0, got {self.heads_share}")
        _check_share("joint.decay_share", self.decay_share)
        if self.lora_rank is not None:
            _check_whole("joint.lora_rank", self.lora_rank, 0)


@dataclass(frozen=True)
class MedusaTrainingConfig:
    """All numbers of a training of Medusa heads.

    Attributes:
        heads: how many tokens after the next are guessed.
        layers: residual blocks of a head.
        tied: whether heads end in the target's own LM head.
        reads_token: whether heads also read the token that was drawn from their vector, see `MedusaConfig`.
        stage: 1 trains the heads of a frozen target; 2 trains both, after the heads were warmed up so.
        tokens: about how many tokens the target writes to train on.
        prompt_tokens: of a prompt.
        writing: how the target writes.
        tree_prompts: held-out prompts whose answers the trees are counted on.
        test_prompts: held-out prompts that acceptance is measured on.
        law_share: how much of the loss is the target's law at a place, and how much its token; see `HeadLoss`.
        head_decay: by how much each head counts less than the one before; see `HeadLoss`.
        optimizer: peak rates and decays.
        epochs: passes over what the target wrote; fractions are possible.
        steps: updates; None counts them by `epochs`.
        decay_share: of the steps, at the end, in which the rate decays.
        positions_per_step: positions of one update, about.
        window: neighbouring positions that are read together; they share laws, but say less than scattered ones.
        evaluate_every: steps between two measurements on held-out answers.
        evaluated_positions: of such a measurement, about.
        start_from: a folder with heads for this target, to begin with, or in stage 2 in place of a first stage.
        joint: what decides stage 2.
        seed: of the order of the data, and of what the target writes.
        device: where training runs.
        checkpoint_every: steps between two checkpoints.

    Raises:
        OptionError: a value out of its range.
    """

    heads: int = 4
    layers: int = 1
    tied: bool = True
    reads_token: bool = True
    stage: int = 1
    tokens: int = 400_000
    prompt_tokens: int = 64
    writing: SelfTextConfig = field(default_factory=SelfTextConfig)
    tree_prompts: int = 64
    test_prompts: int = 32
    law_share: float = 1.0
    head_decay: float = 0.8
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(0.01, 0.01))
    epochs: float = 2.5
    steps: int | None = None
    decay_share: float = 0.7
    positions_per_step: int = 2048
    window: int = 8
    evaluate_every: int = 50
    evaluated_positions: int = 2000
    start_from: Path | None = None
    joint: JointConfig = field(default_factory=JointConfig)
    seed: int = 0
    device: str = "cpu"
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded or written."""
        for name in _POSITIVE:
            _check_whole(name, getattr(self, name), 1)
        _check_whole("seed", self.seed, 0)
        if self.steps is not None:
            _check_whole("steps", self.steps, 1)
        if self.stage not in (1, 2):
            raise OptionError(f"stage must be 1 (heads alone) or 2 (heads and target), got {self.stage}")
        if not 0.0 < self.epochs < math.inf:
            raise OptionError(f"epochs must be a number above 0, got {self.epochs}")
        _check_share("law_share", self.law_share)
        _check_share("decay_share", self.decay_share)
        if not 0.0 < self.head_decay <= 1.0:
            raise OptionError(f"head_decay must lie in (0, 1], got {self.head_decay}")

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
    "heads", "layers", "tokens", "prompt_tokens", "tree_prompts", "test_prompts", "positions_per_step", "window",
    "evaluate_every", "evaluated_positions", "checkpoint_every",
)  # fmt: skip


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be a whole number of {least} or more, got {value!r}")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{name} must lie in [0, 1], got {value}")
