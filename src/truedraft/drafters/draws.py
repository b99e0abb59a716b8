"""How a draft's distribution becomes drafted tokens: the argmaxes, independent draws, or the choices of coupled
noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.coupled import coupled_choices
from truedraft.core.noise import Noise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.probs import draw, finite_rows, most_likely, probs_from_logits
from truedraft.core.proposal import DrawKind


@dataclass(frozen=True, slots=True)
class OpenNode:
    """A node whose children are about to be drawn.

    Attributes:
        noise: of its request at this step.
        depth: depth of the node; its children decide the token at this depth of the step.
        index: number of the first child in its tree, which keeps the keys of one depth apart.
        width: children to draw.
        wants_probability: whether the caller looks at the children's probabilities.
    """

    noise: Noise
    depth: int
    index: int
    width: int
    wants_probability: bool


@dataclass(frozen=True, slots=True)
class DrawnChildren:
    """Tokens drawn at one node, in order, and the draft's probability of each (1 where nobody asked)."""

    tokens: list[int]
    probabilities: list[float]


class Drawing(ABC):
    """A way to draw children from logits; pure functions of logits and noise.

    How many tokens a distribution can give depends on its numbers, so the children of several nodes are looked at
    (`draw`), on a device once for all of them. One token it always gives, so a chain need not be looked at
    (`draw_unseen`)."""

    kind: ClassVar[DrawKind]

    @abstractmethod
    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """Draw the children of nodes.

        Args:
            logits: `[nodes, vocab]` of the draft.
            params: options that all these nodes share.
            nodes: one for each row.

        Returns:
            The children of each node, and the distributions `[nodes, vocab]` they were drawn from (None: one-hot
            distributions).
        """

    @abstractmethod
    def draw_unseen(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[Tensor, Tensor | None]:
        """Draw one child of each node without bringing it to the host: the first of those that `draw` draws.

        A node whose logits are broken has no distribution; its child is token 0, drawn from the distribution that is
        one-hot there, so a rule judges it as rightly as any other.

        Args:
            logits: `[nodes, vocab]` of the draft.
            params: options that all these nodes share.
            nodes: one for each row, of any width; nobody may want probabilities.

        Returns:
            The tokens `[nodes]`, int64, on the device of the logits, and the distributions `[nodes, vocab]` they were
            drawn from (None: one-hot distributions).
        """


class TopTokens(Drawing):
    """The likeliest tokens, as deterministic candidates: what a greedy request needs."""

    kind: ClassVar[DrawKind] = DrawKind.DETERMINISTIC

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """The `width` likeliest tokens of each row; see `Drawing.draw`."""
        width = max(node.width for node in nodes)
        if width == 1:
            # Unlike topk this promises the lowest id among equals: what the target would choose.
            chosen = most_likely(logits)[:, None]
        else:
            chosen = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
        probs = torch.softmax(logits.float(), dim=-1) if _want_probabilities(nodes) else None
        return _children(chosen, probs, nodes, logits.shape[-1]), None

    def draw_unseen(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[Tensor, Tensor | None]:
        """The likeliest token of each row; see `Drawing.draw_unseen`. Of broken logits it is some token."""
        return most_likely(logits), None


class SampledTokens(Drawing):
    """Draws from the draft's distribution: independent one at a node, without replacement where there are several."""

    def __init__(self, kind: DrawKind) -> None:
        self.kind = kind  # type: ignore[misc]

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """`width` tokens of each row, never more than its distribution has support; see `Drawing.draw`."""
        probs = left = probs_from_logits(logits, params)
        vocab, wants = probs.shape[-1], _want_probabilities(nodes)
        last = max(node.width for node in nodes) - 1
        uniforms = self._uniforms(nodes, last + 1, probs.device)
        chosen: list[Tensor] = []
        for number in range(last + 1):
            # A row whose support is used up, or whose logits are broken, has nothing left to draw: that is `vocab`.
            chosen.append(draw(left, uniforms[number]))
            if number < last:
                left = left.scatter(-1, chosen[-1].clamp_max(vocab - 1)[:, None], 0.0)
        children = _children(_side_by_side(chosen, len(nodes)), probs if wants else None, nodes, vocab)
        return children, _without_broken_rows(probs, nodes, children)

    def draw_unseen(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[Tensor, Tensor | None]:
        """One token of each row; see `Drawing.draw_unseen`."""
        probs = probs_from_logits(logits, params)
        tokens = draw(probs, self._uniforms(nodes, 1, probs.device)[0])
        return _with_stand_ins(tokens, probs, tokens == probs.shape[-1])

    def _uniforms(self, nodes: Sequence[OpenNode], width: int, device: torch.device) -> Sequence[Tensor]:
        """The numbers that draw the children, `width` times `[nodes]`; known beforehand, so they go up in one copy."""
        numbers = [
            node.noise.uniform(Purpose.DRAFT, node.depth, node.index + number)
            for number in range(width)
            for node in nodes
        ]
        uniforms = transfers.upload(numbers, device, torch.float64)
        return (uniforms,) if width == 1 else uniforms.split(len(nodes))


class CoupledTokens(Drawing):
    """The tokens that the target's own noise makes likeliest under the draft's distribution (arXiv 2408.07978)."""

    kind: ClassVar[DrawKind] = DrawKind.COUPLED

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """The `width` largest log q + G of each row; see `Drawing.draw`."""
        probs = probs_from_logits(logits, params)
        # Where the distribution has less support than `width` there is no more that could be the target's choice.
        tokens = _perturbed(probs, nodes, min(max(node.width for node in nodes), probs.shape[-1]))
        children = _children(tokens, probs if _want_probabilities(nodes) else None, nodes, probs.shape[-1])
        return children, _without_broken_rows(probs, nodes, children)

    def draw_unseen(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[Tensor, Tensor | None]:
        """The largest log q + G of each row; see `Drawing.draw_unseen`."""
        probs = probs_from_logits(logits, params)
        tokens = _perturbed(probs, nodes, 1)[:, 0]
        return _with_stand_ins(tokens, probs, tokens == probs.shape[-1])


_TOP = TopTokens()
_COUPLED = CoupledTokens()
_INDEPENDENT = SampledTokens(DrawKind.INDEPENDENT)
_WITHOUT_REPLACEMENT = SampledTokens(DrawKind.WITHOUT_REPLACEMENT)


def drawing_for(params: SamplingParams, width: int) -> Drawing:
    """How a request with these options draws, at up to `width` draws a node."""
    if params.greedy:
        return _TOP
    if params.coupled:
        return _COUPLED
    return _INDEPENDENT if width == 1 else _WITHOUT_REPLACEMENT


def _perturbed(probs: Tensor, nodes: Sequence[OpenNode], width: int) -> Tensor:
    """The tokens with the largest log q + G `[nodes, width]`; the size of the vocabulary where there is none."""
    if not width:
        return torch.zeros(len(nodes), 0, dtype=torch.int64, device=probs.device)
    return coupled_choices([probs], [(node.noise, node.depth) for node in nodes], width)


def _side_by_side(tokens: Sequence[Tensor], nodes: int) -> Tensor:
    """Draws of one number after another, each `[nodes]`, as `[nodes, draws]`."""
    if len(tokens) == 1:
        return tokens[0][:, None]
    return torch.stack(list(tokens), dim=-1) if tokens else torch.zeros(nodes, 0, dtype=torch.int64)


def _without_broken_rows(probs: Tensor, nodes: Sequence[OpenNode], children: Sequence[DrawnChildren]) -> Tensor:
    """Distributions without mass where the logits were broken; nothing was drawn there, so only such rows need a look.

    Raising would drop the tokens already drawn above, because of what was drawn: that bends the distribution.
    """
    if all(own.tokens or not node.width for node, own in zip(nodes, children, strict=True)):
        return probs
    return torch.where(finite_rows(probs)[:, None], probs, 0.0)


def _with_stand_ins(tokens: Tensor, probs: Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens `[nodes]` and distributions `[nodes, vocab]`; rows that are `broken` `[nodes]` get token 0 and its one-hot
    distribution.

    The distributions are changed in place.
    """
    probs.masked_fill_(broken[:, None], 0.0)[:, 0].masked_fill_(broken, 1.0)
    return tokens.masked_fill(broken, 0), probs


def _want_probabilities(nodes: Sequence[OpenNode]) -> bool:
    return any(node.wants_probability for node in nodes)


def _children(tokens: Tensor, probs: Tensor | None, nodes: Sequence[OpenNode], vocab: int) -> list[DrawnChildren]:
    """Bring what was drawn to the host, in one transfer.

    Args:
        tokens: `[nodes, up to width]`; `vocab` is none.
        probs: `[nodes, vocab]`, which say the children's probabilities; None: 1 each.
        nodes: what was drawn for.
        vocab: size of the vocabulary.
    """
    if probs is None:
        rows = [
            [token for token in row[: node.width] if token < vocab]
            for node, row in zip(nodes, tokens.tolist(), strict=True)
        ]
        return [DrawnChildren(row, [1.0] * len(row)) for row in rows]
    ids, found = transfers.fetch([tokens, probs.gather(-1, tokens.clamp_max(vocab - 1))])
    children, width = [], tokens.shape[-1]
    for number, node in enumerate(nodes):
        places = range(number * width, number * width + min(node.width, width))
        drawn = [(int(ids[place]), found[place]) for place in places if ids[place] < vocab]
        children.append(DrawnChildren([token for token, _ in drawn], [mass for _, mass in drawn]))
    return children
