"""A recurrent head as it runs between two passes of the target: for all beams of all requests at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad, silu

from truedraft.heads.medusa import scaled_embedding
from truedraft.heads.redrafter import RedrafterHead
from truedraft.models.base import LanguageModel
from truedraft.models.packed_linear import PackedLinear, can_pack
from truedraft.models.ranking import Likeliest

_Product: TypeAlias = Callable[[Tensor], Tensor]

# Kernels treat very short products differently, and a row must not depend on how many share its product.
_LEAST_ROWS = 4
_TABLE_BYTES = 64 << 20
"""What the recurrence reads of a token is looked up where a table of all of them is not larger."""


class RedrafterRunner:
    """A recurrent head in the dtype and on the device of a target; its weights are copied.

    A row of each result depends on that row of the arguments alone. Rows are as many as there are beams; `context` is
    made once a step, for each request, and spread over its beams by the caller.

    Args:
        head: of the target's width and vocabulary.
        target: whose embeddings it reads, and whose LM head it ends in if it is tied.
    """

    def __init__(self, head: RedrafterHead, target: LanguageModel) -> None:
        config = head.config
        self._target = target
        self._scaled = config.scaled
        self._token = self._recurrent = None
        if head.token is not None and head.recurrent is not None:
            self._token = _placed(head.token.weight, head.recurrent.bias, target)
            self._recurrent = _placed(head.recurrent.weight, None, target)
        self._entry: tuple[_Product, _Product] | None = None
        if head.entry is not None:
            of_vector, of_state = head.entry.weight.split([config.width, config.state], dim=1)
            self._entry = _placed(of_vector, head.entry.bias, target), _placed(of_state, None, target)
        # Blocks and LM head in one call, where the target has one.
        self._shared = target.shared_heads([head.linears]) if config.tied and head.linears else None
        self._blocks = [_placed(each.weight, each.bias, target) for each in head.linears]
        self._output = None if head.output is None else _placed(head.output.weight, None, target)
        small = target.vocab_size * config.state * target.dtype.itemsize <= _TABLE_BYTES
        self._table = self._told(torch.arange(target.vocab_size, device=target.device)) if small else None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._target.device

    @property
    def vocab_size(self) -> int:
        """Token ids that there are."""
        return self._target.vocab_size

    def context(self, hidden: Tensor) -> Tensor:
        """What a request's vector adds to what enters the blocks: `[rows, width]` to `[rows, some width]`."""
        hidden = hidden.to(self._target.dtype)
        return hidden if self._entry is None else _in_rows(self._entry[0], hidden)

    def advance(self, state: Tensor | None, tokens: Tensor) -> Tensor:
        """The recurrent state after a token more.

        Args:
            state: `[rows, state]`; None is the state before the first token.
            tokens: `[rows]`, int64, on the target's device.

        Returns:
            `[rows, state]`.
        """
        told = self._told(tokens) if self._table is None else embedding(tokens, self._table)
        if self._recurrent is None:
            return told if state is None else state + told
        return silu(told if state is None else told + _in_rows(self._recurrent, state))

    def _told(self, tokens: Tensor) -> Tensor:
        """What the recurrence reads of tokens `[rows]`: W e + b, or e itself where the state is a sum."""
        embedded = self._target.embed(tokens).to(self._target.dtype)
        read = scaled_embedding(embedded) if self._scaled else embedded
        return read if self._token is None else _in_rows(self._token, read)

    def likeliest(self, context: Tensor, state: Tensor, ranks: int) -> Likeliest:
        """The likeliest next tokens `[rows, ranks]` of contexts and states `[rows, ...]`."""
        if self._shared is not None:
            return self._shared(self._entering(context, state), 1, ranks).view(len(state))
        leaving = self._leaving(context, state)
        if self._output is None:
            return self._target.likeliest(leaving, ranks)
        return Likeliest.of(self._own_logits(leaving), ranks)

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """The logits `[rows, vocab]` of the next token, for contexts and states `[rows, ...]`."""
        leaving = self._leaving(context, state)
        return self._target.unembed(leaving) if self._output is None else self._own_logits(leaving)

    def _own_logits(self, leaving: Tensor) -> Tensor:
        assert self._output is not None
        logits = _in_rows(self._output, leaving)
        return self._target.finish_logits(logits[:, : self._target.vocab_size])

    def _entering(self, context: Tensor, state: Tensor) -> Tensor:
        if self._entry is None:
            return torch.cat([context, state], dim=-1)
        return context + _in_rows(self._entry[1], state)

    def _leaving(self, context: Tensor, state: Tensor) -> Tensor:
        x = self._entering(context, state)
        for block in self._blocks:
            x = x + silu(_in_rows(block, x))
        return x


def _in_rows(product: _Product, x: Tensor) -> Tensor:
    """A product of at least so many rows that each has the same bits in any company."""
    rows = len(x)
    return product(x) if rows >= _LEAST_ROWS else product(pad(x, (0, 0, 0, _LEAST_ROWS - rows)))[:rows]


def _placed(weight: nn.Parameter | Tensor, bias: nn.Parameter | Tensor | None, target: LanguageModel) -> _Product:
    """A linear layer in the dtype and on the device of a target."""
    device, dtype = target.device, target.dtype
    placed = weight.detach().to(device, dtype)
    offset = None if bias is None else bias.detach().to(device, dtype)
    if can_pack(device, dtype):
        return PackedLinear(placed, offset)
    return lambda x: linear(x, placed, offset)
