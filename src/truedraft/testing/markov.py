"""A language model with a table as its distribution: exact, tiny, and as strict about its cache as a real one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.cache import CachePool


class MarkovModel(LanguageModel):
    """The distribution of the next token depends on the last two tokens; before the text there is token 0.

    Its "keys" are the token ids themselves, in an ordinary `RequestCache`, so a wrong commit, rollback or mask changes
    its output.

    Args:
        probs: `[vocab, vocab, vocab]`: `probs[a, b]` is the distribution after ... a b; float64 keeps it exact.
        eos_token_ids: ids that end an answer.
    """

    def __init__(
        self,
        probs: Tensor,
        *,
        context_length: int = 64,
        eos_token_ids: Sequence[int] = (),
        name: str = "markov",
    ) -> None:
        self.probs = probs
        self.name = name
        self.tokenizer = None
        self.vocab_size = probs.shape[-1]
        self.context_length = context_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = probs.device
        self.dtype = probs.dtype
        self.pool = CachePool(context_length)

    @classmethod
    def random(cls, vocab: int, seed: int, sharpness: float = 1.5, **options: int) -> MarkovModel:
        """A table of random distributions; a larger `sharpness` makes them less even."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64) * sharpness
        return cls(torch.softmax(logits, dim=-1), **options)  # type: ignore[arg-type]

    def probs_after(self, tokens: Sequence[int]) -> Tensor:
        a, b = ([0, 0, *tokens])[-2:]
        return self.probs[a, b]

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """See `LanguageModel.forward`. The hidden state is the pair of the last two tokens."""
        pairs = [pair for segment in segments for pair in _pairs(segment)]
        index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return ForwardOutput(self.probs[index[:, 0], index[:, 1]].log(), index.to(self.dtype))


def _pairs(segment: Segment) -> list[tuple[int, int]]:
    """The last two tokens at each row of a segment, as read back from the cache."""
    cache, shape, begin = segment.cache, segment.shape, max(segment.cache.length - 1, 0)
    cache.reserve(len(shape), segment.written)
    ids = segment.tokens.to(torch.float64).view(1, -1, 1)
    keys = cache.write(0, ids, ids)[0][0, 0, begin : cache.length + len(shape)]
    stored = [int(token) for token in keys.tolist()]
    if not cache.length:  # before the text there is token 0
        stored.insert(0, 0)
    nodes = (segment.written + row for row in segment.rows)
    return [(stored[shape.parents[node] + 1], stored[node + 1]) for node in nodes]
