"""What engine and drafters need of a language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.trees import TreeShape
from truedraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a packed forward.

    Attributes:
        cache: holds the tokens before these; the forward writes behind them and does not commit.
        tokens: `[new]`, int64: a part of a prompt, the last committed token and a tree below it, or one more level
            of a tree.
        shape: how all uncommitted tokens hang together, those of earlier forwards first; -1 is the last committed.
        rows: which of the new tokens need logits, rising.
        written: uncommitted tokens that earlier forwards wrote; the new ones are the rest of `shape`.
    """

    cache: RequestCache
    tokens: Tensor
    shape: TreeShape
    rows: Sequence[int]
    written: int = 0


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a packed forward gives, the segments' rows one behind another.

    Attributes:
        logits: `[rows, vocab]` in the model's dtype, padded ids cut off.
        hidden: `[rows, width]`: the vectors that enter the LM head, after the final norm.
    """

    logits: Tensor
    hidden: Tensor


class LanguageModel(ABC):
    """A causal language model that runs many token trees in one forward.

    Attributes:
        name: what the user called it.
        tokenizer: None when ids go in and out.
        vocab_size: ids that exist, padding of the embedding not counted.
        context_length: most tokens of one request.
        eos_token_ids: ids that end an answer.
        device: where its tensors live.
        dtype: of its weights.
        fast_paths: what is switched on beyond the plain forward, in words, for reports.
        parameters: weights; 0 where there are none.
        weight_bytes: bytes of weights that one forward reads.
        note: what every report on the model must say, such as that it was padded.
    """

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    fast_paths: tuple[str, ...] = ()
    parameters: int = 0
    weight_bytes: int = 0
    note: str | None = None

    @abstractmethod
    def new_cache(self) -> RequestCache:
        """An empty cache for one request."""

    @abstractmethod
    def release_cache(self, cache: RequestCache) -> None:
        """Take back a cache that is no longer used."""

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """One packed forward. A row's logits depend on its own context and ancestors only.

        Raises:
            ModelError: the model failed.
        """
