"""What decides a training of heads, and what a kind of heads brings to it."""

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
            check_whole(f"joint.{name}", getattr(self, name), 1)
        check_positive("joint.heads_share", self.heads_share)
        check_share("joint.decay_share", self.decay_share)
        if self.lora_rank is not None:
            check_whole("joint.lora_rank", self.lora_rank, 0)


@dataclass(frozen=True)
class Calibrated:
    """What held-out text says about trained heads, and what is to be measured of them.

    Attributes:
        facts: that are kept with the heads, for JSON: what their drafter is sized and calibrated by among them.
        trees: trees of ranks that are kept with them.
        rounds: what the engine is to measure.
    """

    facts: Mapping[str, Any]
    rounds: Sequence[EngineRound]
    trees: Mapping[str, RankTree] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTrainingConfig(HeadSizeOptions, TextOptions, HeadRunOptions, ABC):
    """A training of heads: numbers that all kinds have in common, and what each kind says for itself.

    A kind of heads is a module (`head`), the sizes of it, a loss towards the target's distributions, and how trained
    heads are calibrated and drafted with; all else is the same for all.

    Attributes:
        writing: how the target writes.
        tree_prompts: held-out prompts whose answers trees are counted on, and accuracy is measured on.
        test_prompts: held-out prompts that acceptance is measured on.
        decay_share: of the steps, at the end, in which the rate decays.
        positions_per_step: positions of one update, about.
        window: neighbouring positions that are read together; they share distributions, but say less than scattered
            ones.
        evaluate_every: steps between two measurements on held-out answers.
        evaluated_positions: of such a measurement, about.
        device: where training runs.
        checkpoint_every_s: seconds between two checkpoints.
        stage: 1 trains the heads of a frozen target; 2 trains both, after the heads were warmed up so; then
            `start_from` takes the place of a first stage.
        joint: what decides stage 2.

    Raises:
        OptionError: a value out of its range.
    """

    head: ClassVar[type[Head]]
    """The module that is trained."""
    decisive: ClassVar[frozenset[str]] = frozenset(
        {"tied", "place_decay", "optimizer", "schedule", "positions_per_step", "window", "seed"}
    )
    """Fields that decide the heads, beside the text, whose hash counts, and the schedule."""

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
        """A training as it was typed.

        Args:
            common: values of the fields that all kinds have, and of those of this kind's sizes and learning.
            more: options of this kind alone, as `Trains.more` has them.

        Raises:
            OptionError: a value out of its range.
        """
        return cls(**common)

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        """What came of a training, for people: sentences, and tables, whose first row is their heading."""
        yield from ()

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded or written."""
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
        """Of heads for a target.

        Raises:
            OptionError: they make no head.
        """

    @property
    @abstractmethod
    def distillation_loss(self) -> DistillationLoss:
        """What each place learns by."""

    @abstractmethod
    def calibrate(
        self,
        head: Any,
        lm_head: LmHead,
        target: LanguageModel,
        text: SelfDistillationData,
        on_progress: Callable[[str, int, int], None],
    ) -> Calibrated:
        """Fit what drafting with trained heads needs to held-out text, and say what is to be measured of them.

        Args:
            head: trained, in evaluation mode, as it is saved.
            lm_head: of the target.
            target: as the engine runs it.
            text: written by the target at both of `TREE_TEMPERATURES`, used for nothing else.
            on_progress: called with what is being done, how much of it is done, and how much there is.
        """

    @property
    def optimizer(self) -> OptimizerConfig:
        """Peak rates and decays."""
        return OptimizerConfig(self.learning_rate, self.learning_rate)

    def identity(self, schedule: WarmupStableDecay, decisive: Collection[str], **more: str) -> Identity:
        """What decides the heads: fields, rates and schedule under dotted names, and hashes of what else does.

        Args:
            schedule: of the training; its lengths may differ until a decay begins.
            decisive: names of fields.
            more: hashes.
        """
        parts = {"optimizer": self.optimizer, "schedule": schedule}
        numbers = dict(identity_of(self))
        for part, values in parts.items():
            numbers |= {f"{part}.{name}": value for name, value in identity_of(values).items()}
        return {name: value for name, value in numbers.items() if name.split(".")[0] in decisive} | more

    @property
    def bytes_per_token(self) -> int:
        """What is kept on disk of each token's distribution, beside its vector."""
        return 0

    def feed(self, head: Any, lm_head: LmHead) -> Feed:
        """Which tokens heads read: by default the text's."""
        del lm_head
        return lambda batch, hidden: text_tokens(batch, head.reach)

    def target(
        self, lm_head: LmHead, text: SelfDistillationData, folder: Path, on_progress: Callable[[str, int, int], None]
    ) -> DistillationTarget:
        """What is learned from a text in a folder: by default the target's distributions, computed when needed."""
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
            lm_head: of the target.
            target: an embedded name, a folder, or a hub name.
            texts: answers to train on, and held-out ones that accuracy is measured on.
            fingerprint: of the target.
            folder: for checkpoint, log and record.
            on_progress: called with what is being done, how much of it is done, and how much there is.
        """
        del target
        learned = self.target(lm_head, texts[0], folder, on_progress)
        return head_loop(self, head, lm_head, learned, texts, fingerprint, folder)

    def new_head(self, lm_head: LmHead) -> Head:
        """A head that nothing has taught yet, in float32 on the configured device.

        It starts as the target's LM head where it can; other weights are drawn by the seed.
        """
        vocab, width = lm_head.weight.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = self.head(self.sizes(width, vocab))
        head.start_from(lm_head.weight.float().cpu())
        return head.to(self.device)

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
        return WarmupStableDecay.of(steps, self.decay_share)


_POSITIVE = (
    "tokens", "prompt_tokens", "tree_prompts", "test_prompts", "positions_per_step", "window", "evaluate_every",
    "evaluated_positions",
)  # fmt: skip
