"""The recurrent head of ReDrafter: one head for all places, which reads the tokens that were drafted so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.errors import OptionError
from truedraft.heads.medusa import ResidualBlock, scaled_embedding

_SIZES = ("width", "vocab_size", "state", "exit_width", "length")


@dataclass(frozen=True, slots=True)
class RedrafterConfig:
    """Sizes of a recurrent head.

    Attributes:
        width: entries of the vector that enters the target's LM head, and of the target's embeddings.
        vocab_size: token ids.
        state: entries of the recurrent state.
        exit_width: entries of what enters the residual blocks and the output; `width` where the output is tied.
        layers: residual blocks.
        length: how many tokens after the next it was trained to guess; it can be unrolled further.
        tied: whether it ends in the target's own LM head, or in a linear layer of its own.
        rnn: whether the state is SiLU(W e + U s + b); otherwise it is the plain sum of the embeddings e.
        scaled: whether embeddings are scaled to a root mean square of 1 before they are read.

    Raises:
        OptionError: sizes that make no head.
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
        """Refuse sizes that make no head."""
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of a recurrent head must be 1 or more, got {getattr(self, name)}")
        if self.layers < 0:
            raise OptionError(f"layers of a recurrent head must be 0 or more, got {self.layers}")
        if self.tied and self.exit_width != self.width:
            raise OptionError(
                f"a head that ends in the target's LM head leaves {self.width} numbers, got an exit width of "
                f"{self.exit_width}; take {self.width}, or an output of its own"
            )
        if not self.rnn and self.state != self.width:
            raise OptionError(
                f"a state that sums embeddings has their {self.width} entries, got {self.state}; take {self.width}"
            )


class RedrafterHead(nn.Module):
    """h and the drafted tokens x_1, ..., x_i give the law of the token behind x_i (ReDrafter 2403.09919, section 3.1).

    s_0 = 0; s_i = SiLU(W e(x_i) + U s_(i-1) + b), e the target's embedding and x_1 the token that was drawn from the
    vector h. [h, s_i] goes through a linear layer to the exit width, where that is another width, then through blocks
    x + SiLU(L x + c), then through the target's LM head or a linear layer of its own.

    The linear layer starts as the choice of h, and the blocks as the identity, so a tied head starts as the LM head.

    Args:
        config: sizes.
    """

    def __init__(self, config: RedrafterConfig) -> None:
        super().__init__()
        self.config = config
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
            nn.init.eye_(self.entry.weight)  # entry i of [h, s], so h first, where the exit is as wide as h

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        """Let an output of its own start at the weight `[vocab, width]` of the target's LM head, if it is as wide."""
        if self.output is not None and self.output.weight.shape == weight.shape:
            self.output.weight.copy_(weight)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layer of each residual block."""
        return [block.linear for block in self.blocks if isinstance(block, ResidualBlock)]

    def outputs(self) -> Iterator[nn.Linear | None]:
        """The output of each guessed place: one for all; None is the target's LM head."""
        return (self.output for _ in range(self.config.length))

    def new_state(self, rows: int) -> Tensor:
        """s_0: zeros `[rows, state]`."""
        weight = next(self.parameters())
        return torch.zeros(rows, self.config.state, dtype=weight.dtype, device=weight.device)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state `[rows, state]` after one token more.

        Args:
            state: `[rows, state]`: before it.
            embedded: `[rows, width]`: the target's embedding of the token.
        """
        read = (scaled_embedding(embedded) if self.config.scaled else embedded).to(state.dtype)
        if self.token is None or self.recurrent is None:
            return state + read
        return functional.silu(self.token(read) + self.recurrent(state))

    def leaving(self, hidden: Tensor, state: Tensor) -> Tensor:
        """What enters the output, `[rows, exit_width]`, for vectors `[rows, width]` and states `[rows, state]`."""
        entering = torch.cat([hidden.to(state.dtype), state], dim=-1)
        blocks: Tensor = self.blocks(entering if self.entry is None else self.entry(entering))
        return blocks

    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What enters the output at each place along given tokens: `[length, rows, exit_width]`.

        Args:
            hidden: `[rows, width]`: vectors that entered the target's LM head.
            embedded: `[length, rows, width]`: embeddings of the token drawn from each vector, and of those behind it.
        """
        state, found = self.new_state(len(hidden)), []
        for each in embedded:
            state = self.advance(state, each)
            found.append(self.leaving(hidden, state))
        return torch.stack(found)
