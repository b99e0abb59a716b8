"""What runs a packed forward: the model's own modules, or a faster loop over the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.cache import CachePool
from truedraft.models.base import Segment
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

    def new_pool(self, limit: int) -> CachePool:
        """Where the model's requests get their caches; called once.

        Args:
            limit: tokens of one request (the model's context).
        """
        return CachePool(limit)

    def forward(self, segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
        """Reserve room in the segments' caches, lay the segments out, and run them.

        Args:
            segments: the requests' shares of the forward.
            device: of the model.

        Returns:
            Logits `[rows, ids]` of the wanted rows, padded ids of the embedding included, and the vectors
            `[rows, width]` that entered the LM head.
        """
        plan = ForwardPlan.of(segments, device, self.least_rows)
        logits, hidden = self.run(plan)
        return logits[: plan.wanted], hidden[: plan.wanted]

    @abstractmethod
    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run the plan.

        Returns:
            Logits `[rows, ids]` of the plan's rows, padded ids of the embedding included, and the vectors
            `[rows, width]` that entered the LM head; both with the plan's padding.
        """


BodyMaker: TypeAlias = Callable[[PreTrainedModel, Sequence[AttentionPattern]], Body]
"""Makes a body from a loaded model and the pattern of each of its attention calls."""
