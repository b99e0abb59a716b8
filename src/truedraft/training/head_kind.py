"""A kind of heads, as the training sees it: how they are made, taught, judged and saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.head_job import HeadJob
    from truedraft.training.head_loop import Course
    from truedraft.training.medusa_results import Effort
    from truedraft.training.self_text import SelfText
    from truedraft.training.trainee import Trainee

Student = TypeVar("Student", bound="Trainee")
Judged = TypeVar("Judged", covariant=True)


@dataclass(frozen=True)
class LoadedHeads:
    """Heads from a folder.

    Attributes:
        module: the heads.
        config: their sizes, which two of the same sizes have equal.
        target_name: what their target was called.
        fingerprint: of that target; None where the file does not say.
    """

    module: nn.Module
    config: object
    target_name: str
    fingerprint: str | None


@dataclass(frozen=True)
class Trained:
    """What heads are judged and saved with.

    Attributes:
        job: names the prompts of the test.
        target: whose heads they are: a name, or a folder.
        fingerprint: of the target.
        held_out: what the target wrote to choose trees on.
        out: the folder where they are saved.
        effort: what it took, which is saved too.
    """

    job: HeadJob[Any]
    target: str
    fingerprint: str
    held_out: SelfText
    out: Path
    effort: Effort


class HeadKind(Protocol[Student, Judged]):
    """One kind of heads, with what is trained of it and what it is judged by."""

    def new(self, lm_head: LmHead) -> Student:
        """Heads that nothing has taught yet, in float32 on the configured device."""

    def load(self, folder: Path) -> LoadedHeads:
        """Heads to start from.

        Raises:
            ModelError: they cannot be read.
        """

    def course(self, trainee: Student, text: SelfText, job: HeadJob[Any], folder: Path) -> Course:
        """How heads are taught.

        Args:
            trainee: made by `new`.
            text: what the target wrote.
            job: is told of what takes long.
            folder: where the text lies.
        """

    def judge(self, trainee: Student, trained: Trained) -> Judged:
        """Save trained heads, and measure them in the engine that serves."""
