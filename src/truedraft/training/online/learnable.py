"""What learns: modules of one shape that a drafter drafts with, and how answers teach and try them."""

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

    Args:
        drafter: that drafts with them.
        target: that it drafts for.
        lm_head: of the target.

    Attributes:
        origin: the module that it drafts with at first, in the dtype in which it does.
        plural: what messages call such modules.
        kind: in files that name what lies beside them.
        layers: numbers of the target's layers that are read.
        reads_prompts: whether prompts are read.
        answers: how many a step of training takes; of each a stretch.
        least: tokens of an answer that teaches something.
        for_tenants: whether each tenant may have modules of its own.

    Raises:
        CompositionError: these cannot learn; says why.
        UnsupportedModelError: likewise.
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
        """Whether this is how what a drafter drafts with learns."""

    @abstractmethod
    def learn(
        self, shadow: ModuleT, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        """Add the gradient of a step.

        Args:
            shadow: in training, in float32.
            chosen: answers, of each of which a stretch is learned.
            known: all that are kept to train on.
            chance: chooses the stretches.

        Returns:
            How many positions were learned.
        """

    @abstractmethod
    def replayed(self, modules: Sequence[ModuleT], answer: Answered) -> list[Score]:
        """What chains of each module's best guesses along an answer come to, from each of its first places.

        A chain is kept as far as it agrees with the answer, at every temperature, so what a guess reads is the answer.
        """

    @abstractmethod
    def change(self, module: ModuleT) -> Callable[[], None]:
        """What lets the drafter draft with a module, to be done between two steps."""

    @abstractmethod
    def save(self, module: ModuleT, folder: Path) -> None:
        """Write a folder that `--drafter` takes.

        Raises:
            ModelError: it cannot be written.
        """

    @abstractmethod
    def load(self, folder: Path) -> ModuleT:
        """A module that was saved, in the dtype in which it is served.

        Raises:
            ModelError: the folder is damaged, or holds something else.
            CompositionError: it is for another target.
        """

    @property
    def dtype(self) -> torch.dtype:
        """In which a module is served."""
        return next(self.origin.parameters()).dtype


def in_dtype(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """The same module with its weights in a dtype; what else it holds, as the angles of a rotation, stays exact."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module
