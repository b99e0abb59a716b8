"""Seeded and greedy requests: the shipped rule against plain Python, and its distribution in every cell.

Over two tokens a choice depends only on the difference of their Gumbel numbers, which is logistic. So the line of
differences splits into cells, and the probability of an answer is a sum of products of their widths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.cells import verdicts_of
from truedraft.certify.worlds import Case, Choice, Prefix, World, build
from truedraft.core.noise import KeyedNoise, Noise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree, shape_of
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import Rule
from truedraft.verification.exact import distance, target_dist

_HOST = torch.device("cpu")
_NOISES = 3
_WIDE, _WIDE_CASES = 4099, 48
_MARGIN = 1e-13
"""Distance from a predicted edge at which both sides are probed; a quarter of it bounds the probability between them.
"""

_DRAWN, _FIXED, _REMOVED = (
    tuple(Choice(0, kind, rank) for rank in range(2))
    for kind in (DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC, DrawKind.WITHOUT_REPLACEMENT)
)


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One request with its expected verdict by plain Python; `noise` is None for a greedy request."""

    case: Case
    noise: KeyedNoise | None
    expected: Verdict

    @property
    def greedy(self) -> bool:
        return self.noise is None


def expected_verdict(case: Case, noise: KeyedNoise | None) -> Verdict:
    """Take argmax(log p + G) or argmax p, the lowest id among equals, and continue below the child with that token."""
    ids, parents = case.proposal.tree.host_ids, case.proposal.tree.shape.parents
    row = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        tokens.append(_slow_choice(case.probs[row], noise, len(path)))
        children = [node for node, parent in enumerate(parents) if parent == row - 1]
        carrying = [node for node in children if ids[node] == tokens[-1]]
        if not carrying:
            return Verdict(tuple(path), tuple(tokens), Origin.RECOVERED if children else Origin.BONUS)
        path.append(carrying[0])
        row = carrying[0] + 1


def _slow_choice(p: Tensor, noise: KeyedNoise | None, depth: int) -> int:
    scores = p.tolist()
    if noise is not None:
        gumbel = noise.gumbel(depth, len(scores), _HOST).tolist()
        scores = [math.log(share) + g if share > 0 else -math.inf for share, g in zip(scores, gumbel, strict=True)]
    return scores.index(max(scores))


# ---------------------------------------------------------------------------------------- cases under keyed noise


def judged_cases() -> list[JudgedCase]:
    """Proposals of every kind over three tokens, each under several noises and greedily, in one order for one batch."""
    found = []
    pairs = [(world, case) for world in _listed() for case in world.every_proposal()]
    for number, (world, case) in enumerate(pairs):
        for extra in range(_NOISES):
            noise = KeyedNoise(number, position=7 + extra, step=extra)
            single = Case(case.probability, case.proposal, case.probs.float())
            found.append(_judged(single if extra % 2 else case, noise))
            if (number + extra) % 3 == 0 and world.plans:  # a chain and a tree drafted under the noise that judges
                found += [_judged(drafted_with_noise(world, noise, *size), noise) for size in ((3, 1), (2, 2))]
        logits = torch.log(case.probs) * 3 + 1  # a greedy request depends only on the argmax; exact ties stay ties
        for probs in (case.probs, logits.float(), logits.bfloat16()):
            found.append(_judged(Case(case.probability, case.proposal, probs), None))
    return found


def wide_cases() -> list[JudgedCase]:
    """Chains over thousands of tokens, most of which shipped code does not examine individually; some end early."""
    chance = torch.Generator().manual_seed(1)
    found = []
    for number in range(_WIDE_CASES):
        probs = torch.softmax(2.0 ** (number % 5 - 2) * torch.randn(3, _WIDE, generator=chance), dim=-1)
        noise = KeyedNoise(number, position=3, step=1) if number % 4 else None
        tokens = [_slow_choice(probs[depth], noise, depth) for depth in range(2)]
        tokens[1] = (tokens[1] + (number % 3 == 0)) % _WIDE
        case = Case(1.0, Proposal.deterministic(TokenTree.chain(tokens)), probs)
        found.append(_judged(case, noise))
    return found


def disagreements(rule: Rule, cases: Sequence[JudgedCase], device: torch.device) -> list[tuple[JudgedCase, Verdict]]:
    """Cases in which the rule (its greedy form for greedy requests) differs, with its verdicts."""
    found = []
    for judge, greedy in ((rule, False), (rule.greedy_form, True)):
        own = [each for each in cases if each.greedy is greedy]
        noise = [each.noise or KeyedNoise(0, 0, 0) for each in own]
        verdicts = verdicts_of(judge, [each.case.to(device) for each in own], noise)
        found += [(each, verdict) for each, verdict in zip(own, verdicts, strict=True) if verdict != each.expected]
    return found


def _judged(case: Case, noise: KeyedNoise | None) -> JudgedCase:
    return JudgedCase(case, noise, expected_verdict(case, noise))


def _listed() -> list[World]:
    return [
        build(3, [], "dense", "dense"),
        build(3, [_DRAWN[:1], _DRAWN[:1]], "dense", "dense"),
        build(3, [_DRAWN, _FIXED[:1]], "sparse", "dense", bare=0),
        build(3, [_REMOVED, _FIXED], "varied", "dense"),
        build(3, [_REMOVED, _DRAWN[:1]], "dense", "dense", largest=2),
        *(build(3, [_FIXED] * 2, "dense", "dense", largest=most) for most in (1, 2, 9)),
    ]


def drafted_with_noise(world: World, noise: Noise, depth: int, width: int) -> Case:
    """A tree with the `width` tokens of largest log q + G at each node, computed in plain Python."""
    table = world.drafters[0]
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[Prefix] = [()]
    dists: list[Tensor] = []
    draws: list[tuple[Draw, ...]] = []
    row = 0
    while row < len(paths):
        path = paths[row]
        draws.append(())
        if len(path) < depth:
            gumbel = noise.gumbel(len(path), table.vocab, _HOST)
            scores = [
                math.log(weight) + g if weight else -math.inf
                for weight, g in zip(table.weights(path), gumbel.tolist(), strict=True)
            ]
            best = sorted(range(table.vocab), key=lambda token: (-scores[token], token))[:width]
            draws[row] = tuple(Draw(len(tokens) + i, len(dists), DrawKind.COUPLED) for i in range(len(best)))
            dists.append(table.probs(path))
            tokens += best
            parents += [row - 1] * len(best)
            paths += [(*path, token) for token in best]
        row += 1
    tree = TokenTree.of_ids(tokens, shape_of(tuple(parents)))
    proposal = Proposal(tree, tuple(draws), torch.stack(dists) if dists else None)
    proposal.check()
    return Case(1.0, proposal, torch.stack([world.target.probs(each) for each in paths]))


# ---------------------------------------------------------------------------------------- distributions in every cell


class _LineNoise:
    def __init__(self, differences: Sequence[float]) -> None:
        self.differences = differences

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        return torch.tensor([0.0, self.differences[depth]], dtype=torch.float64, device=device)

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return 0.5  # coupled sampling uses none; a rule that does is found by its answers

    def inside(self, turn: int, depth: int) -> _LineNoise:
        return _LineNoise(self.differences[depth:])


@dataclass(frozen=True, slots=True)
class _Interval:
    """A cell of the line of differences: its probability, and places near its ends and in its middle."""

    width: float
    places: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CoupledAnswers:
    """Totals over the answers in all cells; each cell is probed at three places."""

    proposals: int  # those drafted under the same noise count as one
    cells: int
    distance: float  # largest total variation of answers from the target's distribution
    moved: float  # largest probability of cells in which the answer is not constant


def answer_probs(rule: Rule, device: torch.device) -> CoupledAnswers:
    """The distribution of whole answers over two tokens, continued by the target under the same noise."""
    proposals = cells = 0
    worst = moved = 0.0
    for world in _over_two_tokens():
        expected = target_dist(world.target.probs, world.length)
        drawn = len(world.plans) > 0 and world.plans[0][0].kind is DrawKind.INDEPENDENT
        for case in (*world.every_proposal(), *([None] if drawn else [])):  # None: drafted under the noise that judges
            probs, own_moved, count = _answers(rule, device, world, case)
            proposals, cells = proposals + 1, cells + count
            worst, moved = max(worst, distance(probs, expected)), max(moved, own_moved)
    return CoupledAnswers(proposals, cells, worst, moved)


def _over_two_tokens() -> list[World]:
    worlds = [build(2, [], "dense", "dense")]
    for p, q in (("dense", "dense"), ("varied", "varied")):
        worlds += [
            build(2, [_DRAWN[:1]] * 2, p, q),
            build(2, [_FIXED] * 2, p, q),
            build(2, [_REMOVED, _DRAWN[:1]], p, q),
        ]
    return worlds


def _answers(
    rule: Rule, device: torch.device, world: World, case: Case | None
) -> tuple[dict[Prefix, float], float, int]:
    """The answer's distribution, the probability of cells in which it changes, and the number of cells."""
    tables = [world.target] if case is not None else [world.target, world.drafters[0]]
    lines = [
        _intervals([_edge(table.probs(path)) for path in itertools.product(range(2), repeat=depth) for table in tables])
        for depth in range(world.length)
    ]
    boxes = list(itertools.product(*lines))
    found: list[list[Prefix]] = []
    for place in range(3):
        noise = [_LineNoise([cell.places[place] for cell in box]) for box in boxes]
        cases = [(case or drafted_with_noise(world, own, world.length - 1, 1)).to(device) for own in noise]
        verdicts = verdicts_of(rule, cases, noise)
        ends = [_continued(world, verdict, own) for verdict, own in zip(verdicts, noise, strict=True)]
        found.append(ends)
    probs: dict[Prefix, float] = {}
    moved = 0.0
    for box, below, middle, above in zip(boxes, *found, strict=True):
        width = math.prod(cell.width for cell in box)
        probs[middle] = probs.get(middle, 0.0) + width
        moved += width * (not below == middle == above)
    return probs, moved, len(boxes)


def _continued(world: World, verdict: Verdict, noise: _LineNoise) -> Prefix:
    answer = verdict.tokens
    while len(answer) < world.length:
        answer = (*answer, int(noise.differences[len(answer)] > _edge(world.target.probs(answer))))
    return answer[: world.length]


def _edge(p: Tensor) -> float:
    """Token 1 is chosen if G1 - G0 is above log p0 - log p1."""
    p0, p1 = p.tolist()
    return math.inf if p1 == 0 else -math.inf if p0 == 0 else math.log(p0) - math.log(p1)


def _intervals(edges: Sequence[float]) -> list[_Interval]:
    ends = [-math.inf, *sorted({edge for edge in edges if math.isfinite(edge)}), math.inf]
    return [
        _Interval(_logistic(high) - _logistic(low), _places(low, high))
        for low, high in itertools.pairwise(ends)
        if high - low > 4 * _MARGIN
    ]


def _places(low: float, high: float) -> tuple[float, float, float]:
    if math.isinf(low) and math.isinf(high):
        return -30.0, 0.0, 30.0
    if math.isinf(low):
        return high - 30.0, high - 1.0, high - _MARGIN
    if math.isinf(high):
        return low + _MARGIN, low + 1.0, low + 30.0
    return low + _MARGIN, (low + high) / 2, high - _MARGIN


def _logistic(x: float) -> float:
    return 1.0 if x == math.inf else 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0
