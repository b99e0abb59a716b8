"""How a draft's law becomes drafted tokens: the argmaxes, independent draws, or the choices of coupled noise."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core.laws import draw, finite_rows, law_from_logits, most_likely
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import DrawKind
from truedraft.core.sampling import SamplingParams


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
    """A way to draw children from logits; pure functions of logits and noise."""

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
            The children of each node, and the laws `[nodes, vocab]` they were drawn from (None: one-hot laws).
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
        tokens = [row[: node.width] for node, row in zip(nodes, chosen.tolist(), strict=True)]
        laws = torch.softmax(logits.float(), dim=-1) if _want_probabilities(nodes) else None
        return _children(tokens, laws), None


class SampledTokens(Drawing):
    """Draws from the draft's law: independent one at a node, without replacement where there are several."""

    def __init__(self, kind: DrawKind) -> None:
        self.kind = kind  # type: ignore[misc]

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """`width` tokens of each row, never more than its law has support; see `Drawing.draw`."""
        laws = left = law_from_logits(logits, params)
        vocab = laws.shape[-1]
        tokens: list[list[int]] = [[] for _ in nodes]
        last = max(node.width for node in nodes) - 1
        for number in range(last + 1):
            uniforms = [node.noise.uniform(Purpose.DRAFT, node.depth, node.index + number) for node in nodes]
            drawn = draw(left, torch.tensor(uniforms, dtype=torch.float64).to(laws.device, non_blocking=True))
            for own, node, token in zip(tokens, nodes, drawn.tolist(), strict=True):
                # A row whose support is used up, or whose logits are broken, has nothing left to draw.
                if number < node.width and token < vocab:
                    own.append(token)
            if number < last:
                left = left.scatter(-1, drawn.clamp_max(vocab - 1)[:, None], 0.0)
        laws = _without_broken_rows(laws, nodes, tokens)
        return _children(tokens, laws if _want_probabilities(nodes) else None), laws


class CoupledTokens(Drawing):
    """The tokens that the target's own noise makes likeliest under the draft's law (arXiv 2408.07978)."""

    kind: ClassVar[DrawKind] = DrawKind.COUPLED

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """The `width` largest log q + G of each row; see `Drawing.draw`."""
        laws = law_from_logits(logits, params)
        scores = torch.log(laws.double())
        for row, node in zip(scores, nodes, strict=True):
            noise = node.noise.gumbel(node.depth, laws.shape[-1], laws.device)
            assert noise is not None, "a greedy request draws its likeliest tokens"
            row.add_(noise)
        width = max(node.width for node in nodes)
        top = scores.topk(min(width, scores.shape[-1]), dim=-1)
        # Where the law has less support than `width` the rest scores -inf and can never be the target's choice;
        # where the logits are broken every score is NaN. Neither is above -inf.
        tokens = [
            [token for token, score in zip(ids[: node.width], values, strict=False) if score > -torch.inf]
            for node, ids, values in zip(nodes, top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        laws = _without_broken_rows(laws, nodes, tokens)
        return _children(tokens, laws if _want_probabilities(nodes) else None), laws


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


def _without_broken_rows(laws: Tensor, nodes: Sequence[OpenNode], tokens: Sequence[Sequence[int]]) -> Tensor:
    """Laws without mass where the logits were broken; nothing was drawn there, so only such rows need a look.

    Raising would drop the tokens already drawn above, because of what was drawn: that bends the law.
    """
    if all(own or not node.width for node, own in zip(nodes, tokens, strict=True)):
        return laws
    return torch.where(finite_rows(laws)[:, None], laws, 0.0)


def _want_probabilities(nodes: Sequence[OpenNode]) -> bool:
    return any(node.wants_probability for node in nodes)


def _children(tokens: Sequence[list[int]], laws: Tensor | None) -> list[DrawnChildren]:
    """The tokens of each node with their probabilities in its law, a row of `laws` `[nodes, vocab]`; None: 1 each."""
    if laws is None:
        return [DrawnChildren(own, [1.0] * len(own)) for own in tokens]
    rows = [row for row, own in enumerate(tokens) for _ in own]
    found = iter(laws[rows, [token for own in tokens for token in own]].tolist())
    return [DrawnChildren(own, list(itertools.islice(found, len(own)))) for own in tokens]
