"""Training heads on a frozen target's vectors, as Medusa-1 (2401.10774, 2.2.1) and ReDrafter (2403.09919)."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.core.top_k import stable_topk
from truedraft.drafters.heads.head import Head, HeadConfig, VectorHead
from truedraft.errors import DataError, OptionError
from truedraft.models.base import LanguageModel
from truedraft.models.checkpoint import weights_hash
from truedraft.models.lm_head import LmHead
from truedraft.options import check_positive, check_share, check_whole
from truedraft.training.evaluate import EngineRound
from truedraft.training.loop import (
    CHECKPOINT_EVERY_S,
    Identity,
    Objective,
    Phase,
    RunFolder,
    Sampler,
    TrainingLoop,
    identity_of,
)
from truedraft.training.losses import (
    DistillationLoss,
    DistillationTarget,
    TargetRows,
    computed_target,
    gradient_in_chunks,
)
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig, WarmupStableDecay
from truedraft.training.options import HeadRunOptions, HeadSizeOptions, TextOptions
from truedraft.training.report import HeadResult, Rows
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.prompts import PromptCounts
from truedraft.training.texts.self_distillation import (
    CollatedBatch,
    SelfDistillationData,
    WindowSampler,
    collate,
    text_tokens,
)

Feed: TypeAlias = Callable[[CollatedBatch, Tensor], Tensor]
"""Chooses the tokens that heads read, `[positions, reach]`, from a batch and its vectors `[positions, width]`."""
OnWork: TypeAlias = Callable[[str, int, int], None]  # called with a kind of work, and how much of how much is done
Split: TypeAlias = tuple[SelfDistillationData, SelfDistillationData]  # texts for training, and held-out ones
_TOP = 5
_POSITIONS = 1024  # of a measurement at once, about
_ROWS = 256  # of a measurement with logits held at once


@dataclass(frozen=True)
class JointConfig:
    """Stage 2: heads and target are trained together (Medusa-2, 2401.10774, section 2.2.2).

    The target keeps its own loss, KL(p0 || p) from its distribution before training (section 2.3.2): a cross-entropy of
    its own answers would only sharpen it.
    """

    steps: int = 300
    tokens_per_step: int = 4096
    length: int = 256  # tokens of a sequence
    heads: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-3, 5e-3))
    backbone: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-4, 5e-4, matrix_weight_decay=0.0))
    heads_share: float = 0.2  # weight of the heads' loss relative to the target's own, lambda_0 of the paper
    decay_share: float = 0.3  # of the steps, at the end, in which the rates decay
    lora_rank: int | None = None  # of adapters, merged when saved; 0 trains all weights; None decides by their number

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "length"):
            check_whole(f"joint.{name}", getattr(self, name), 1)
        check_positive("joint.heads_share", self.heads_share)
        check_share("joint.decay_share", self.decay_share)
        if self.lora_rank is not None:
            check_whole("joint.lora_rank", self.lora_rank, 0)


@dataclass(frozen=True)
class Calibrated:
    """Calibrated heads and the rounds to measure; `facts` (JSON) and `trees` are saved with the heads."""

    facts: Mapping[str, Any]
    rounds: Sequence[EngineRound]
    trees: Mapping[str, RankTree] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTrainingConfig(HeadSizeOptions, TextOptions, HeadRunOptions, ABC):
    """A training of heads: values that all kinds have in common, and hooks for each kind.

    Stage 1 trains the heads of a frozen target; 2 trains both, after a first stage or from the heads `start_from`.
    Raises OptionError for a value out of its range.
    """

    head: ClassVar[type[Head]]
    decisive: ClassVar[frozenset[str]] = frozenset(
        {"tied", "place_decay", "optimizer", "schedule", "positions_per_step", "window", "seed"}
    )
    """Fields that decide the heads, in addition to the text, which is hashed, and the schedule."""

    writing: WritingConfig = field(default_factory=WritingConfig)
    tree_prompts: int = 64  # held-out prompts with answers for counting trees and measuring accuracy
    test_prompts: int = 32  # held-out prompts for measuring acceptance
    decay_share: float = 0.7  # of the steps, at the end, in which the rate decays
    positions_per_step: int = 2048  # approximate
    window: int = 8  # neighbouring positions read together; sharing distributions, they are less informative
    evaluate_every: int = 50  # steps between two measurements on held-out answers
    evaluated_positions: int = 2000  # approximate, of such a measurement
    device: str = "cpu"
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    stage: int = 1
    joint: JointConfig = field(default_factory=JointConfig)

    @classmethod
    def from_options(cls, common: Mapping[str, Any], more: Any = None) -> Self:
        """A training from values of all kinds' fields and `Trains.more`; OptionError out of a range."""
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
        """The sizes of heads for a target; OptionError if they are invalid."""

    @property
    @abstractmethod
    def distillation_loss(self) -> DistillationLoss: ...

    @abstractmethod
    def calibrate(
        self, head: Any, lm_head: LmHead, target: LanguageModel, text: SelfDistillationData, on_progress: OnWork
    ) -> Calibrated:
        """Calibrate trained heads on held-out text, written at both of `TREE_TEMPERATURES`."""

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(self.learning_rate, self.learning_rate)

    def optimizer_of(self, head: Any) -> MixedOptimizer:
        return heads_optimizer(head, self.optimizer)

    def identity(self, schedule: WarmupStableDecay, decisive: Collection[str], **more: str) -> Identity:
        """What decides the heads; the lengths of the schedule may differ until a decay begins."""
        numbers = identity_of(self, optimizer=self.optimizer, schedule=schedule)
        return {name: value for name, value in numbers.items() if name.split(".")[0] in decisive} | more

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of each token's distribution, in addition to its vector."""
        return 0

    def feed(self, head: Any, lm_head: LmHead) -> Feed:
        """Chooses the tokens that heads read: by default the text's."""
        return lambda batch, hidden: text_tokens(batch, head.reach)

    def target(
        self, lm_head: LmHead, text: SelfDistillationData, folder: Path, on_progress: OnWork
    ) -> DistillationTarget:
        """By default the target's distributions, computed when needed."""
        return computed_target(lm_head, self.distillation_loss)

    def loop(
        self, head: Any, lm_head: LmHead, target: str, texts: Split, fingerprint: str, folder: Path, on_progress: OnWork
    ) -> TrainingLoop:
        """The loop that trains heads, by default on stored vectors.

        Raises DataError for answers shorter than the heads reach, OptionError for a folder with another training.
        """
        text, held_out = texts
        learned = self.target(lm_head, text, folder, on_progress)
        sampler = WindowSampler(text, head.reach, self.window, self.seed)
        loss = HeadLoss(head, lm_head, self.distillation_loss, self.place_decay)
        collated = functools.partial(collate, text, reach=head.reach)
        objective = HeadsObjective(loss, collated, self.feed(head, lm_head), learned)
        accuracy = HeldOutAccuracy.on(head, lm_head, held_out, self.evaluated_positions)
        schedule, count = self.schedule(len(sampler.windows)), self.windows_per_step
        return self.loop_of(head, objective, sampler, count, schedule, text, fingerprint, folder, accuracy)

    def loop_of(
        self,
        head: Any,
        objective: Objective,
        sampler: Sampler,
        count: int,
        schedule: WarmupStableDecay,
        text: SelfDistillationData,
        fingerprint: str,
        folder: Path,
        accuracy: Callable[[], Mapping[str, float]],
    ) -> TrainingLoop:
        more = {"target": fingerprint, "text_sha256": hashlib.sha256(text.tokens.tobytes()).hexdigest()}
        if self.start_from is not None:
            more["start_from"] = weights_hash(head)
        run = RunFolder(folder, self.identity(schedule, self.decisive, **more), self.device, self.checkpoint_every_s)
        phases = [Phase(schedule.total_steps, sampler, count, count)]
        optimizer, every = self.optimizer_of(head), self.evaluate_every
        return TrainingLoop(head, optimizer, objective, phases, schedule, run, accuracy, every)

    def new_head(self, lm_head: LmHead) -> Head:
        """A float32 head that starts as the target's LM head where it can, else initialised by the seed."""
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


def heads_optimizer(head: VectorHead, config: OptimizerConfig) -> MixedOptimizer:
    """Muon for matrices, AdamW for biases and the heads' own outputs."""
    return MixedOptimizer(head, config, [output.weight for output in head.outputs if output is not None])


@dataclass(frozen=True)
class HeadLoss:
    """sum_k decay^k loss_k, with loss_k the mean over positions at place k (from 0), the k + 2nd token after a vector.

    Medusa 2401.10774, section 2.2.1, has lambda_k = 0.8^k.
    """

    head: VectorHead
    lm_head: LmHead
    loss: DistillationLoss
    decay: float

    def gradient(
        self,
        vectors: Tensor,
        places: Tensor,
        target_at: Callable[[slice], TargetRows],
        scale: float,
        of: int | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The gradient of `scale` times the loss in `vectors`; gradients of the heads' own outputs are added to theirs.

        Args:
            vectors: `[reach, positions, exit_width]`.
            places: `[positions]`, ascending rows; place k is about row `place + 1 + k`.
            of: number of positions for the mean, where `places` are only a part of them.

        Returns:
            The gradient, as `vectors`; and for the log the loss and the mean loss at each place, in nats.
        """
        reach, rows = self.head.reach, places.tolist()
        weights = [self.decay**place for place in range(reach)]
        count = len(rows) if of is None else of
        sums = torch.zeros(reach, device=vectors.device)

        def losses(some: list[Tensor], here: slice) -> Iterator[Tensor]:
            first, last = rows[here][0] + 1, rows[here][-1] + 1
            with torch.no_grad():
                target = target_at(slice(first, last + reach))  # neighbours share rows
            for place, weight in enumerate(weights):
                logits = self.head.place_logits(place, some[place], self.lm_head)  # [some positions, vocab]
                loss = target.losses(logits, places[here] + 1 + place - first, self.loss).sum()
                sums[place] += loss.detach()
                yield loss * (weight * scale / count)

        gradient = gradient_in_chunks(vectors, losses)
        means = (sums / count).tolist()
        total = sum(weight * loss for weight, loss in zip(weights, means, strict=True))
        word = self.head.place_word
        return gradient, {"loss": total} | {f"{word}_{place}": loss for place, loss in enumerate(means, start=1)}


@dataclass(frozen=True)
class HeadsObjective:
    """Trains heads on a frozen target's vectors; `collated` maps windows of its answers to the rows of a batch."""

    loss: HeadLoss
    collated: Callable[[Tensor], CollatedBatch]
    feed: Feed
    target: DistillationTarget

    def accumulate(self, batch: Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        rows = self.collated(batch)  # all windows, because feeding draws for all of them
        hidden = rows.hidden[rows.places].float()  # [positions, width]
        with torch.no_grad():
            tokens = self.feed(rows, hidden)
        first, last = (None, None) if own is None else (int(batch[:at, 1].sum()) for at in (own.start, own.stop))
        hidden, tokens, places = (each[first:last] for each in (hidden, tokens, rows.places))
        embedded = self.loss.lm_head.embed(tokens.T)
        vectors = self.loss.head.unroll(hidden, embedded)  # [reach, positions, exit_width]
        gradient, values = self.loss.gradient(
            vectors, places, lambda some: self.target(rows, some), scale, len(rows.places)
        )
        vectors.backward(gradient)
        return values


@dataclass(frozen=True)
class HeldOutAccuracy:
    """Accuracy of each place on whole held-out answers, with the text's tokens at the places before it.

    `windows`, int64 `[answers, 2]`, are first rows and numbers of positions with a drafted token at every place.
    """

    head: VectorHead
    lm_head: LmHead
    text: SelfDistillationData
    windows: NDArray[np.int64]

    @classmethod
    def on(cls, head: VectorHead, lm_head: LmHead, text: SelfDistillationData, positions: int) -> HeldOutAccuracy:
        """On answers of about `positions` tokens, evenly over the text; DataError if none is long enough."""
        reach = head.reach
        spans = zip(text.records, itertools.pairwise(text.starts), strict=True)
        by_temperature = sorted(spans, key=lambda span: span[0].temperature)
        found = [(first, end - first - 1 - reach) for _, (first, end) in by_temperature if end - first > reach + 1]
        if not found:
            raise DataError(
                f"the target's answers to the held-out prompts have all fewer than the {reach + 2} tokens that heads "
                f"which reach {reach} tokens ahead are measured on: let it write more, or let them reach less far"
            )
        every = max(1, sum(count + reach for _, count in found) // positions)
        return cls(head, lm_head, text, np.array(found[::every], dtype=np.int64))

    @torch.no_grad()
    def __call__(self) -> Mapping[str, float]:
        """`WORD_K_top_1` and `WORD_K_top_5` of each place, K from 1: fractions of positions."""
        head, lm_head = self.head, self.lm_head
        hits = torch.zeros(head.reach, 2, dtype=torch.float64)
        top = min(_TOP, lm_head.weight.shape[0])
        for batch in self._batches():
            hidden = batch.hidden[batch.places].to(next(head.parameters()).dtype)
            vectors = head.unroll(hidden, lm_head.embed(text_tokens(batch, head.reach).T))
            for place in range(head.reach):
                labels = batch.tokens[batch.places + 1 + place]
                for some, some_labels in zip(vectors[place].split(_ROWS), labels.split(_ROWS), strict=True):
                    hits[place] += _hits(head.place_logits(place, some, lm_head), some_labels, top)
        shares = (hits / int(self.windows[:, 1].sum())).tolist()
        return {
            f"{head.place_word}_{place}_top_{count}": share
            for place, of_place in enumerate(shares, start=1)
            for count, share in zip((1, _TOP), of_place, strict=True)
        }

    def _batches(self) -> Iterator[CollatedBatch]:
        device = next(self.head.parameters()).device
        number = np.cumsum(self.windows[:, 1]) // _POSITIONS
        for which in np.unique(number):
            yield collate(self.text, torch.from_numpy(self.windows[number == which]).to(device), self.head.reach)


def _hits(logits: Tensor, labels: Tensor, top: int) -> Tensor:
    same = stable_topk(logits, top) == labels[:, None]
    return torch.stack([same[:, 0].sum(), same.sum()]).cpu()
