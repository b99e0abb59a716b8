"""Limits on drafting in one step, a controller's view of a request, and its decision. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.errors import OptionError
from truedraft.options import check_whole

LEAST_KNOWN = 0.0025
"""Draft probabilities are clamped to this distance from 0 and 1."""
MOST_NODES = 1024
"""Most nodes of a tree that options may set: the target reads each, with a distribution for each."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits on one proposal, in addition to a drafter's own limits.

    Attributes:
        depth: most tokens on one path.
        width: most draws at one inner node.
        nodes: most nodes in the tree; 0 is plain decoding.
        min_probability: drafting stops after a token with a draft probability below this. The token itself is kept:
            whether a draw exists must not depend on the token that it drew.
        floor: drafting stops after a token with an estimated survival below this, which is kept as well.
        odds: maps a drafter's probability q of a token to its chance c of acceptance: logit c = odds[0] + odds[1] logit
            q. The survival of a token is the product of the chances on its path.
    """

    depth: int
    width: int = 1
    nodes: int = 1_000_000
    min_probability: float = 0.0
    floor: float = 0.0
    odds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.nodes) < 0 or not 0.0 <= self.min_probability <= 1.0:
            raise OptionError(f"a budget's limits are 0 or more and min_probability is in [0, 1], got {self}")

    @property
    def is_zero(self) -> bool:
        return self.depth == 0 or self.width == 0 or self.nodes == 0

    def cut(self, depth: int) -> Budget:
        return self if self.depth <= depth else replace(self, depth=max(depth, 0))

    def within(self, limits: Budget) -> Budget:
        return replace(
            self,
            depth=min(self.depth, limits.depth),
            width=min(self.width, limits.width),
            nodes=min(self.nodes, limits.nodes),
            min_probability=max(self.min_probability, limits.min_probability),
        )

    @property
    def looks(self) -> bool:
        """Whether the drafter's probabilities determine where drafting stops."""
        return self.min_probability > 0.0 or self.floor > 0.0

    def continues(self, probability: float, survival: float) -> bool:
        """Whether to draft below a token of this probability, on a path with this survival."""
        return probability >= self.min_probability and survival >= self.floor

    def chance(self, probability: float) -> float:
        q = min(max(probability, LEAST_KNOWN), 1.0 - LEAST_KNOWN)
        return 1.0 / (1.0 + math.exp(-self.odds[0]) * ((1.0 - q) / q) ** self.odds[1])


NO_DRAFT = Budget(0, 0, 0)
"""The budget that makes a step plain decoding."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Limits on drafting for one request, in addition to those of its engine.

    Attributes:
        drafters: names of the drafters to use; None uses all, and () is plain decoding.
        num_speculative_tokens: most tokens on a drafted path; None leaves that to the drafters' own options.

    Raises:
        OptionError: the number is not a whole number of 1 or more.
    """

    drafters: tuple[str, ...] | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            check_whole("num_speculative_tokens", self.num_speculative_tokens, 1)


@dataclass(frozen=True, slots=True)
class Hint:
    """A drafter's information on its next proposal before it makes it, from committed tokens only.

    Attributes:
        kind: proposals of one kind are about equally good: for prompt lookup the length of the matched n-gram.
        behind: committed tokens that it must read before it drafts.
        finds: whether there is anything to propose.
        confident: whether it can estimate the probability of its tokens, and stop by that (`Budget.floor`).
        guessed: expected fraction of a chain's tokens after the first that an inner drafter guesses, at no level.
    """

    kind: int = 0
    behind: int = 0
    finds: bool = True
    confident: bool = False
    guessed: float = 0.0


NOTHING_FOUND = Hint(finds=False)


@dataclass(slots=True, eq=False)
class RequestView:
    """A controller's view of one request that may be drafted for, before a step.

    No two requests without a seed share noise in an engine, and tokens of a request with one do not depend on budgets.
    So the results of a request's drafts may determine how much is drafted for others (docs/concepts.md, predictable
    choice).

    Attributes:
        context: tokens in the target's cache.
        remaining: tokens that may still be emitted; paths are always cut to this.
        limits: each drafter's own limits, by name, without drafters that failed for the request or lack memory.
        counters: of the request so far; read-only.
        hints: for each drafter by name a function that returns its `Hint`.
    """

    id: int
    params: SamplingParams
    context: int
    remaining: int
    limits: Mapping[str, Budget]
    counters: Counters
    hints: Mapping[str, Callable[[], Hint]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """The drafter of a request in the next step, and its budget; `NO_DRAFT` makes it plain decoding.

    Attributes:
        merged: further drafters, with proposals merged into the first one's tree in this order.
        reason: a word or two, for `--explain`.
        expected_tokens: estimate of the tokens that the step emits for the request; None without an estimate.
        speedup: estimated factor over plain decoding, of the step with all its requests; None without an estimate.
    """

    drafter: str
    budget: Budget
    merged: tuple[Decision, ...] = ()
    reason: str = ""
    expected_tokens: float | None = None
    speedup: float | None = None

    @property
    def is_zero(self) -> bool:
        return self.budget.is_zero and (not self.merged or all(each.is_zero for each in self.merged))

    @property
    def parts(self) -> tuple[Decision, ...]:
        every = (self, *self.merged) if self.merged else (self,)
        return tuple(each for each in every if not each.budget.is_zero)

    def cut(self, depth: int) -> Decision:
        if self.budget.depth <= depth and not self.merged:
            return self
        return replace(self, budget=self.budget.cut(depth), merged=tuple(each.cut(depth) for each in self.merged))


def check_nodes(option: str, value: int) -> None:
    """Refuse a number of drafted tokens below 1 or above `MOST_NODES` with an OptionError that names the option."""
    if not 1 <= value <= MOST_NODES:
        raise OptionError(f"{option} must be 1 or more and at most {MOST_NODES}, got {value}")


def nodes_of(branching: Sequence[int]) -> int:
    """Nodes of the tree with a given number of children per node at depth 0, 1, ...: 3 + 6 + 6 for (3, 2, 1).

    Raises:
        OptionError: a width below 1, no widths, or more than `MOST_NODES` nodes.
    """
    if not branching or min(branching) < 1:
        raise OptionError(f"branching holds the children at each depth, 1 or more each, got {tuple(branching)}")
    nodes = level = 0
    for width in branching:
        level = max(level, 1) * width
        nodes += level
        if nodes > MOST_NODES:
            given = "-".join(map(str, branching[:8])) + ("-..." if len(branching) > 8 else "")
            raise OptionError(f"branching {given} makes a tree of more than {MOST_NODES} nodes; draft fewer or shorter")
    return nodes
