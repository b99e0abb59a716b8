"""Models that keep nothing which speculation could take back: the whole text is read again at every step.

That is what `generate` does with a model that has no cache, and it is right for any that writes one token behind
another, whatever its layers keep. A step costs the text so far, and drafted tokens next to nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.models.backends.alone import AloneBackend, PathCache
from truedraft.models.packing import SegmentPlan


class WholeTextBackend(AloneBackend):
    """Runs a model's own forward over the text of each segment, from its first token on.

    The request's cache holds ids where that of another model holds keys.

    Args:
        model: as transformers loaded it.
        reason: why it does not run otherwise, for reports.
    """

    def __init__(self, model: PreTrainedModel, reason: str = "it was loaded so") -> None:
        super().__init__(model, reason)
        self.input_names = frozenset()
        self.rows_vary = True  # a drafted token makes the text longer, and where experts are chosen, other products
        self.note = f"the whole text again at every step, since nothing that it keeps can be taken back: {reason}"

    def _refuse(self) -> None:
        """Any forward will do."""

    def _read(self, part: SegmentPlan, run: Sequence[int], tokens: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        segment = part.segment
        own = [node - segment.written for node in run]
        if not set(own).isdisjoint(segment.rows):
            return super()._read(part, run, tokens)
        text_of(tokens[own][None], PathCache(segment.cache, segment.shape.path(run[-1]), len(run)))
        return {}

    def _logits(
        self, ids: Tensor, past: PathCache, places: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        new, text = ids.shape[1], text_of(ids, past)
        given = {
            "position_ids": torch.arange(text.shape[1], device=ids.device)[None],
            "attention_mask": torch.ones_like(text),
            "use_cache": False,
        }
        logits: Tensor = self._called(text, given).logits[0, -new:]
        self._captured[-1] = self._captured[-1][:, -new:]
        return logits


def text_of(ids: Tensor, past: PathCache) -> Tensor:
    """Keep new tokens `[1, new]`; all ids `[1, tokens]` up to the last of them."""
    whole, _ = past.update(ids[:, None, :, None], ids.new_zeros(1, 1, ids.shape[1], 0), 0)
    return whole[:, 0, :, 0]
