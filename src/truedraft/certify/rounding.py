"""How far rounding moves a target's logits when the same text is computed in other shapes.

Floating-point sums depend on their order, and kernels choose the order by the number of rows that share a product. If a
target's rows are invariant (docs/lossless.md), nothing moves. Otherwise two answers may diverge where two tokens are
almost equally likely, and a certificate must distinguish that from a fault. A fault of drafted rows (a wrong mask,
wrong positions, a wrong cache entry) moves logits too. So the reference is what *plain* decoding's own shapes make of a
text: only committed tokens, with as many rows as drafted steps have, and under the causal mask of a prompt, which a
drafted path shares. If these are bitwise equal, drafted rows must be too. Otherwise a drafted row must be near one of
them.

Worked example: one token at a time, the best logit at a position is 9.70; in a batch with four others and within a
prompt it is 9.72. Plain shapes differ by 0.02, so a drafted row may be up to 0.04 from the nearest of them: 9.73
passes, because it is 0.01 from 9.72, and 9.80 is a fault. If all plain ones were 9.70, then 9.73 would be a fault, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import Deadline
from truedraft.core.budget import Budget
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits, total_variation
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.machine import dtype_name
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache.family import PIECE
from truedraft.options import record_of

_LEEWAY = 2.0
"""A drafted row may be this many times as far from the nearest plain one as plain ones differ: both are maxima over
roundings, with a unit that doubles at each power of two."""
_MOST_NODES = 32  # more nodes of a tree change nothing about what its rows see, and cost memory
_LARGEST = {torch.float64: 2.0**-30, torch.float32: 2.0**-11, torch.float16: 2.0**-6, torch.bfloat16: 2.0**-3}


_RECORDED = (
    "bitwise", "is_rounding", "positions", "largest_logit", "plain_difference", "drafted_difference",
    "from_nearest_plain", "mean_total_variation", "largest_total_variation", "shapes",
)  # fmt: skip


def relative_limit(dtype: torch.dtype) -> float:
    """Largest relative effect of rounding in a deep model: about 2^12 units in the last place in float32."""
    return _LARGEST.get(dtype, 2.0**-3)


@dataclass(frozen=True, slots=True)
class Spread:
    """Plain decoding of one request compared with one other shape; as in the record."""

    shape: str
    positions: int  # compared rows of logits
    different_rows: int  # rows with any bit that differs
    largest_logit_difference: float
    mean_total_variation: float  # of the distributions under the sampling options
    largest_total_variation: float
    from_nearest_plain: float = 0.0  # of a drafted shape: largest difference from the nearest row of any plain shape

    def __add__(self, other: Spread) -> Spread:
        positions = self.positions + other.positions
        summed = self.mean_total_variation * self.positions + other.mean_total_variation * other.positions
        return Spread(
            self.shape,
            positions,
            self.different_rows + other.different_rows,
            max(self.largest_logit_difference, other.largest_logit_difference),
            summed / max(positions, 1),
            max(self.largest_total_variation, other.largest_total_variation),
            max(self.from_nearest_plain, other.from_nearest_plain),
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """Differences between shapes of the same computation on the same texts."""

    dtype: torch.dtype
    largest_logit: float
    plain: tuple[Spread, ...]
    drafted: tuple[Spread, ...]

    @property
    def positions(self) -> int:
        return max((spread.positions for spread in self.shapes), default=0)

    @property
    def bitwise(self) -> bool:
        """Whether every row is the same in every measured shape (row invariance)."""
        return not any(spread.different_rows for spread in self.shapes)

    @property
    def plain_difference(self) -> float:
        return max((spread.largest_logit_difference for spread in self.plain), default=0.0)

    @property
    def drafted_difference(self) -> float:
        return max((spread.largest_logit_difference for spread in self.drafted), default=0.0)

    @property
    def from_nearest_plain(self) -> float:
        """Largest distance of a drafted row from the nearest plain one."""
        return max((spread.from_nearest_plain for spread in self.drafted), default=0.0)

    @property
    def limit(self) -> float:
        """Largest difference of two logits between plain shapes that passes for rounding in this dtype."""
        return relative_limit(self.dtype) * self.largest_logit

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains all measured differences.

        Plain shapes must not differ by more than `limit`. Drafted rows may be at most `_LEEWAY` times as far from plain
        ones as those are from each other, so if plain ones are bitwise equal, nothing is allowed.
        """
        return self.plain_difference <= self.limit and self.from_nearest_plain <= _LEEWAY * self.plain_difference

    @property
    def largest_difference(self) -> float:
        """Largest difference of two logits attributed to rounding; a margin moves by at most twice that."""
        return max((spread.largest_logit_difference for spread in self._blamed), default=0.0)

    @property
    def mean_total_variation(self) -> float:
        """Mean total variation in the shape where it is largest; shapes count as in `largest_difference`."""
        return max((spread.mean_total_variation for spread in self._blamed), default=0.0)

    @property
    def largest_total_variation(self) -> float:
        """Largest total variation at one position; shapes count as in `largest_difference`."""
        return max((spread.largest_total_variation for spread in self._blamed), default=0.0)

    @property
    def shapes(self) -> tuple[Spread, ...]:
        return (*self.plain, *self.drafted)

    @property
    def _blamed(self) -> tuple[Spread, ...]:
        if self.is_rounding:
            return self.shapes
        return self.plain if self.plain_difference <= self.limit else ()

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            self.dtype,
            max(self.largest_logit, other.largest_logit),
            tuple(a + b for a, b in zip(self.plain, other.plain, strict=True)),
            tuple(a + b for a, b in zip(self.drafted, other.drafted, strict=True)),
        )

    def describe(self) -> str:
        if self.bitwise:
            return f"rows are bitwise equal in {len(self.shapes) + 1} shapes at {self.positions} places: rounding is 0"
        if not any(spread.different_rows for spread in self.plain):
            return (
                f"rows are bitwise equal in {len(self.plain) + 1} shapes of plain decoding at {self.positions} places, "
                f"and drafted ones differ from them by up to {self.drafted_difference:.3g}: that is no rounding"
            )
        text = (
            f"logits differ by up to {self.plain_difference:.3g} between shapes of plain decoding and by up to "
            f"{self.drafted_difference:.3g} in drafted ones, with rows up to {self.from_nearest_plain:.3g} from the "
            f"nearest plain one, distributions by a total variation of {self.mean_total_variation:.2g} on average and "
            f"{self.largest_total_variation:.2g} at most, over {self.positions} places"
        )
        return text if self.is_rounding else f"{text}; that is more than rounding in {dtype_name(self.dtype)} does"

    def as_dict(self) -> dict[str, Any]:
        return {"dtype": dtype_name(self.dtype)} | record_of(self, *_RECORDED)


def measure_rounding(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    batch: int,
    params: SamplingParams,
    limits: Budget,
    *,
    positions: int = 32,
    seconds: float = float("inf"),
) -> Rounding:
    """Compute the ends of texts in the shapes of plain decoding and of speculation, and compare all logits.

    Args:
        texts: token ids of prompts with answers; texts of fewer than 2 tokens are skipped.
        limits: the drafter's, which bound the length of drafted chains and the width of drafted trees.
        positions: maximum number of compared positions, at the end of each text.
        seconds: no further text is begun after this time; the first always is.

    Raises ValueError if no text has 2 tokens.
    """
    deadline = Deadline(seconds)
    total: Rounding | None = None
    for text in texts:
        if len(text) < 2:
            continue
        start = max(1, len(text) - positions)
        own = compare_shapes(target, text, start, start, batch, params, limits)[1]
        total = own if total is None else total + own
        if deadline.over:
            break
    if total is None:
        raise ValueError("rounding is measured on texts of at least 2 tokens, got none")
    return total


def compare_shapes(
    target: LanguageModel,
    text: Sequence[int],
    start: int,
    near: int,
    batch: int,
    params: SamplingParams,
    limits: Budget,
) -> tuple[Tensor, Rounding]:
    """Logits `[len(text) - start, vocab]` under plain decoding, and the rounding of other shapes from `near` on."""
    baseline = fed_logits(target, text, start, ALONE)
    rows = baseline[near - start :]
    probs = probs_from_logits(rows, params)

    plain_rows = [rows]

    def spread(feeding: Feeding, other: Tensor, from_nearest: float) -> Spread:
        distance = total_variation(probs, probs_from_logits(other, params))
        return Spread(
            feeding.name,
            len(rows),
            int((rows != other).any(dim=-1).sum()),
            float(_differences(rows, other).max()),
            float(distance.mean()),
            float(distance.max()),
            from_nearest,
        )

    def plain(feeding: Feeding) -> Spread:
        plain_rows.append(fed_logits(target, text, near, feeding))
        return spread(feeding, plain_rows[-1], 0.0)

    def drafted(feeding: Feeding) -> Spread:
        other = fed_logits(target, text, near, feeding)
        nearest = torch.stack([_differences(each, other).amax(dim=-1) for each in plain_rows]).amin(dim=0)
        return spread(feeding, other, float(nearest.max()))

    largest = float(rows.double().abs().nan_to_num(posinf=0.0).max())
    spreads = tuple(map(plain, plain_feedings(limits, batch)))
    return baseline, Rounding(target.dtype, largest, spreads, tuple(map(drafted, drafted_feedings(limits, batch))))


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences: 0 between equal infinities, infinite for NaN."""
    return torch.where(a == b, 0.0, (a.double() - b.double()).abs().nan_to_num(nan=torch.inf))


@dataclass(frozen=True, slots=True)
class Feeding:
    """The shape of a forward over a text and its neighbours."""

    name: str
    depth: int = 0  # drafted and accepted tokens of the text in a forward; 0 is plain decoding
    siblings: int = 0  # wrong guesses next to each of them, which make the chain a tree
    neighbours: tuple[int, ...] = ()  # new tokens of each neighbour in the same forward, all with logits
    at_once: bool = False  # the whole text is one prompt; nothing is decoded
    rejected: int = 0  # wrong guesses in a chain after them; with routed experts these may move a row

    @property
    def own_rows(self) -> int:
        return 1 + self.depth * (1 + self.siblings) + self.rejected


ALONE = Feeding("one token at a time")  # plain decoding of one request: the reference for all other shapes


def plain_feedings(limits: Budget, batch: int) -> list[Feeding]:
    """Shapes of plain decoding under continuous batching other than `ALONE`, with as many rows as speculation has."""
    single = [feeding.own_rows for feeding in drafted_feedings(limits, 1)]
    rows = min((1 + min(limits.nodes, _MOST_NODES)) * batch, PIECE)
    return [
        Feeding("as one prompt", at_once=True),
        *(
            Feeding(f"one token at a time, {count} requests", neighbours=(1,) * (count - 1))
            for count in sorted({2, *single, max(2, batch)})
        ),
        Feeding(f"one token at a time with a prompt of {rows}", neighbours=(rows,)),
    ]


def drafted_feedings(limits: Budget, batch: int) -> list[Feeding]:
    """Shapes of speculation: chains, and trees if the drafter makes trees, for one request and for a batch of them."""
    nodes = min(limits.nodes, _MOST_NODES)
    depth = min(limits.depth, nodes)
    if limits.is_zero:
        return []
    found = [
        Feeding(f"chains of {depth}", depth, rejected=1),
        Feeding("chains of 1", 1, rejected=1),
        Feeding(f"chains of {depth}, all rejected", rejected=depth),
    ]
    width = min(limits.width, math.ceil(nodes / depth))
    if width > 1:
        found.append(Feeding(f"trees of {depth} x {width}", depth, width - 1, rejected=1))
    if batch > 1:
        found += [
            replace(own, name=f"{own.name}, {batch} requests", neighbours=(1 + nodes,) * (batch - 1))
            for own in list(found)
        ]
    return found


@torch.inference_mode()
def fed_logits(target: LanguageModel, text: Sequence[int], start: int, feeding: Feeding) -> Tensor:
    """Logits `[len(text) - start, vocab]` of one text, fed in a given shape from `start` on, after a prompt in pieces.

    Row i is what `text[start + i]` is chosen from. Drafted tokens are those of the text, so its path is committed.
    """
    text = list(text)
    cache, *others = caches = [target.new_cache() for _ in range(1 + len(feeding.neighbours))]

    def forward(ids: Sequence[int], shape: TreeShape, rows: Sequence[int], path: Sequence[int]) -> Tensor:
        segments = []
        for number, (other, count) in enumerate(zip(others, feeding.neighbours, strict=True), 1):
            other.rollback(0)
            tokens = [text[(7 * number + i) % len(text)] for i in range(count)][: target.context_length]
            segments.append(Segment(other, torch.tensor(tokens), chain_shape(len(tokens)), range(len(tokens))))
        segments.append(Segment(cache, torch.tensor(list(ids)), shape, rows))
        logits = target.forward(segments).logits
        cache.commit(path)
        return logits[len(logits) - len(rows) :].clone()

    try:
        prefilled = len(text) - 1 if feeding.at_once else start
        found: list[Tensor] = []
        for first in range(0, prefilled, PIECE):
            ids = text[first : min(first + PIECE, prefilled)]
            rows = [row for row in range(len(ids)) if first + row >= start - 1] if first + len(ids) >= start else []
            logits = forward(ids, chain_shape(len(ids)), rows, range(len(ids)))
            found += [logits] if rows else []
        while cache.length < len(text) - 1:
            ids, shape, path = _drafted(text[cache.length : -1], feeding, target.vocab_size)
            found.append(forward(ids, shape, range(len(ids)), path)[path])
        return torch.cat(found)
    finally:
        for each in caches:
            target.release_cache(each)


def _drafted(text: Sequence[int], feeding: Feeding, vocab: int) -> tuple[list[int], TreeShape, list[int]]:
    def other(token: int, number: int) -> int:
        return (token + 1 + number) % vocab

    first, *drafted = text[: 1 + feeding.depth]
    ids, parents, nodes = [first], [-1], [0]
    for token in drafted:
        # Wrong guesses come first, so that keeping the path moves cache entries.
        ids += [other(token, number) for number in range(feeding.siblings)] + [token]
        parents += [nodes[-1]] * (feeding.siblings + 1)
        nodes.append(len(ids) - 1)
    for number in range(feeding.rejected):
        parents.append(len(ids) - 1)
        ids.append(other(ids[-1], number))
    return ids, TreeShape(tuple(parents)), nodes
