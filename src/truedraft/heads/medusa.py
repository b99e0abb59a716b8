"""Medusa heads: each guesses one of the tokens after the next, all from one vector of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.errors import OptionError

_TINY = 1e-20  # an embedding of zeros stays one

Unembed: TypeAlias = Callable[[Tensor], Tensor]
"""The target's LM head: vectors `[rows, width]` to logits `[rows, vocab]`, its scale and soft-cap applied."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa heads.

    Attributes:
        width: entries of the vector that enters the target's LM head.
        vocab_size: token ids.
        heads: how many tokens after the next are guessed.
        layers: residual blocks of a head.
        tied: whether the heads end in the target's own LM head, or each in a linear layer of its own.
        reads_token: whether the heads also read the embedding of the token that was drawn from the vector. Medusa's
            own do not: they guess what follows whatever token the vector may give.

    Raises:
        OptionError: a size below 1.
    """

    width: int
    vocab_size: int
    heads: int = 4
    layers: int = 1
    tied: bool = True
    reads_token: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that make no heads."""
        for name in ("width", "vocab_size", "heads", "layers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of Medusa heads must be 1 or more, got {getattr(self, name)}")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W and b 0 at the start, so that it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The vectors `[rows, width]` after the block."""
        return x + functional.silu(self.linear(x))


class MedusaHead(nn.Module):
    """One head: residual blocks, then the target's LM head or a linear layer of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(config.width) for _ in range(config.layers)))
        self.output = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layer of each block."""
        return [block.linear for block in self.blocks if isinstance(block, ResidualBlock)]


class MedusaHeads(nn.Module):
    """Head k (from 0) guesses the token k + 2 places behind the vector's own token: h -> W2 (h + SiLU(W1 h)).

    Medusa 2401.10774, section 2.1.1. The vector h enters the target's LM head, which gives the token one place behind.
    W1 starts at 0 and W2 at the LM head, so every head starts as the LM head itself.

    Heads that read the token too add to h a linear layer, shared by all heads and 0 at the start, of its embedding e
    scaled to a root mean square of 1: h + Wt e / rms(e). (So does the first of the Hydra heads, 2402.05109; but these
    do not wait for each other.) The token is known before anything is drafted, and h alone only knows its law.

    Args:
        config: sizes.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Linear(config.width, config.width, bias=False) if config.reads_token else None
        if self.token is not None:
            nn.init.zeros_(self.token.weight)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.heads))

    def each(self) -> Iterator[MedusaHead]:
        """The heads, that of the nearest token first."""
        return (head for head in self.heads if isinstance(head, MedusaHead))

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        """Let free outputs start at the weight `[vocab, width]` of the target's LM head; tied heads have none."""
        for head in self.each():
            if head.output is not None:
                head.output.weight.copy_(weight)

    def entering(self, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """What enters the blocks, `[rows, width]`: the vectors, with the tokens drawn from them if heads read these.

        Args:
            hidden: `[rows, width]`: vectors that entered the target's LM head.
            embedded: `[rows, width]`: the target's embeddings of the tokens drawn from them; heads that do not read
                tokens need none.

        Raises:
            ValueError: heads that read tokens were given none.
        """
        if self.token is None:
            return hidden
        if embedded is None:
            raise ValueError("these Medusa heads read the embedding of the token drawn from each vector; give it too")
        return hidden + self.token(scaled_embedding(embedded.to(hidden.dtype)))

    def vectors(self, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """What the blocks make of vectors and tokens, see `entering`: `[heads, rows, width]`."""
        entering = self.entering(hidden, embedded)
        return torch.stack([head.blocks(entering) for head in self.each()])

    def logits(
        self, hidden: Tensor, unembed: Unembed, finish: Callable[[Tensor], Tensor], embedded: Tensor | None = None
    ) -> Tensor:
        """Logits `[heads, rows, vocab]` for vectors and tokens, see `entering`.

        Args:
            hidden: vectors that entered the target's LM head.
            unembed: the target's LM head, which tied heads end in.
            finish: what the target does to the logits of its LM head (scale, soft-cap), for free heads.
            embedded: the target's embeddings of the tokens drawn from them.
        """
        vectors = self.vectors(hidden, embedded)
        if self.config.tied:
            return unembed(vectors.flatten(0, 1)).unflatten(0, vectors.shape[:2])
        outputs = [head.output for head in self.each() if head.output is not None]
        return torch.stack([finish(output(each)) for output, each in zip(outputs, vectors, strict=True)])


def scaled_embedding(embedded: Tensor) -> Tensor:
    """Embeddings `[rows, width]` at a root mean square of 1: families differ in their size by orders.

    In float32 and over next to nothing: torch's own constant beside the mean of squares is 0.008 in bfloat16, more than
    the mean itself in many tables.
    """
    wide = embedded.float()
    return functional.rms_norm(wide, wide.shape[-1:], eps=_TINY).to(embedded.dtype)
