"""Walks: a drafter is replayed along known answers, and the result for every smaller draft size is read off its drafts.

At each position of a trace the drafter is called for its largest proposal and then receives the next token of the
trace. The proposed nodes that match the trace say what a step starting there accepts:

- Deterministic candidates (greedy and seeded requests, prompt lookup, heads) are replayed exactly.
- Where a chain is sampled, token x was an accepted draft token with probability min(1, q(x) / p(x)), given the text
  (`theory.replay_factor`), independently at each position, so the product of the factors is the probability that a step
  accepts this far. For several draws at one position see below. A drafter with another q for each depth is
  evaluated along the trace from each position (`Drafter.along`).

A step at position i accepts a tokens and the next one starts at i + a + 1. The sum over positions of the probability
that a step starts there is the expected number of target calls. (The mean over all positions is another number, because
a step starts where the one before it failed.)

`ChainDraws` and `TreeDraws`: given the trace's token x at a position, with target distribution p and draft distribution
q, they give the probability that x was a drafted token that the rule accepted, over all that may be drawn. A_j(x) is
the probability that the j-th draw is x and the first that is accepted, by recursive rejection: with p_1 = p and
p_(j+1) = norm(max(0, p_j - q_j)),

    A_j(x) = R_j E min(p_j(x), q_j(x)),   R_(j+1) = R_j (1 - sum of min(p_j, q_j)),   R_1 = 1,

and the sum over j is divided by p(x), because x is given; acceptance at one position is independent of acceptance at
another, given the text. One draw gives A_1(x) / p(x) = min(1, q(x) / p(x)). Independent draws have q_j = q, so the sum
is exact. Without replacement q_j has lost the rejected tokens, each drawn from norm(max(0, q_j - p_j)): the mean over
those is estimated from a few samples, which leaves the expected calls of an answer unbiased, because no position counts
twice in one way to decode it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from truedraft.core.budget import Budget, nodes_of
from truedraft.core.intervals import Numbers
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.core.theory import replay_factor
from truedraft.core.token_view import TokenView
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.errors import DrafterError, OptionError, TruedraftError
from truedraft.measure.replay import NEVER
from truedraft.measure.traces import AnswerTrace, draws_several, is_drawn, shown_to
from truedraft.models.base import LanguageModel

_TINY = 1e-300


class ChainDraws:
    """Several independent chains; the state is the number of chains that match the trace so far. If the j-th of m draws
    is x and accepted, none before it was x; each of the m - j after it is x with probability q(x).
    """

    def __init__(self, chains: int) -> None:
        self._chains = chains

    def factors(self, p_x: float, p: Tensor | None, q: Tensor | None, token: int) -> Numbers:
        """`[chains + 1, chains + 1]`: probability that x is accepted and n chains match it, of m before.

        Args:
            p_x: the target's probability of the trace's token; 0 if rounding lost it.
            p: `[vocab]`: the target's distribution, needed for several draws.
            q: `[vocab]`: the draft's distribution; None where nothing was drawn.
        """
        found = np.zeros((self._chains + 1, self._chains + 1))
        if q is None:
            return found
        assert p is not None
        accepted = _accepted(p, q, token, self._chains) / max(p_x, float(p[token]), _TINY)
        share = min(1.0, float(q[token]))
        for came in range(1, self._chains + 1):
            for draw in range(came):
                left = came - draw - 1
                for more in range(left + 1):
                    chance = math.comb(left, more) * share**more * (1.0 - share) ** (left - more)
                    found[came, 1 + more] += accepted[draw] * chance
        return found

    def survival(self, places: Sequence[Numbers]) -> Numbers:
        """The probability `[places]` that a step accepts its first 1, 2, ... tokens."""
        state = np.eye(self._chains + 1)[-1]
        states = itertools.accumulate(places, operator.matmul, initial=state)
        return np.array([state.sum() for state in itertools.islice(states, 1, None)])


class TreeDraws:
    """Draws without replacement, with a fixed number per node of a depth or by ranks; one per node is a chain.

    Args:
        branching: draws per node at depth 0, 1, ...; with `ranks` the most.
        seed: of sampled rejected draws.
        ranks: the draws of the largest tree, the best ones first; None is the same number at every node of a depth.
    """

    def __init__(self, branching: Sequence[int], seed: int, ranks: RankTree | None = None) -> None:
        self._branching, self._ranks = branching, ranks
        self._random = np.random.default_rng(abs(seed))

    def factors(self, p_x: float, p: Tensor | None, q: Tensor | None, token: int) -> Numbers:
        """`[draws]`: probability that x is accepted as one of the first 1, 2, ... draws."""
        draws = max(self._branching)
        if q is None:
            return np.zeros(draws)
        if draws == 1:  # which needs no whole distribution
            return np.array([replay_factor(min(p_x, 1.0), min(float(q[token]), 1.0)) if p_x > 0.0 else 1.0])
        assert p is not None
        return np.cumsum(_accepted(p, q, token, draws, self._random)) / max(p_x, float(p[token]), _TINY)

    def survival(self, places: Sequence[Numbers]) -> Numbers:
        """As of chains; by ranks `[nodes + 1, places]`, with the first 0, 1, ... draws."""
        if self._ranks is None:
            return np.cumprod([each[width - 1] for each, width in zip(places, self._branching, strict=False)])
        chances = [np.diff(each, prepend=0.0) for each in places]
        found = np.zeros((len(self._ranks) + 1, len(places)))
        accepted: dict[RankPath, float] = {(): 1.0}
        for number, path in enumerate(self._ranks.paths, 1):
            found[number] = found[number - 1]
            if len(path) <= len(places):
                accepted[path] = accepted[path[:-1]] * chances[len(path) - 1][path[-1]]
                found[number, len(path) - 1] += accepted[path]
        return found


def draws_of(drafter: Drafter, seed: int) -> ChainDraws | TreeDraws:
    """How a drafter draws for sampled requests."""
    if not draws_several(drafter):
        return TreeDraws((1,) * max(1, drafter.limits.depth), seed)
    if drafter.kinds == {DrawKind.INDEPENDENT}:
        return ChainDraws(drafter.branching[0])
    return TreeDraws(drafter.branching, seed, drafter.ranks)


def _accepted(p: Tensor, q: Tensor, token: int, draws: int, random: np.random.Generator | None = None) -> Numbers:
    """A_j of a token for each draw, `[draws]`; with `random` without replacement, after rejected draws that it samples.

    Only ids that may be drawn are followed, and of the others their mass. One sample of rejected draws is enough: it
    has no bias, and adds less than a hundredth of the variance among tokens.
    """
    found = np.zeros(draws)
    if not q[token] > 0.0:
        return found
    whole, drawn = (each.double().cpu().numpy() for each in (p, q))
    ids = np.flatnonzero(drawn)
    own = int(np.searchsorted(ids, token))
    left, drawn = whole[ids], drawn[ids]  # p_j and q_j
    other, reach = max(0.0, whole.sum() - left.sum()), 1.0
    for number in range(draws):
        found[number] = reach * min(left[own], drawn[own])
        if number + 1 == draws:
            break
        above = left - drawn
        left = above.clip(min=0.0)
        beyond = left - above
        reach *= beyond.sum()
        mass = left.sum() + other or 1.0
        left, other = left / mass, other / mass
        if random is not None:
            sums = beyond.cumsum()
            sampled = int(np.searchsorted(sums, random.random() * sums[-1], "right"))
            drawn[min(sampled, len(drawn) - 1)] = 0.0
            drawn /= drawn.sum() or 1.0
    return found


_BATCH = 16


@dataclass(frozen=True)
class Steps:
    """Result of decoding one trace with several draft sizes; expected values where sampling is random."""

    calls: Numbers  # `[sizes]`: target calls after the prompt's
    visits: Numbers  # `[sizes, places]`: probability that a step starts at a position
    nodes: Numbers  # `[sizes, places]`: nodes drafted there
    depths: Numbers  # `[sizes, places]`: depth of that draft
    reach: Numbers  # `[sizes, places, depth]`: probability that a step there accepts at least 1, 2, ... tokens


@dataclass(frozen=True)
class Walk:
    """What a drafter proposes along one trace at its largest size.

    Worked example, five tokens and deterministic chains of at most two: a row of `fewest` for each of four positions,
    (1, 2), (never, never), (1, never), (never, never). A chain of two accepts 2 at the first position, so the next step
    starts at the fourth and accepts none: two calls for four tokens. A chain of one accepts 1, then 1: also two calls.

    `survival` is the probability `[places, depth]` that the draft is accepted down to this depth if the nodes are in
    the budget; for draws by ranks `[nodes + 1, places, depth]`, for a budget of 0, 1, ....
    """

    fewest: Numbers  # `[places, depth]`, int64: smallest budget with the true continuation to a depth, or `NEVER`
    survival: Numbers
    depths: Numbers  # `[places, nodes + 1]`: depth of the first 0, 1, ... nodes of the proposal.
    sizes: Numbers  # `[places]`: nodes of the whole proposal, or the budget that it uses
    drafted: Numbers | None = None  # `[places, nodes + 1]`: nodes drafted with a budget; None where all of it is used
    guessed: float = 0.0  # share of a chain's tokens that took no level of drafting, as the drafter predicts it

    @property
    def tokens(self) -> int:
        return len(self.sizes)

    def steps(self, budgets: Sequence[int]) -> Steps:
        requested = np.asarray(budgets, np.int64)[:, None]
        survival = self.survival
        if survival.ndim == 3:
            survival = survival[np.minimum(requested[:, 0], len(survival) - 1)]
        reach = survival * (self.fewest[None] <= requested[..., None])  # [sizes, places, depth]
        nodes = np.minimum(requested, self.sizes[None])
        # P(exactly a accepted) = P(a or more) - P(a + 1 or more), for a = 0, 1, ...
        exactly = -np.diff(reach, axis=2, prepend=1.0, append=0.0)
        width = exactly.shape[2]
        visits = np.zeros((len(budgets), self.tokens + width))
        visits[:, 0] = 1.0
        for place in range(self.tokens):
            visits[:, place + 1 : place + 1 + width] += visits[:, place, None] * exactly[:, place]
        visits = visits[:, : self.tokens]
        places = np.arange(self.tokens)
        drafted = nodes if self.drafted is None else self.drafted[places[None], nodes]
        return Steps(visits.sum(axis=1), visits, drafted, self.depths[places[None], nodes], reach)


def check_walkable(drafter: Drafter, drawn: bool) -> None:
    """Refuse drafters for which acceptance along a trace is not known; OptionError says which, and what to do."""
    name, limits = drafter.name, drafter.limits
    if list(drafter.members.values()) != [drafter]:
        raise OptionError(
            f"{name!r} is made of several drafters, and a plan is of each by itself; name them one by one"
        )
    if drafter.features is not None and drafter.features.rows == "tree":
        raise OptionError(
            f"drafter {name!r} learns from the target's output after its own guesses, which answers do not "
            "show; measure it with truedraft bench"
        )
    if not drawn or drafter.kinds <= {DrawKind.DETERMINISTIC}:
        return
    how = "plan with --temperature 0 or a --seed"
    if not draws_several(drafter) and (drafter.kinds != {DrawKind.INDEPENDENT} or limits.width > 1):
        raise OptionError(
            f"drafter {name!r} draws candidates and keeps the best of several paths, whose acceptance at a temperature "
            f"is not known from the target's answer; {how}, or take one that drafts chains"
        )
    if limits.min_probability > 0.0:
        raise OptionError(
            f"drafter {name!r} stops by min_probability, so its length at a temperature is not known from the target's "
            f"answer; {how}, or leave min_probability out"
        )


@torch.inference_mode()
def walk_along(
    drafter: Drafter, target: LanguageModel, traces: Sequence[AnswerTrace], *, batch: int = _BATCH
) -> list[Walk]:
    """Replay a drafter along answers, one token at a time.

    It is checked against the target, has its largest size, and must not be used elsewhere during the walk; traces hold
    the features that it declares. Raises OptionError if acceptance is not known along a trace, or not from what these
    hold; DrafterError if it failed.
    """
    check_walkable(drafter, any(is_drawn(trace.params) for trace in traces))
    if draws_several(drafter) and any(is_drawn(trace.params) and not trace.dists for trace in traces):
        raise OptionError(
            f"drafter {drafter.name!r} draws several tokens for one place, and these traces do not hold the target's "
            "distributions; give trace_answers this drafter"
        )
    found: list[Walk] = []
    for first in range(0, len(traces), batch):
        replays = [_Replay(-number - 1, trace, drafter) for number, trace in enumerate(traces[first : first + batch])]
        try:
            with target.stepping():
                _run(drafter, replays)
        except TruedraftError:
            raise
        except Exception as error:
            raise DrafterError(
                f"drafter {drafter.name!r} failed while answers were replayed ({type(error).__name__}: {error})"
            ) from error
        finally:
            for replay in replays:
                replay.end()
        found += [replay.walk() for replay in replays]
    return found


def _run(drafter: Drafter, replays: Sequence[_Replay]) -> None:
    for replay in replays:
        replay.begin()
    for place in range(max(replay.trace.places for replay in replays)):
        active = [replay for replay in replays if place < replay.trace.places]
        made: dict[_Replay, Proposal] = {}
        if along := [each for each in active if each.walks_along]:
            rests = [each.rest for each in along]
            dists = drafter.along([each.request for each in along], [each.budget() for each in along], rests)
            for replay, own in zip(along, dists, strict=True):
                replay.note_along(own)
        if proposing := [each for each in active if not each.walks_along]:
            requests, budgets = [each.request for each in proposing], [each.budget() for each in proposing]
            proposals = drafter.propose(requests, budgets, [each.noise() for each in proposing])
            made |= zip(proposing, proposals, strict=True)
        drafter.observe([each.request for each in active], [each.step(made.get(each)) for each in active])
        for replay in active:
            if place + 1 == replay.trace.places:
                replay.end()


class _Replay:
    """A request along a trace, with a negative number, because the engine counts up from 0."""

    def __init__(self, number: int, trace: AnswerTrace, drafter: Drafter) -> None:
        self.trace = trace
        self._drafter = drafter
        self._tokens = list(trace.prompt)
        self.request = DraftRequest(number, trace.params, TokenView(self._tokens), kept=False)
        self._drawn = is_drawn(trace.params)
        self._draws_tokens = self._drawn and not drafter.kinds <= {DrawKind.DETERMINISTIC}
        self.walks_along = drafter.walks_along and self._draws_tokens
        self._step = 0
        self._begun = False
        self._guessed = 0.0
        self._held: list[list[int]] = []  # by position: nodes that match the continuation, by depth
        self._draws, self._places = draws_of(drafter, trace.seed), list[Numbers]()
        self._depths: list[list[int]] = []
        self._survival: list[Numbers] = []  # by position, where the drafter is evaluated along the trace

    @property
    def _place(self) -> int:
        return len(self._tokens) - len(self.trace.prompt) - 1

    @property
    def rest(self) -> tuple[int, ...]:
        return self.trace.tokens[self._place + 1 :]

    def begin(self) -> None:
        self._begun = True
        self._drafter.begin(self.request)
        while self._place < 0 and self._step < len(self.trace.seen):
            self._drafter.observe([self.request], [self.step(None)])

    def end(self) -> None:
        if self._begun:
            self._begun = False
            try:
                self._guessed = self._drafter.hint(self.request).guessed
            finally:
                self._drafter.end(self.request)

    def budget(self) -> Budget:
        """The largest budget allowed here; one token where q is the same for every depth."""
        limits, left = self._drafter.limits, self._allowed(self._place)
        alike = self._drafter.levels is None and not self._drafter.walks_along
        return limits.cut(min(left, 1) if self._draws_tokens and limits.width == 1 and alike else left)

    def _allowed(self, place: int) -> int:
        return max(0, self.trace.remaining(place) - 1)

    def noise(self) -> KeyedNoise:
        return KeyedNoise(self.trace.seed, len(self._tokens), self._place + 1)

    def step(self, proposal: Proposal | None) -> StepOutcome:
        if proposal is not None:
            self._note(proposal)
        shown = shown_to(self._drafter.features, self.trace, self._step, proposal or Proposal.empty())
        self._tokens.extend(self.trace.seen[self._step].tokens)
        self._step += 1
        return shown

    def _note(self, proposal: Proposal) -> None:
        if self._drawn:
            draws, q = proposal.draws[0], None
            if draws and draws[0].dist >= 0:
                assert proposal.probs is not None
                q = proposal.probs[draws[0].dist]
            self._places.append(self._factors(self._draws, self._place + 1, q))
        self._held.append([node + 1 for node in proposal.tree.along(self.rest)])
        depths = proposal.tree.shape.depths if len(proposal.tree) else ()
        self._depths.append([0, *itertools.accumulate(depths, max)])

    def _factors(self, draws: ChainDraws | TreeDraws, place: int, q: Tensor | None) -> Numbers:
        p = self.trace.dists[place] if self.trace.dists else None
        return draws.factors(self.trace.probs[place], p, q, self.trace.tokens[place])

    def note_along(self, dists: Tensor) -> None:
        draws, places = draws_of(self._drafter, self.trace.seed), []
        for place, (q, token) in enumerate(zip(dists, self.rest, strict=False), self._place + 1):
            finite = bool(q[token].isfinite())  # nothing is drawn by broken logits
            places.append(self._factors(draws, place, q if finite else None))
        self._survival.append(draws.survival(places))
        self._held.append([])
        branching = self._drafter.branching or (1,) * len(dists)
        widths = itertools.accumulate(branching[: len(dists)], operator.mul)
        self._depths.append([0, *(depth for depth, width in enumerate(widths, 1) for _ in range(width))])

    def walk(self) -> Walk:
        if self._draws_tokens:
            ranks = self._drafter.ranks if draws_several(self._drafter) else None
            return self._of_levels() if ranks is None else self._of_ranks(ranks)
        longest, most = (max([1, *map(len, each)]) for each in (self._held, self._depths))
        fewest = np.full((len(self._held), longest), NEVER, np.int64)
        for place, held in enumerate(self._held):
            fewest[place, : len(held)] = held
        depths = np.array([each + [each[-1]] * (most - len(each)) for each in self._depths], np.int64)
        sizes = np.array([len(each) - 1 for each in self._depths], np.int64)
        survival = (fewest < NEVER).astype(np.float64)
        return Walk(fewest, survival, depths.reshape(-1, most), sizes, guessed=self._guessed)

    def _survivals(self, longest: int) -> Iterator[tuple[int, int, Numbers]]:
        for place in range(len(self._held)):
            depth = min(self._allowed(place), longest)
            own = self._survival[place] if self._survival else self._draws.survival(self._places[place : place + depth])
            yield place, depth, own[..., :depth]

    def _of_levels(self) -> Walk:
        """Walk of sampled tokens; a budget contains a level whole or not at all."""
        branching, places = self._drafter.branching or (1,) * self._drafter.limits.depth, len(self._held)
        length = len(branching)
        levels = np.array([nodes_of(branching[:depth]) for depth in range(1, length + 1)])
        allowed, survival = np.zeros(places, np.int64), np.zeros((places, length))
        for place, depth, own in self._survivals(length):
            allowed[place] = depth
            survival[place, : len(own)] = own
        fewest = np.where(np.arange(1, length + 1)[None] <= allowed[:, None], levels[None], NEVER)
        within = np.searchsorted(levels, np.arange(levels[-1] + 1), side="right")  # whole levels in a budget
        depths = np.minimum(within[None], allowed[:, None])
        taken = np.concatenate([[0], levels])[allowed]
        drafted = self._drafted(depths) if self._drafter.limits.width > 1 else None
        return Walk(fewest, survival, depths, taken, drafted, self._guessed)

    def _of_ranks(self, ranks: RankTree) -> Walk:
        places, most = len(self._held), len(ranks)
        allowed, survival = np.zeros(places, np.int64), np.zeros((most + 1, places, ranks.depth))
        for place, depth, own in self._survivals(ranks.depth):
            allowed[place] = depth
            survival[:, place, : own.shape[1]] = own
        lengths = np.array([0, *map(len, ranks.paths)])  # root and each path
        fits = lengths[None] <= allowed[:, None]
        depths = np.minimum(np.maximum.accumulate(lengths)[None], allowed[:, None])
        fewest = np.where(np.arange(ranks.depth)[None] < allowed[:, None], 1, NEVER)
        sizes = np.where(allowed > 0, most, 0)
        return Walk(fewest, survival, depths, sizes, fits.cumsum(axis=1) - 1, self._guessed)

    def _drafted(self, depths: Numbers) -> Numbers:
        found = np.zeros_like(depths)
        for place, own in enumerate(self._depths):
            counts = np.bincount(np.array(own[1:], np.int64), minlength=int(depths.max(initial=0)) + 1).cumsum()
            found[place] = counts[depths[place]]
        return found
