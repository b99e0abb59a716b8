"""Measure what proposals of a drafter cost: it is asked as the engine would ask it, but without the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposals import Proposal
from truedraft.core.sampling import SamplingParams
from truedraft.core.trees import chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome, TokenView
from truedraft.errors import DrafterError, TruedraftError
from truedraft.models.base import LanguageModel, Segment
from truedraft.planning.machine import wait_for
from truedraft.planning.rounds import Effort, Progress, in_rounds
from truedraft.theory import DraftCost, DraftPoint

_PROMPT_TOKENS = 128
_GROWTH = 256  # tokens after which a new request starts
_PERIOD = 16
_ALL_DEPTHS = 8  # beyond these, only every doubling
_ACCEPTED_SHARES = (0.0, 1.0, 0.5)


@torch.inference_mode()
def measure_drafter(
    drafter: Drafter,
    target: LanguageModel,
    *,
    params: SamplingParams | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DraftCost:
    """Time `propose` and `observe` for one request, at budgets of depth 1 up to the drafter's own.

    The target runs before each proposal, untimed, as it does between two steps: without it, a small draft would be
    found in the processor's caches, and look cheaper than it is. The request's text repeats itself, so that drafters
    that copy find something. Proposals are accepted in none, all or half of their depth in turn, so the catch-up that
    follows full acceptance has its share. Each depth is asked for in interleaved rounds; the median counts. A proposal
    counts for the depth that it has, not the one allowed.

    Args:
        drafter: must fit the target, and not run elsewhere at the same time.
        target: names the vocabulary and, for drafters that want them, gives hidden vectors.
        params: sampling options, for laws and draws cost time; None is greedy.
        effort: how long to measure; None takes 4 seconds, and three rounds at least.
        progress: told after each proposal.
        clock: seconds.

    Returns:
        The cost; for a drafter that finds nothing to propose, that of looking.

    Raises:
        CompositionError: the drafter does not fit the target.
        DrafterError: the drafter failed.
    """
    drafter.check(target)
    if drafter.limits.is_zero:
        return DraftCost(())
    found: dict[int, list[tuple[int, float]]] = {}  # by depth: nodes and seconds
    rehearsal = _Rehearsal(drafter, target, params or SamplingParams(), clock)

    def measure(depth: int, number: int) -> None:
        proposal, seconds = rehearsal.step(depth, _ACCEPTED_SHARES[number % len(_ACCEPTED_SHARES)])
        if number >= 0:
            found.setdefault(proposal.tree.shape.depth, []).append((len(proposal.tree), seconds))

    try:
        depths = _depths(min(drafter.limits.depth, rehearsal.most_depth))
        in_rounds(depths, measure, effort or Effort(4.0, 3, 60), progress, f"proposals of {drafter.name}", clock)
    except TruedraftError:
        raise
    except Exception as error:
        raise DrafterError(
            f"drafter {drafter.name!r} failed while its cost was measured ({type(error).__name__}: {error})"
        ) from error
    finally:
        rehearsal.close()
    return DraftCost(_points(found))


def _depths(limit: int) -> list[int]:
    """Depths to measure: all small ones, then every doubling, and the limit."""
    depths = set(range(1, min(limit, _ALL_DEPTHS) + 1)) | {limit}
    depth = 2 * _ALL_DEPTHS
    while depth < limit:
        depths.add(depth)
        depth *= 2
    return sorted(depths)


def _points(found: dict[int, list[tuple[int, float]]]) -> tuple[DraftPoint, ...]:
    """Medians by depth; empty proposals count only if there were no others."""
    drafted = sorted(depth for depth in found if depth > 0) or [0]
    points = []
    for depth in drafted:
        nodes = round(median(nodes for nodes, _ in found[depth]))
        points.append(DraftPoint(max(1, depth), max(1, nodes), median(seconds for _, seconds in found[depth])))
    return tuple(points)


class _Rehearsal:
    """A request that lives through steps as in the engine, with made-up verdicts.

    Args:
        drafter: is told of it.
        target: gives hidden vectors once, if the drafter wants them.
        params: of the request.
        clock: seconds.

    Attributes:
        most_depth: the deepest proposal that fits into the context.
    """

    def __init__(
        self, drafter: Drafter, target: LanguageModel, params: SamplingParams, clock: Callable[[], float]
    ) -> None:
        self._drafter = drafter
        self._target = target
        self._params = params
        self._clock = clock
        own = getattr(drafter, "model", None)
        context = min(target.context_length, own.context_length if isinstance(own, LanguageModel) else 1 << 62)
        self._prompt = max(1, min(_PROMPT_TOKENS, context // 2))
        # Beyond the prompt: its first token, that of the first step, and one step with a token of its own.
        self._limit = max(min(context, self._prompt + _GROWTH), self._prompt + 4)
        self.most_depth = self._limit - self._prompt - 3
        self._vector = _last_hidden(target) if drafter.features is not None else None
        self._between = target.new_cache()
        self._tokens = torch.zeros(1, dtype=torch.int64, device=target.device)
        self._begun = 0
        self._steps = 0
        self._request: DraftRequest | None = None
        self._seen: list[int] = []  # its tokens

    def step(self, depth: int, accepted_share: float) -> tuple[Proposal, float]:
        """One step; returns the proposal and the seconds that the drafter took."""
        with self._target.stepping():
            return self._step(depth, accepted_share)

    def _step(self, depth: int, accepted_share: float) -> tuple[Proposal, float]:
        request = self._request
        if request is None or len(request.tokens) + depth + 1 > self._limit:
            request = self._start()
        limits = self._drafter.limits
        budget = Budget(depth, limits.width, limits.nodes, limits.min_probability)
        noise = KeyedNoise(0, len(request.tokens), self._steps, greedy=self._params.greedy)
        self._steps += 1
        self._run_target()
        started = self._now()
        proposal = self._drafter.propose([request], [budget], [noise])[0]
        proposed_s = self._now() - started
        shape = proposal.tree.shape
        longest = shape.path(shape.depths.index(shape.depth)) if len(shape) else ()
        path = longest[: round(accepted_share * len(longest))]
        tokens = (*(proposal.tree.token_list[node] for node in path), self._text(len(request.tokens) + len(path)))
        return proposal, proposed_s + self._observe(request, StepOutcome(proposal, path, tokens, self._vector))

    def _run_target(self) -> None:
        """As between two proposals: the target's weights then fill the processor's caches, and the draft's are gone."""
        self._target.forward([Segment(self._between, self._tokens, chain_shape(1), (0,))])
        self._between.commit(())

    def _start(self) -> DraftRequest:
        """A new request, its prompt read and its first proposal made: that one reads the prompt too."""
        self.end()
        self._begun += 1
        # The engine counts its requests up from 0; two of them may share a drafter.
        self._seen = [self._text(place) for place in range(self._prompt)]
        request = DraftRequest(-self._begun, self._params, TokenView(self._seen))
        self._request = request
        self._drafter.begin(request)
        nothing = Proposal.empty()
        self._observe(request, StepOutcome(nothing, (), (self._text(self._prompt),), self._vector))
        self.step(1, 0.0)
        return request

    def _observe(self, request: DraftRequest, outcome: StepOutcome) -> float:
        self._seen.extend(outcome.tokens)
        started = self._now()
        self._drafter.observe([request], [outcome])
        return self._now() - started

    def _text(self, place: int) -> int:
        """The token at a place of a text that repeats itself."""
        return (place % _PERIOD * 7919 + 1) % self._target.vocab_size

    def _now(self) -> float:
        wait_for(self._target.device)
        return self._clock()

    def end(self) -> None:
        """The request is over."""
        request, self._request = self._request, None
        if request is not None:
            self._drafter.end(request)

    def close(self) -> None:
        """The rehearsal is over."""
        self.end()
        self._target.release_cache(self._between)


def _last_hidden(target: LanguageModel) -> Tensor:
    """A vector `[1, width]` that entered the target's LM head."""
    cache = target.new_cache()
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    hidden = target.forward([Segment(cache, token, chain_shape(1), (0,))]).hidden
    target.release_cache(cache)
    return hidden
