"""The configuration of a training of heads, and the parts that each kind of heads defines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import Head, HeadConfig
from truedraft.errors import OptionError
from truedraft.options import check_positive, check_share, check_whole
from truedraft.training.head_objective import head_loop
from truedraft.training.loop import CHECKPOINT_EVERY_S, Identity, TrainingLoop, identity_of
from truedraft.training.losses import DistillationLoss
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.options import HeadRunOptions, HeadSizeOptions, TextOptions
from truedraft.training.targets import ComputedTarget, DistillationTarget
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.prompts import PromptCounts
from truedraft.training.texts.self_distillation import SelfDistillationData, text_tokens

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.models.lm_head import LmHead
    from truedraft.training.evaluate import EngineRound
    from truedraft.training.head_objective import Feed
    from truedraft.training.report import HeadResult, Rows


@dataclass(frozen=True)
class JointConfig:
    """Stage 2: heads and target are trained together (Medusa-2, 2401.10774, section 2.2.2).

    The target keeps its own loss, the divergence KL(p0 || p) from its distribution before training, as that paper does
    for self-distilled text (section 2.3.2): a cross-entropy of its own answers would only sharpen it.

    Attributes:
        length: tokens of a sequence.
        backbone: rates of the target, smaller.
        heads_share: weight of the heads' loss relative to the target's own, lambda_0 of the paper.
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
        for name in ("steps", "tokens_per_step", "length"):
            check_whole(f"joint.{name}", getattr(self, name), 1)
        check_positive("joint.heads_share", self.heads_share)
        check_share("joint.decay_share", self.decay_share)
        if self.lora_rank is not None:
            check_whole("joint.lora_rank", self.lora_rank, 0)


@dataclass(frozen=True)
class Calibrated:
    """The calibration of trained heads on held-out text, and the rounds to measure.

    Attributes:
        facts: saved with the heads, for JSON, including the sizes and calibration of their drafter.
        trees: trees of ranks, saved with the heads.
        rounds: to be measured in the engine.
    """

    facts: Mapping[str, Any]
    rounds: Sequence[EngineRound]
    trees: Mapping[str, RankTree] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTrainingConfig(HeadSizeOptions, TextOptions, HeadRunOptions, ABC):
    """A training of heads: values that all kinds have in common, and hooks for each kind.

    A kind of heads defines a module (`head`), its sizes, a loss towards the target's distributions, and how trained
    heads are calibrated and drafted with; all else is the same for all.

    Attributes:
        tree_prompts: held-out prompts with answers for counting trees and measuring accuracy.
        test_prompts: held-out prompts for measuring acceptance.
        decay_share: of the steps, at the end, in which the rate decays.
        positions_per_step: positions of one update, approximately.
        window: neighbouring positions that are read together; they share distributions, but carry less information than
            scattered ones.
        evaluate_every: steps between two measurements on held-out answers.
        evaluated_positions: of such a measurement, approximately.
        checkpoint_every_s: seconds between two checkpoints.
        stage: 1 trains the heads of a frozen target; 2 trains both, after a first stage or from the heads `start_from`.

    Raises:
        OptionError: a value out of its range.
    """

    head: ClassVar[type[Head]]
    decisive: ClassVar[frozenset[str]] = frozenset(
        {"tied", "place_decay", "optimizer", "schedule", "positions_per_step", "window", "seed"}
    )
    """Fields that decide the heads, in addition to the text, which is hashed, and the schedule."""

    writing: WritingConfig = field(default_factory=WritingConfig)
    tree_prompts: int = 64
    test_prompts: int = 32
    decay_share: float = 0.7
    positions_per_step: int = 2048
    window: int = 8
    evaluate_every: int = 50
    evaluated_positions: int = 2000
    device: str = "cpu"
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    stage: int = 1
    joint: JointConfig = field(default_factory=JointConfig)

    @classmethod
    def from_options(cls, common: Mapping[str, Any], more: Any = None) -> Self:
        """A training from command line options.

        Args:
            common: values of the fields that all kinds have, and of this kind's sizes and learning.
            more: further options of this kind, as in `Trains.more`.

        Raises:
            OptionError: a value out of its range.
        """
        return cls(**common)

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        """The result of a training for display: sentences, and tables with their heading as first row."""
        yield from ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        if self.steps is not None:
            check_whole("steps", self.steps, 1)
        check_positive("epochs", self.epochs)
        check_positive("learning_rate", self.learning_rate)
        check_share("decay_share", self.decay_share)
        if not 0.0 < self.place_decay <= 1.0:
            raise OptionError(f"must lie in (0, 1], got {self.place_decay}", field="place_decay")
        if self.stage not in (1, 2):
            raise OptionError(f"must be 1 (heads alone) or 2 (heads and target), got {self.stage}", field="stage")

    @abstractmethod
    def sizes(self, width: int, vocab_size: int) -> HeadConfig:
        """The sizes of heads for a target.

        Raises:
            OptionError: they are invalid.
        """

    @property
    @abstractmethod
    def distillation_loss(self) -> DistillationLoss:
        """The loss at each place."""

    @abstractmethod
    def calibrate(
        self,
        head: Any,
        lm_head: LmHead,
        target: LanguageModel,
        text: SelfDistillationData,
        on_progress: Callable[[str, int, int], None],
    ) -> Calibrated:
        """Calibrate trained heads on held-out text, and return the rounds to measure.

        Args:
            head: trained, in evaluation mode, as saved.
            text: written by the target at both of `TREE_TEMPERATURES`, used for nothing else.
            on_progress: called with the name of the work, the amount done, and the total.
        """

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(self.learning_rate, self.learning_rate)

    def identity(self, schedule: WarmupStableDecay, decisive: Collection[str], **more: str) -> Identity:
        """What decides the heads: fields, rates and schedule under dotted names, and further hashes.

        The lengths of the schedule may differ until a decay begins.
        """
        parts = {"optimizer": self.optimizer, "schedule": schedule}
        numbers = dict(identity_of(self))
        for part, values in parts.items():
            numbers |= {f"{part}.{name}": value for name, value in identity_of(values).items()}
        return {name: value for name, value in numbers.items() if name.split(".")[0] in decisive} | more

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of each token's distribution, in addition to its vector."""
        return 0

    def feed(self, head: Any, lm_head: LmHead) -> Feed:
        """Chooses the tokens that heads read: by default the text's."""
        del lm_head
        return lambda batch, hidden: text_tokens(batch, head.reach)

    def target(
        self, lm_head: LmHead, text: SelfDistillationData, folder: Path, on_progress: Callable[[str, int, int], None]
    ) -> DistillationTarget:
        """The targets for a text in a folder: by default the target's distributions, computed when needed."""
        del text, folder, on_progress
        return ComputedTarget(lm_head, self.distillation_loss)

    def loop(
        self,
        head: Any,
        lm_head: LmHead,
        target: str,
        texts: tuple[SelfDistillationData, SelfDistillationData],
        fingerprint: str,
        folder: Path,
        on_progress: Callable[[str, int, int], None],
    ) -> TrainingLoop:
        """The loop that trains heads, and resumes from the folder's checkpoint: by default on stored vectors.

        Args:
            head: as it begins, on the configured device.
            target: an embedded name, a folder, or a hub name.
            texts: answers for training, and held-out ones for measuring accuracy.
            on_progress: called with the name of the work, the amount done, and the total.
        """
        del target
        learned = self.target(lm_head, texts[0], folder, on_progress)
        return head_loop(self, head, lm_head, learned, texts, fingerprint, folder)

    def new_head(self, lm_head: LmHead) -> Head:
        """An untrained head, in float32 on the configured device.

        It starts as the target's LM head where it can; other weights are initialised by the seed.
        """
        vocab, width = lm_head.weight.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = self.head(self.sizes(width, vocab))
        head.start_from(lm_head.weight.float().cpu())
        return head.to(self.device)

    @property
    def prompts(self) -> PromptCounts:
        count = math.ceil(self.tokens / self.writing.answer_tokens)
        return PromptCounts(count, self.tree_prompts, self.test_prompts)

    @property
    def windows_per_step(self) -> int:
        return max(1, self.positions_per_step // self.window)

    def schedule(self, windows: int) -> WarmupStableDecay:
        steps = self.steps or max(1, math.ceil(self.epochs * windows / self.windows_per_step))
        return WarmupStableDecay.of(steps, self.decay_share)


_POSITIVE = (
    "tokens", "prompt_tokens", "tree_prompts", "test_prompts", "positions_per_step", "window", "evaluate_every",
    "evaluated_positions",
)  # fmt: skip
