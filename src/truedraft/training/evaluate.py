"""What a model, and a pair of models, are worth on held-out text.

All figures are means over the labels of whole, non-overlapping blocks: each token is predicted once, from the
tokens of its block before it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from truedraft.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LanguageModelReport:
    """How well one model predicts the text."""

    tokens: int
    validation_loss: float  # nats per token
    bits_per_byte: float

    def as_dict(self) -> dict[str, float]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PairReport:
    """How well a draft stands in for its target, at temperature 1 and greedily."""

    tokens: int
    alpha: float  # E[sum_x min(p(x), q(x))]: the share of single drafted tokens that would be accepted
    greedy_agreement: float  # the share of positions where both have the same likeliest token
    draft_loss: float  # nats per token, of the draft alone

    def as_dict(self) -> dict[str, float]:
        """The fields, for JSON."""
        return asdict(self)


def evaluate_model(
    model: PreTrainedModel,
    stream: NDArray[np.uint32],
    *,
    text_bytes: int,
    length: int = 2048,
    max_tokens: int | None = None,
) -> LanguageModelReport:
    """Loss and bits per byte along the stream, whose text is `text_bytes` long in UTF-8."""
    loss, count = mean_loss(model, stream, length=length, max_tokens=max_tokens)
    bytes_per_token = text_bytes / len(stream)
    return LanguageModelReport(count, loss, loss / math.log(2) / bytes_per_token)


def mean_loss(
    model: PreTrainedModel, stream: NDArray[np.uint32], *, length: int = 2048, max_tokens: int | None = None
) -> tuple[float, int]:
    """The model's loss along the stream, in nats per token, and the number of tokens."""
    total, count = 0.0, 0
    for block in _blocks(stream, length, max_tokens, model.device):
        total -= float(_label_log_probabilities(_log_law(model, block), block).sum())
        count += block.shape[1] - 1
    return total / count, count


def evaluate_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    stream: NDArray[np.uint32],
    *,
    length: int = 2048,
    max_tokens: int | None = None,
) -> PairReport:
    """Alpha and greedy agreement along the stream (the text's own tokens, not the models' answers)."""
    overlap, agreed, loss, count = 0.0, 0, 0.0, 0
    for block in _blocks(stream, length, max_tokens, target.device):
        p, q = _log_law(target, block), _log_law(draft, block)  # [length, vocab]
        overlap += float(torch.minimum(p, q).exp().sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        loss -= float(_label_log_probabilities(q, block).sum())
        count += block.shape[1] - 1
    return PairReport(count, overlap / count, agreed / count, loss / count)


def _blocks(
    stream: NDArray[np.uint32], length: int, max_tokens: int | None, device: torch.device
) -> Iterator[torch.Tensor]:
    """Consecutive blocks of up to length + 1 tokens that share one token with the next: int64 [1, .]."""
    end = len(stream) if max_tokens is None else min(len(stream), max_tokens + 1)
    if end < 2:
        raise DataError("the held-out text has fewer than two tokens, so nothing can be measured on it: give more text")
    for start in range(0, end - 1, length):
        yield torch.from_numpy(stream[start : min(start + length + 1, end)].astype("int64")).to(device)[None]


@torch.no_grad()
def _log_law(model: PreTrainedModel, block: torch.Tensor) -> torch.Tensor:
    """Log-probabilities at temperature 1, float32: [length, vocab]."""
    training = model.training
    model.eval()
    logits = model(input_ids=block[:, :-1], use_cache=False).logits[0]
    model.train(training)
    return functional.log_softmax(logits.float(), dim=-1)


def _label_log_probabilities(log_law: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return log_law.gather(-1, block[0, 1:, None]).squeeze(-1)  # [length]
