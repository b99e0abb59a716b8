"""Modules of a drafter that can learn, and how answers train and test them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.training.losses import DistillationLoss
from truedraft.training.online.traffic import Answered, Score
from truedraft.training.targets import TargetRows, computed_rows
from truedraft.training.texts.self_distillation import CollatedBatch

ModuleT = TypeVar("ModuleT", bound=nn.Module)
PLACES = 32
"""Places of an answer that are replayed."""


class Learnable(ABC, Generic[ModuleT]):
    """How the modules of one drafter, all on the CPU, learn.

    Attributes:
        origin: the original module, in the dtype in which it is served.
        plural: the name of such modules in messages.
        answers: number of answers in a training step, each with a span of tokens.
        least: least tokens of an answer to learn from.

    Raises CompositionError if these cannot learn, UnsupportedModelError if the target cannot be learned from.
    """

    origin: ModuleT
    plural: str
    kind: str
    layers: tuple[int, ...] = ()
    reads_prompts: ClassVar[bool] = True
    answers: ClassVar[int]
    least: int
    for_tenants: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, drafter: Any, target: LanguageModel, lm_head: LmHead) -> None: ...

    @classmethod
    @abstractmethod
    def takes(cls, drafter: Drafter) -> bool: ...

    @abstractmethod
    def learn(
        self, shadow: ModuleT, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        """Add the gradient of a step to `shadow`; returns the number of learned positions."""

    @abstractmethod
    def replayed(self, modules: Sequence[ModuleT], answer: Answered) -> list[Score]:
        """Scores of each module's greedy chains along an answer, from each of its first places.

        Guesses read only the answer's tokens, because a chain is kept as far as it agrees with the answer.
        """

    @abstractmethod
    def change(self, module: ModuleT) -> Callable[[], None]:
        """A function that switches the drafter to a module, to be called between two steps."""

    @abstractmethod
    def save(self, module: ModuleT, folder: Path) -> None:
        """Write a folder for `--drafter`; ModelError if that fails."""

    @abstractmethod
    def load(self, folder: Path) -> ModuleT:
        """A saved module in its served dtype; ModelError if damaged, CompositionError if for another target."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.origin.parameters()).dtype


def in_dtype(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """The module with its weights in a dtype; other tensors, such as rotation angles, stay exact."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module


def agrees(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the argmax of each row of logits `[rows, ids]`, the lowest of equal ids, is its label; -1 never is."""
    largest = logits.amax(-1)
    found = (logits.gather(1, labels.clamp_min(0)[:, None])[:, 0] == largest) & (labels >= 0)
    tied = logits[found] == largest[found, None]  # of few rows, because these passes cost as much as the product
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[found, None]
    found[found.clone()] = ~(tied & lower).any(-1)
    return found


def scored(kept: Tensor) -> Score:
    """The score of an answer, from the number of kept guesses at each place, for chains after the target's token.

    Worked example: after token 0 two guesses of three agree, so tokens 1 and 2 are kept and the call gives token 3.
    """
    counts, at, calls = kept.tolist(), 0, 0
    while at < len(counts):
        at, calls = at + 1 + counts[at], calls + 1
    return Score(len(counts), calls, sum(counts))


@dataclass(frozen=True)
class Narrowed:
    """The target's distributions at rows of a batch, and an LM head, over only some ids of the vocabulary.

    For a large vocabulary a step over all ids costs many times as much, for almost the same gradient: the target's mass
    is on few ids. `place`, `[vocab]`, is the index of each id among these; arbitrary for other ids.
    """

    lm_head: LmHead
    loss: DistillationLoss
    place: Tensor | None

    @classmethod
    def of(cls, lm_head: LmHead, loss: DistillationLoss, ids: Tensor | None) -> Narrowed:
        if ids is None:
            return cls(lm_head, loss, None)
        bias = None if lm_head.bias is None else lm_head.bias[ids]
        place = torch.zeros(len(lm_head.weight), dtype=torch.int64)
        place[ids] = torch.arange(len(ids))
        return cls(LmHead(lm_head.weight[ids], bias, lm_head.finish, lm_head.embedding), loss, place)

    def rows(self, batch: CollatedBatch, rows: slice) -> TargetRows:
        labels = batch.tokens[rows] if self.place is None else self.place[batch.tokens[rows]]
        return computed_rows(labels, lambda: self.lm_head(batch.hidden[rows]), self.loss)
