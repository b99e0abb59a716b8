"""The recurrent head of ReDrafter: one head for all positions, which reads the tokens drafted so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from truedraft.core.top_k import TopK
from truedraft.drafters.heads.head import (
    MOST_MODULES,
    Product,
    ResidualBlock,
    VectorHead,
    linears_of,
    placed,
    scaled_embedding,
)
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.models.packed_linear import filled

_SIZES = ("width", "vocab_size", "state", "exit_width", "length")
_TABLE_BYTES = 64 << 20
"""Maximum size of a table with the recurrence's input for every token."""


@dataclass(frozen=True, slots=True)
class RedrafterConfig:
    """Sizes of a recurrent head. Raises `OptionError` for invalid sizes.

    Attributes:
        exit_width: entries of the input of the residual blocks and the output; `width` if the output is tied.
        length: number of guessed tokens after the next in training; it can be unrolled further.
        tied: whether it ends in the target's LM head, or in its own linear layer.
        rnn: whether the state is SiLU(W e + U s + b); otherwise it is the sum of the embeddings e.
        scaled: whether embeddings are scaled to a root mean square of 1.
    """

    width: int
    vocab_size: int
    state: int
    exit_width: int
    layers: int = 2
    length: int = 5
    tied: bool = True
    rnn: bool = True
    scaled: bool = True

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of a recurrent head must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.layers <= MOST_MODULES or self.length > MOST_MODULES:
            raise OptionError(
                f"layers of a recurrent head must be 0 or more, and they and its length at most {MOST_MODULES}, got "
                f"{self.layers} and {self.length}"
            )
        if self.tied and self.exit_width != self.width:
            raise OptionError(
                f"a head that ends in the target's LM head leaves {self.width} numbers, got an exit width of "
                f"{self.exit_width}; take {self.width}, or an output of its own"
            )
        if not self.rnn and self.state != self.width:
            raise OptionError(
                f"a state that sums embeddings has their {self.width} entries, got {self.state}; take {self.width}"
            )


class RedrafterHead(VectorHead):
    """h and the drafted tokens x_1, ..., x_i give the distribution of the token after x_i (2403.09919, section 3.1).

    s_0 = 0; s_i = SiLU(W e(x_i) + U s_(i-1) + b), with the target's embedding e and the token x_1 drawn from the hidden
    state h. [h, s_i] passes through a linear layer if the exit width differs, then blocks x + SiLU(L x + c), then the
    target's LM head or the head's own linear layer.

    The linear layer starts as the selection of h, and the blocks as the identity, so a tied head starts as the LM head.
    """

    kind = "redrafter"
    noun = "a recurrent drafter"
    plural = "recurrent heads"
    place_word = "place"
    sizes = RedrafterConfig
    config: RedrafterConfig

    def __init__(self, config: RedrafterConfig) -> None:
        super().__init__(config)
        width, exit_width = config.width, config.exit_width
        self.token = nn.Linear(width, config.state, bias=False) if config.rnn else None
        self.recurrent = nn.Linear(config.state, config.state) if config.rnn else None
        self.entry = nn.Linear(width + config.state, exit_width) if width + config.state != exit_width else None
        self.blocks = nn.Sequential(*(ResidualBlock(exit_width) for _ in range(config.layers)))
        self.output = None if config.tied else nn.Linear(exit_width, config.vocab_size, bias=False)
        self._start_as_choice()

    @torch.no_grad()
    def _start_as_choice(self) -> None:
        if self.recurrent is not None:
            nn.init.zeros_(self.recurrent.bias)
        if self.entry is not None:
            nn.init.zeros_(self.entry.bias)
            nn.init.eye_(self.entry.weight)  # entry i of [h, s], so this selects h

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        if self.output is not None and self.output.weight.shape == weight.shape:  # else it stays random
            self.output.weight.copy_(weight)

    @property
    def linears(self) -> list[nn.Linear]:
        return linears_of(self.blocks)

    @property
    def reach(self) -> int:
        return self.config.length

    @property
    def reads_tokens(self) -> bool:
        return True

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [self.output] * self.config.length

    def new_state(self, rows: int) -> Tensor:
        """s_0: zeros `[rows, state]`."""
        weight = next(self.parameters())
        return torch.zeros(rows, self.config.state, dtype=weight.dtype, device=weight.device)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The next state `[rows, state]`, from the token's embedding `[rows, width]`."""
        read = (scaled_embedding(embedded) if self.config.scaled else embedded).to(state.dtype)
        if self.token is None or self.recurrent is None:
            return state + read
        return silu(self.token(read) + self.recurrent(state))

    def leaving(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Input of the output layer, `[rows, exit_width]`."""
        entering = torch.cat([hidden.to(state.dtype), state], dim=-1)
        blocks: Tensor = self.blocks(entering if self.entry is None else self.entry(entering))
        return blocks

    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        state, found = self.new_state(len(hidden)), []
        for each in embedded:
            state = self.advance(state, each)
            found.append(self.leaving(hidden, state))
        return torch.stack(found)


class RedrafterRunner:
    """A recurrent head with copied weights in the dtype and on the device of a target.

    Each row of a result, one per beam, depends only on that row of the arguments.
    """

    def __init__(self, head: RedrafterHead, target: LanguageModel) -> None:
        config = head.config
        self._target = target
        self._scaled = config.scaled
        self._token = self._recurrent = None
        if head.token is not None and head.recurrent is not None:
            self._token = placed(head.token.weight, head.recurrent.bias, target)
            self._recurrent = placed(head.recurrent.weight, None, target)
        self._entry: tuple[Product, Product] | None = None
        if head.entry is not None:
            of_vector, of_state = head.entry.weight.split([config.width, config.state], dim=1)
            self._entry = placed(of_vector, head.entry.bias, target), placed(of_state, None, target)
        # Blocks and LM head in one call, if the target supports it.
        self._shared = target.shared_heads([head.linears]) if config.tied and head.linears else None
        self._blocks = [placed(each.weight, each.bias, target) for each in head.linears]
        self._output = None if head.output is None else placed(head.output.weight, None, target)
        small = target.vocab_size * config.state * target.dtype.itemsize <= _TABLE_BYTES
        self._table = self._recurrence_input(torch.arange(target.vocab_size, device=target.device)) if small else None

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    def context(self, hidden: Tensor) -> Tensor:
        """A hidden state's part of the blocks' input, once per request and step: `[rows, some width]`."""
        hidden = hidden.to(self._target.dtype)
        return hidden if self._entry is None else _in_rows(self._entry[0], hidden)

    def advance(self, state: Tensor | None, tokens: Tensor) -> Tensor:
        """The recurrent state `[rows, state]` after one more token; None is the state before the first."""
        embedded = self._recurrence_input(tokens) if self._table is None else embedding(tokens, self._table)
        if self._recurrent is None:
            return embedded if state is None else state + embedded
        return silu(embedded if state is None else embedded + _in_rows(self._recurrent, state))

    def _recurrence_input(self, tokens: Tensor) -> Tensor:
        """W e + b, or e itself if the state is a sum."""
        embedded = self._target.embed(tokens).to(self._target.dtype)
        read = scaled_embedding(embedded) if self._scaled else embedded
        return read if self._token is None else _in_rows(self._token, read)

    def likeliest(self, context: Tensor, state: Tensor, ranks: int) -> TopK:
        if self._shared is not None:
            return self._shared(self._entering(context, state), 1, ranks).view(len(state))
        leaving = self._leaving(context, state)
        if self._output is None:
            return self._target.likeliest(leaving, ranks)
        return TopK.of(self._own_logits(leaving), ranks)

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """`[rows, vocab]` of the next token."""
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


def _in_rows(product: Product, x: Tensor) -> Tensor:
    """With rows that are bitwise independent of the others."""
    rows = len(x)
    return product(filled(x))[:rows]
