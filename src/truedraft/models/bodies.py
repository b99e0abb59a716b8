"""What runs a packed forward: the model's own modules, or a faster loop over the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan


class Body(ABC):
    """Computes a packed forward of one loaded model. One forward runs at a time.

    Attributes:
        fast_paths: what is switched on beyond the plain forward, in words, for reports.
        least_rows: plans are padded to this many tokens and rows, for kernels treat very short products differently
            and a row must not depend on how many share its forward (DESIGN section 2, row invariance).
    """

    fast_paths: tuple[str, ...]
    least_rows: int

    @abstractmethod
    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run the plan.

        Returns:
            Logits `[rows, ids]` of the plan's rows, padded ids of the embedding included, and the vectors
            `[rows, width]` that entered the LM head; both with the plan's padding.
        """


BodyMaker: TypeAlias = Callable[[PreTrainedModel, Sequence[AttentionPattern]], Body]
"""Makes a body from a loaded model and the pattern of each of its attention calls."""
