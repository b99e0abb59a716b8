"""Medusa heads as they run between two passes of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from truedraft.heads.medusa import MedusaHead, MedusaHeads, scaled_embedding
from truedraft.models.base import HeadRun, LanguageModel
from truedraft.models.packed_linear import PackedLinear, can_pack
from truedraft.models.ranking import Likeliest

# Kernels treat very short products differently, and a row must not depend on how many share its product.
_LEAST_ROWS = 4


class MedusaRunner:
    """The first heads of a set, in the dtype and on the device of a target; their weights are copied.

    Args:
        heads: of the target's width and vocabulary.
        target: whose LM head tied heads end in.
        depth: how many heads are used.
    """

    def __init__(self, heads: MedusaHeads, target: LanguageModel, depth: int) -> None:
        used = list(heads.each())[:depth]
        self._target = target
        self._token = None if heads.token is None else _placed([heads.token], target)
        self._used = used
        run = target.shared_heads([head.linears for head in used]) if heads.config.tied and used else None
        self._run: HeadRun = run or self._plain

    @cached_property
    def _plain(self) -> _Plain:
        """Beside a faster way of the target it is a second copy of the weights, so it is made when it is needed."""
        return _Plain(self._used, self._target)

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, depth: int, ranks: int, tokens: Tensor | None = None) -> Likeliest:
        """The guesses of the first `depth` heads.

        Args:
            hidden: `[rows, width]`: vectors that entered the target's LM head; a row's guesses depend on it alone.
            depth: at most as many as there are heads.
            ranks: guesses of each head.
            tokens: `[rows]`, int64: those drawn from the vectors; heads that do not read tokens need none.

        Returns:
            The likeliest ids `[depth, rows, ranks]`, on the target's device.
        """
        return self._run(self._entering(hidden, tokens), depth, ranks)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, depth: int, tokens: Tensor | None = None) -> Tensor:
        """The logits `[depth, rows, vocab]` of the first `depth` heads; arguments as for `likeliest`."""
        return self._plain.logits(self._entering(hidden, tokens), depth)

    def _entering(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """What enters the heads' blocks: the vectors, with the tokens drawn from them where heads read these."""
        if self._token is None:
            return hidden
        assert tokens is not None, "these heads read tokens"
        rows = len(hidden)
        scaled = scaled_embedding(self._target.embed(tokens.to(hidden.device)))
        return hidden + self._token(pad(scaled, (0, 0, 0, max(0, _LEAST_ROWS - rows))))[:rows]


class _Plain:
    """By products of torch: the first blocks of all heads read one vector, so they are one product."""

    def __init__(self, heads: Sequence[MedusaHead], target: LanguageModel) -> None:
        self._target = target
        self._heads = len(heads)
        self._first = _placed([head.linears[0] for head in heads], target)
        layers = len(heads[0].linears)
        self._later = [[_placed([head.linears[j]], target) for head in heads] for j in range(1, layers)]
        self._outputs = [_placed([head.output], target) for head in heads if head.output is not None]

    def __call__(self, hidden: Tensor, depth: int, ranks: int) -> Likeliest:
        """See `MedusaRunner.likeliest`."""
        if self._outputs:
            return Likeliest.of(self.logits(hidden, depth).flatten(0, 1), ranks).view(depth, len(hidden))
        return self._target.likeliest(self._leaving(hidden, depth).flatten(0, 1), ranks).view(depth, len(hidden))

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """See `MedusaRunner.logits`."""
        vectors = self._leaving(hidden, depth)
        rows, vocab, finish = len(hidden), self._target.vocab_size, self._target.finish_logits
        if not self._outputs:
            return self._target.unembed(vectors.flatten(0, 1)).view(depth, rows, -1)
        filled = pad(vectors, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
        outputs = zip(filled, self._outputs, strict=False)
        return torch.stack([finish(output(x.contiguous())[:rows, :vocab]) for x, output in outputs])

    def _leaving(self, hidden: Tensor, depth: int) -> Tensor:
        """What leaves the blocks of the first heads, `[depth, rows, width]`."""
        rows, width = hidden.shape
        hidden = pad(hidden, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
        steps = self._first(hidden).view(len(hidden), self._heads, width)[:, :depth]
        vectors = (hidden[:, None] + silu(steps)).transpose(0, 1)  # [depth, rows, width]
        for layers in self._later:
            pairs = zip(vectors, layers, strict=False)
            vectors = torch.stack([x + silu(layer(x.contiguous())) for x, layer in pairs])
        return vectors[:, :rows]


def _placed(layers: Sequence[nn.Linear], target: LanguageModel) -> Callable[[Tensor], Tensor]:
    """Layers of one input, one behind another, in the dtype and on the device of a target."""
    device, dtype = target.device, target.dtype
    weight = torch.cat([layer.weight.detach() for layer in layers]).to(device, dtype)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(biases).to(device, dtype) if biases else None
    if can_pack(device, dtype):
        return PackedLinear(weight, bias)
    return lambda x: linear(x, weight, bias)
