"""How a draft's law becomes drafted tokens: the argmaxes, independent draws, or the choices of coupled noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core.laws import draw, finite_rows, law_from_logits
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
            # argmax, unlike topk, promises the lowest id among equals: what the target would choose.
            chosen = logits.argmax(dim=-1, keepdim=True)
        else:
            chosen = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
        probabilities = torch.ones_like(chosen, dtype=torch.float32)
        if any(node.wants_probability for node in nodes):
            probabilities = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
        return _children(nodes, chosen.tolist(), probabilities.tolist()), None


class SampledTokens(Drawing):
    """Draws from the draft's law: independent one at a node, without replacement where there are several."""

    def __init__(self, kind: DrawKind) -> None:
        self.kind = kind  # type: ignore[misc]

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """`width` tokens of each row, never more than its law has support; see `Drawing.draw`."""
        laws = _sound_laws(logits, params)
        left = laws
        tokens: list[list[int]] = [[] for _ in nodes]
        probabilities: list[list[float]] = [[] for _ in nodes]
        for number in range(max(node.width for node in nodes)):
            uniforms = [node.noise.uniform(Purpose.DRAFT, node.depth, node.index + number) for node in nodes]
            drawn = draw(left, torch.tensor(uniforms, dtype=torch.float64, device=laws.device)).clamp_max(
                laws.shape[-1] - 1
            )
            masses = left.gather(-1, drawn[:, None]).squeeze(-1)
            for row, (token, mass) in enumerate(zip(drawn.tolist(), masses.tolist(), strict=True)):
                # A row whose support is used up has no mass left anywhere: it draws no more.
                if number < nodes[row].width and mass > 0.0:
                    tokens[row].append(token)
                    probabilities[row].append(mass)
            left = left.scatter(-1, drawn[:, None], 0.0)
        return [DrawnChildren(*each) for each in zip(tokens, probabilities, strict=True)], laws


class CoupledTokens(Drawing):
    """The tokens that the target's own noise makes likeliest under the draft's law (arXiv 2408.07978)."""

    kind: ClassVar[DrawKind] = DrawKind.COUPLED

    def draw(
        self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]
    ) -> tuple[list[DrawnChildren], Tensor | None]:
        """The `width` largest log q + G of each row; see `Drawing.draw`."""
        laws = _sound_laws(logits, params)
        noise = [node.noise.gumbel(node.depth, laws.shape[-1], laws.device) for node in nodes]
        scores = laws.double().log() + torch.stack([row for row in noise if row is not None])
        width = max(node.width for node in nodes)
        top = scores.topk(min(width, scores.shape[-1]), dim=-1)
        probabilities = laws.gather(-1, top.indices)
        # Where the law has less support than `width`, the rest scores -inf and can never be the target's choice.
        kept = [[score > -torch.inf for score in row] for row in top.values.tolist()]
        children = _children(nodes, top.indices.tolist(), probabilities.tolist())
        for child, keep in zip(children, kept, strict=True):
            count = sum(keep[: len(child.tokens)])
            del child.tokens[count:], child.probabilities[count:]
        return children, laws


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


def _sound_laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """Laws of a draft's logits, without mass where the logits are broken: nothing is drawn there.

    Raising would drop the tokens already drawn above, because of what was drawn: that bends the law.
    """
    laws = law_from_logits(logits, params)
    return torch.where(finite_rows(laws)[:, None], laws, 0.0)


def _children(
    nodes: Sequence[OpenNode], tokens: list[list[int]], probabilities: list[list[float]]
) -> list[DrawnChildren]:
    return [
        DrawnChildren(ids[: node.width], masses[: node.width])
        for node, ids, masses in zip(nodes, tokens, probabilities, strict=True)
    ]
