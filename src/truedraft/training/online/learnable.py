"""Modules of a drafter that can learn, and how answers train and test them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.training.online.traffic import Answered, Score

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Learnable(ABC, Generic[ModuleT]):
    """How the modules of one drafter learn. All of them are on the CPU.

    Attributes:
        origin: the original module, in the dtype in which it is served.
        plural: the name of such modules in messages.
        kind: in the record files of saved modules.
        answers: number of answers in a training step, each with a span of tokens.
        least: least tokens of an answer to learn from.
        for_tenants: whether each tenant may have modules of its own.

    Raises:
        CompositionError: these cannot learn; says why.
        UnsupportedModelError: the target cannot be learned from; says why.
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
    def takes(cls, drafter: Drafter) -> bool:
        """Whether this class handles the modules of a drafter."""

    @abstractmethod
    def learn(
        self, shadow: ModuleT, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        """Add the gradient of a step.

        Args:
            shadow: in training, in float32.
            chosen: answers to learn a span of each.
            known: all answers kept for training.
            chance: chooses the spans.

        Returns:
            The number of learned positions.
        """

    @abstractmethod
    def replayed(self, modules: Sequence[ModuleT], answer: Answered) -> list[Score]:
        """Scores of each module's greedy chains along an answer, from each of its first places.

        A chain is kept as far as it agrees with the answer, at every temperature, so guesses read only the answer's
        tokens.
        """

    @abstractmethod
    def change(self, module: ModuleT) -> Callable[[], None]:
        """A function that switches the drafter to a module, to be called between two steps."""

    @abstractmethod
    def save(self, module: ModuleT, folder: Path) -> None:
        """Write a folder for `--drafter`.

        Raises:
            ModelError: it cannot be written.
        """

    @abstractmethod
    def load(self, folder: Path) -> ModuleT:
        """A saved module, in the dtype in which it is served.

        Raises:
            ModelError: the folder is damaged, or holds something else.
            CompositionError: it is for another target.
        """

    @property
    def dtype(self) -> torch.dtype:
        return next(self.origin.parameters()).dtype


def in_dtype(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """The module with its weights in a dtype; other tensors, such as rotation angles, stay exact."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module
