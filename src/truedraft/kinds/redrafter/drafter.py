"""ReDrafter as drafter: beams of one recurrent head, merged into a tree at each step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.tree import TokenTree, narrowed
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.heads.base import HeadDrafter, SizePlan
from truedraft.drafters.heads.calibration import FACT, Calibration, beam_curves
from truedraft.errors import OptionError
from truedraft.kinds.redrafter.beams import BeamTrees
from truedraft.kinds.redrafter.module import RedrafterHead, RedrafterRunner
from truedraft.kinds.redrafter.sampled_beams import SampledBeams
from truedraft.models.base import LanguageModel

DEFAULT_BEAMS, DEFAULT_NODES = 8, 16
"""Default sizes; the best ones depend on the machine and are measured (planning)."""
DRAWN_FROM = 0.8
"""The temperature from which drawn paths had more accepted tokens than chosen ones
(benchmarks/results/drawn_beams.jsonl, docs/drafters.md)."""


_CHOSEN, _DRAWN = frozenset({DrawKind.DETERMINISTIC}), frozenset({DrawKind.WITHOUT_REPLACEMENT})
_LIMITS = {"beams": (1, 256), "length": (1, 32), "nodes": (0, 1024)}
"""Minimum and maximum; search costs grow with beams times length, and merging with the square of it."""


class Redrafter(HeadDrafter[RedrafterHead, BeamTrees]):
    """Drafts with a recurrent head on the target's last hidden state (ReDrafter 2403.09919).

    Beam search keeps the best continuations. They and the dropped ones are merged into a tree where they share
    prefixes, and its best nodes are proposed, by calibrated survival (`AcceptanceOdds`) or else the head's own
    probabilities. They are verified as deterministic candidates. (Verifying them as draws, as the published code does,
    is not exact.)

    Requests at a temperature of at least `DRAWN_FROM` get paths drawn without replacement instead, verified by
    recursive rejection, if their rule verifies such draws. Seeded requests get the paths that their noise makes
    likeliest.

    On a device the host waits once per step for the shape of the merged tree; for drawn paths, once per level.

    Args:
        beams: number of kept continuations; None is 8 until measured.
        length: number of drafted tokens of each; None is what the head was trained for.
        nodes: maximum number of nodes of a proposal, the likeliest; None is 16 until measured.
        sampled: whether requests at a temperature above 0 get drawn paths; None: as above.

    Raises:
        OptionError: beams outside 1 to 256, length outside 1 to 32, or nodes outside 0 to 1,024.
        ModelError: the calibration among the facts is damaged.
    """

    name = "redrafter"

    def __init__(
        self,
        head: RedrafterHead,
        *,
        beams: int | None = None,
        length: int | None = None,
        nodes: int | None = None,
        sampled: bool | None = None,
    ) -> None:
        super().__init__(head)
        self.sizes_chosen = not (beams is None and length is None and nodes is None)
        self.beams = DEFAULT_BEAMS if beams is None else beams
        self.length = head.config.length if length is None else length
        self.nodes = DEFAULT_NODES if nodes is None else nodes
        for option, (least, most) in _LIMITS.items():
            given = getattr(self, option)
            if not least <= given <= most:
                raise OptionError(f"{option} of a recurrent drafter must be {least} to {most}, got {given}")
        self.sampled = sampled
        self._calibration = Calibration.of(self.facts.get(FACT, {}))
        self.limits = Budget(self.length, self.beams, min(self.nodes, self.beams * self.length))

    def with_sizes(self, beams: int, length: int, nodes: int) -> Redrafter:
        """With other sizes, and without requests."""
        return Redrafter(self.head, beams=beams, length=length, nodes=nodes, sampled=self.sampled)

    def settled(self, params: SamplingParams) -> Redrafter:
        """With `sampled` set as for requests with such options."""
        if self.sampled is not None:
            return self
        beams, length, nodes = (self.beams, self.length, self.nodes) if self.sizes_chosen else (None, None, None)
        return Redrafter(self.head, beams=beams, length=length, nodes=nodes, sampled=self._draws(params))

    @property
    def kinds(self) -> frozenset[DrawKind]:
        if self.sampled is None:
            return _CHOSEN | _DRAWN
        return _DRAWN if self.sampled else _CHOSEN

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        """Only chosen paths if drawn ones cannot be verified, unless `sampled` is set."""
        return self.kinds if self.sampled is not None or judged >= _DRAWN else _CHOSEN

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """Every replayed width and length; drawn paths, which were not, are used only if at least as good."""
        if self.sizes_chosen or (self.sampled is not None and self._draws(params)):
            return ()
        plans = []
        timed: dict[int, Redrafter] = {}
        curves = beam_curves(self.facts, params)
        for each in curves:
            longest = max(other.length for other in curves if other.beams == each.beams)
            timed.setdefault(each.beams, self.with_sizes(each.beams, longest, each.beams * longest))
            sized = functools.partial(self.with_sizes, each.beams, each.length)
            plans.append(SizePlan(f"{each.beams} beams of {each.length}", each.curve, timed[each.beams], sized))
        return plans

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """Replayed at this length or the nearest; None if `sampled` requests drawn paths."""
        if self.sampled is not None and self._draws(params):
            return None
        curves = [each for each in beam_curves(self.facts, params) if each.beams == self.beams]
        return min(curves, key=lambda each: abs(each.length - self.length)).curve if curves else None

    def _runner_for(self, target: LanguageModel) -> BeamTrees:
        return BeamTrees(RedrafterRunner(self.head, target), self.length, self._recorder(target))

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = [Proposal.empty()] * len(batch)
        requested = [
            place
            for place, (request, budget) in enumerate(zip(batch, budgets, strict=True))
            if not budget.is_zero and self.nodes and self._vectors.get(request.id) is not None
        ]
        drawn = [place for place in requested if self._draws(batch[place].params, batch[place].judged)]
        chosen = [place for place in requested if place not in drawn]
        for places, propose in ((chosen, self._choose), (drawn, self._draw)):
            if places:
                inputs = [batch[i] for i in places], [budgets[i] for i in places], [noise[i] for i in places]
                made = propose(*inputs)
                for place, proposal in zip(places, made, strict=True):
                    proposals[place] = proposal
        return proposals

    def _draws(self, params: SamplingParams, judged: frozenset[DrawKind] | None = None) -> bool:
        """Whether requests get drawn paths; `judged`: the kinds that their rule verifies."""
        if params.greedy or params.seeded or self.sampled is not None:
            return not params.greedy and (params.seeded or bool(self.sampled))
        return params.temperature >= DRAWN_FROM and (judged is None or judged >= _DRAWN)

    def _choose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        hidden, drawn = self._last_vectors(batch)
        depths = [min(budget.depth, self.length) for budget in budgets]
        odds = [self._calibration(request.params) for request in batch]
        # So that other requests' budgets change nothing.
        trees = self._running[0].trees(hidden, drawn, depths, odds, self._width, self.nodes)
        return [Proposal.deterministic(self._within(*each)) for each in zip(trees, budgets, strict=True)]

    def _within(self, tree: TokenTree, budget: Budget) -> TokenTree:
        if budget.width < self._width:
            tree = narrowed(tree, budget.width)
        return tree.first(min(budget.nodes, self.nodes))

    def _draw(self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[Proposal]:
        hidden, drawn = self._last_vectors(batch)
        within = [Budget(each.depth, each.width, min(each.nodes, self.nodes), each.min_probability) for each in budgets]
        beams = SampledBeams(self._running[0], self._width, min(self.length, max(budget.depth for budget in budgets)))
        return beams.propose(batch, within, noise, hidden, drawn)

    @property
    def _width(self) -> int:
        return min(self.beams, self._running[1].vocab_size)
