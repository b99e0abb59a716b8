"""How a draft's distribution becomes drafted tokens: argmax, independent draws, or choices by coupled noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from truedraft.core import fused, transfers
from truedraft.core.coupled import choices_by_keys, coupled_choices
from truedraft.core.noise import Noise, Purpose, gumbel_key, signed
from truedraft.core.params import SamplingParams
from truedraft.core.probs import draw, likeliest, probs_from_logits
from truedraft.core.proposal import DrawKind
from truedraft.models.base import Choose

Child: TypeAlias = tuple[int, float]
"""A drawn token, and the draft's probability of it (1 if not computed)."""


class OpenNode(NamedTuple):
    """A node before its children are drawn, which are at `depth` of the step.

    `first_child` is its first child's number in the tree, which makes the noise keys of one depth unique.
    """

    noise: Noise
    depth: int
    first_child: int
    width: int


class DraftIds:
    """The distinct token ids `[guessed]` of a draft with a smaller vocabulary, on the draft's device."""

    def __init__(self, ids: Tensor, vocab: int) -> None:
        self.ids, self.on_host, self._vocab = ids, ids.tolist(), vocab

    def whole(self, values: Tensor, others: float = -math.inf) -> Tensor:
        """Values `[rows, guessed]` with `others` at all other ids: `[rows, vocab]`."""
        return values.new_full((len(values), self._vocab), others).index_copy_(1, self.ids, values)


class Drawing(ABC):
    """A way to draw children from logits; a pure function of logits and noise, which waits for no device.

    `by_ids`: whether draws depend on which ids the logits are for.
    """

    kind: DrawKind
    by_ids = False

    @abstractmethod
    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        """Draw the children of nodes from logits `[nodes, vocab]`, at least one of them with children.

        Returns:
            Tokens `[nodes, draws]`, int64, on the device of the logits, of which each node's own are the first. `vocab`
            means no token: the distribution is used up, or not finite. And the distributions `[nodes, vocab]` they were
            drawn from (None: one-hot), not finite where the logits are not.
        """

    def choose(self, params: SamplingParams) -> Choose | None:
        """How one token is drawn in `LanguageModel.forward_chains`; None if these options are not supported there."""
        return None

    def chain_numbers(self, params: SamplingParams, noise: Noise, depth: int) -> Sequence[Sequence[float]] | None:
        """The inputs `[kinds, depth]` of `choose`, without logits, for one request's chain; None for unkeyed noise."""
        return []


class TopTokens(Drawing):
    """The likeliest tokens, as deterministic candidates, for greedy requests."""

    kind = DrawKind.DETERMINISTIC

    def choose(self, params: SamplingParams) -> Choose:
        return _likeliest_token

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        width = max(node.width for node in nodes)
        # Unlike topk, `likeliest` returns the lowest id among equals, as the target does.
        if width == 1:
            entries, best = (each[:, None] for each in likeliest(logits))
        else:
            entries, best = logits.topk(min(width, logits.shape[-1]), dim=-1)
        # Tokens of probability 0 are not proposed, such as banned ones.
        return best.masked_fill(entries == -torch.inf, logits.shape[-1]), None


class SampledTokens(Drawing):
    """Several draws per node from the draft's distribution, without replacement or independent."""

    def __init__(self, kind: DrawKind) -> None:
        self.kind = kind

    def choose(self, params: SamplingParams) -> Choose | None:
        return _drawn_token if _is_plain(params) else None

    def chain_numbers(self, params: SamplingParams, noise: Noise, depth: int) -> Sequence[Sequence[float]]:
        uniforms = [noise.uniform(Purpose.DRAFT, level, level) for level in range(depth)]
        return [[params.temperature] * depth, uniforms]

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        probs = left = probs_from_logits(logits, params)  # [nodes, vocab]
        last = max(node.width for node in nodes) - 1
        # All numbers are known in advance, so they are uploaded in one copy; 0 if a node has no such draw.
        numbers = [
            node.noise.uniform(Purpose.DRAFT, node.depth, node.first_child + number) if number < node.width else 0.0
            for number in range(last + 1)
            for node in nodes
        ]
        uniforms = transfers.upload(numbers, probs.device, torch.float64)  # [draws * nodes]
        if not last:
            return draw(probs, uniforms)[:, None], probs
        chosen: list[Tensor] = []  # [nodes] each
        for uniform in uniforms.split(len(nodes)):
            if chosen and self.kind is DrawKind.WITHOUT_REPLACEMENT:
                left = left.scatter(-1, chosen[-1].clamp_max(probs.shape[-1] - 1)[:, None], 0.0)
            chosen.append(draw(left, uniform))
        return torch.stack(chosen, dim=-1), probs


class CoupledTokens(Drawing):
    """The tokens that the target's own noise makes likeliest under the draft's distribution (arXiv 2408.07978)."""

    kind = DrawKind.COUPLED
    by_ids = True

    def choose(self, params: SamplingParams) -> Choose | None:
        return _coupled_token if _is_plain(params) else None

    def chain_numbers(self, params: SamplingParams, noise: Noise, depth: int) -> Sequence[Sequence[float]] | None:
        keys = [gumbel_key(noise, level) for level in range(depth)]
        known = [signed(key) for key in keys if key is not None]
        return [[params.temperature] * depth, known] if len(known) == depth else None

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        probs = probs_from_logits(logits, params)  # [nodes, vocab]
        width = min(max(node.width for node in nodes), probs.shape[-1])
        return coupled_choices([probs], [(node.noise, node.depth) for node in nodes], width), probs


def _is_plain(params: SamplingParams) -> bool:
    return not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """`probs_from_logits` at a temperature per row, `[rows]`, float64."""
    if fused.fit(logits, dtypes=fused.LOGITS):
        return fused.softmax(logits, temperature)
    logits = logits.float()
    temperature = temperature.clamp_min(torch.finfo(logits.dtype).tiny).to(logits.dtype)
    return torch.softmax((logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None]), dim=-1)


def existing(tokens: Tensor, probs: Tensor | None, vocab: int) -> tuple[Tensor, Tensor | None]:
    """Replace `vocab` in unread tokens `[nodes]`, of logits not finite or all -inf, by 0 with a one-hot distribution.

    The host does not see this, and every rule verifies it exactly. `probs`, `[nodes, vocab]`, are changed in place.
    """
    broken = tokens == vocab
    if probs is not None:
        probs.masked_fill_(broken[:, None], 0.0)[:, :1].masked_fill_(broken[:, None], 1.0)
    return tokens.masked_fill(broken, 0), probs


def _likeliest_token(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    entries, best = likeliest(logits)
    return existing(best.masked_fill(entries == -torch.inf, logits.shape[-1]), None, logits.shape[-1])


def _drawn_token(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
    probs = _tempered(logits, temperature)
    return existing(draw(probs, uniform), probs, logits.shape[-1])


def _coupled_token(logits: Tensor, temperature: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    probs = _tempered(logits, temperature)
    return existing(choices_by_keys(probs, key)[:, 0], probs, logits.shape[-1])


TOP_TOKENS = TopTokens()
INDEPENDENT_DRAWS = SampledTokens(DrawKind.INDEPENDENT)
_COUPLED = CoupledTokens()
_WITHOUT_REPLACEMENT = SampledTokens(DrawKind.WITHOUT_REPLACEMENT)


def drawing_for(params: SamplingParams, width: int) -> Drawing:
    """How a request with these options draws up to `width` children per node."""
    if params.greedy:
        return TOP_TOKENS
    if params.seeded:
        return _COUPLED
    return INDEPENDENT_DRAWS if width == 1 else _WITHOUT_REPLACEMENT


def fetch_children(tokens: Tensor, probs: Tensor | None, nodes: Sequence[OpenNode], vocab: int) -> list[list[Child]]:
    """The children of each node, from tokens of `Drawing.draw` and their probabilities `[nodes, draws]`, in one
    transfer; None: 1.
    """
    if probs is None:
        rows = [[(token, 1.0) for token in row] for row in tokens.tolist()]
    else:
        ids, masses = transfers.fetch([tokens, probs])  # [nodes * draws]
        drawn, draws = list(zip(map(int, ids), masses, strict=True)), tokens.shape[-1]
        rows = [drawn[start : start + draws] for start in range(0, len(drawn), draws)]
    return [[child for child in row[: node.width] if child[0] < vocab] for node, row in zip(nodes, rows, strict=True)]
