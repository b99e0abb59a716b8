"""A tokenizer of bytes and of a notation's special tokens, and a model that writes with it what it is told to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.cache import CachePool
from truedraft.testing.doubles import MarkovModel
from truedraft.text.tokenizer import Tokenizer

END = "</s>"
_SPECIAL = re.compile(r"<\|[^|]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]")
_WHOLE = re.compile(r"</?(?:think|tool_call|arg_key|arg_value|seed:\w+)>")


@lru_cache
def byte_tokenizer(texts: str) -> Tokenizer:
    """Bytes, and what looks like a control token in some texts; those such as Qwen's `<tool_call>` are not special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = dict.fromkeys([END, *_SPECIAL.findall(texts)])
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    whole = dict.fromkeys(_WHOLE.findall(texts))
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in whole])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END), "bytes")


class ScriptModel(MarkovModel):
    """Writes a text, whatever the prompt is: behind the longest beginning of it that is there, its next token."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(torch.zeros(1, 1, 1), context_length=1 << 14, eos_token_ids=tokenizer.eos_token_ids)
        self.tokenizer = tokenizer  # type: ignore[assignment]
        self.vocab_size = tokenizer.vocab_size
        self.pool = CachePool(self.context_length)
        self._script = [*tokenizer.plain_ids(text), *tokenizer.eos_token_ids]

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        rows = [text for segment in segments for text in texts_of(segment)]
        logits = torch.zeros(len(rows), self.vocab_size)
        for row, tokens in enumerate(rows):
            logits[row, self._next(tokens)] = 20.0
        return ForwardOutput(logits, torch.zeros(len(rows), 1))

    def _next(self, tokens: Sequence[int]) -> int:
        script = self._script
        return next(
            script[count]
            for count in range(min(len(tokens), len(script) - 1), -1, -1)
            if list(tokens[len(tokens) - count :]) == script[:count]
        )


def texts_of(segment: Segment) -> list[list[int]]:
    """For each row of a segment all tokens up to and with its own, as read back from the cache."""
    cache, shape = segment.cache, segment.shape
    cache.reserve(len(shape), segment.written)
    ids = segment.tokens.to(torch.float64).view(1, -1, 1)
    stored: list[int] = cache.write(0, ids, ids)[0].flatten().long().tolist()
    context, drafted = stored[: cache.length], stored[cache.length :]
    paths = (shape.path(segment.written + row) for row in segment.rows)
    return [context + [drafted[node] for node in path] for path in paths]
