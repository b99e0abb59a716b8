"""What runs on a device, read once, gives the verdicts of the CPU, bit for bit, and reads nothing before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from decision_cells import BELOW_ONE, ScriptedNoise, cell_probs, kernel_dist, run, step_dist
from small_worlds import (
    A1,
    A2,
    A3,
    F1,
    F2,
    NODES,
    STYLES,
    TWO_DRAFTERS,
    TWO_WITHOUT,
    W1,
    W2,
    W3,
    Case,
    World,
    build,
    every_proposal,
    gap,
)
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise, Noise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, DrawKind, Proposal, merge
from truedraft.core.tree import TokenTree, TreeShape
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import ArgmaxRule, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.rule import BatchVerdicts
from truedraft.verification.walk import Number

RULE = SpeculativeSampling()
KINDS = (DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC)


def eagerly(
    rule: Rule, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
) -> list[Verdict]:
    """The verdicts as on a device, from tokens that stay on it until all is read at once."""
    on_device = [Proposal(TokenTree(p.tree.tokens.clone(), p.tree.shape), p.draws, p.probs) for p in proposals]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        return rule.verify(on_device, probs, noise)


class Twice(SpeculativeSampling):
    """Judges every batch in both ways and insists that they agree."""

    def __init__(self) -> None:
        self.judged = 0

    def verify(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        verdicts = super().verify(proposals, probs, noise)
        scripts = [ScriptedNoise(own.script) for own in noise]  # type: ignore[attr-defined]
        if proposals:
            assert eagerly(RULE, proposals, probs, scripts) == verdicts
            self.judged += len(verdicts)
        return verdicts


CELLS: dict[str, list[World]] = {
    "nodes of two tokens": [build(f"eager/{name}", 2, [plan], p, q) for name, plan in NODES.items() for p, q in STYLES],
    "nodes of four tokens": [build(f"eager/{name}", 4, [plan], "varied", "varied") for name, plan in NODES.items()],
    "chains": [build("eager", 3, plans, "varied", "varied") for plans in ([A1] * 3, [W1] * 3, [F1] * 3, [A1, F1, W1])],
    "trees": [
        build("eager", 3, plans, p, q, bare)
        for plans, p, q, bare in [
            ((A3, W1), "dense", "dense", 0),
            ((W2, W2), "dense", "dense", -1),
            ((F2, W2), "dense", "sparse", -1),
            ((W2, A1), "one-hot", "dense", -1),
            ((TWO_DRAFTERS, F1), "dense", "dense", 1),
            ((TWO_WITHOUT,), "dense", "equal", -1),
            ((), "dense", "dense", -1),
        ]
    ],
}


@pytest.mark.parametrize("name", CELLS)
def test_in_every_decision_cell(name: str) -> None:
    """The cells are found by the walk that looks as it goes; at each place probed, the other way says the same."""
    rule = Twice()
    cases = [case for world in CELLS[name] for case in every_proposal(world)]
    probs = cell_probs(rule, cases)
    assert rule.judged > 10 * len(cases)
    for case, dist in list(zip(cases, probs, strict=True))[:50]:
        assert gap(dist, kernel_dist(rule, case)) < 1e-12


class Eager(SpeculativeSampling):
    """Always judges as on a device."""

    def verify(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        return eagerly(RULE, proposals, probs, noise)


def test_a_broken_part_breaks_both_ways_alike() -> None:
    """The parts that define the rule are those that are used: with a broken one the verdicts are others."""

    class FromTarget(SpeculativeSampling):
        def rejected(self, p: Tensor, q: Tensor) -> Tensor:
            return p

    class AllRemoved(SpeculativeSampling):
        def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
            return torch.zeros_like(q)

    class NothingLeaves(SpeculativeSampling):
        def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
            return p_x * (taken == 0.0)

    class Accepts(SpeculativeSampling):
        def accept_probability(self, p_x: Number, q_x: Number) -> Number:
            return p_x * 0.0 + 1.0

    for broken, kind in ((FromTarget(), 1), (FromTarget(), 2), (AllRemoved(), 1), (NothingLeaves(), 2), (Accepts(), 1)):
        kinds = [KINDS[kind]]
        proposals, probs, noise = batch(200, vocab=9, seed=5, of=kinds)
        eager = eagerly(broken, proposals, probs, noise)
        assert eager == broken.verify(proposals, probs, noise)
        assert eager != RULE.verify(proposals, probs, noise), broken


# ------------------------------------------------------------------------------- random proposals


def batch(
    count: int,
    vocab: int,
    seed: int,
    draft_dtype: torch.dtype = torch.float32,
    of: Sequence[DrawKind] | None = None,
) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
    """Requests with random proposals of every kind, drawn as a drafter draws, near the target's distributions or
    not."""
    chance = random.Random(seed)
    proposals, probs, noise = [], [], []
    for number in range(count):
        each = KeyedNoise(seed * 1000 + number, chance.randrange(50), chance.randrange(9))
        kinds = of or chance.choice([[kind] for kind in KINDS] + [list(KINDS)] * 2)
        proposal = drawn(chance, vocab, kinds, each, draft_dtype)
        if chance.random() < 0.2:
            proposal = merge([proposal, drawn(chance, vocab, kinds, KeyedNoise(number, 1, 1), draft_dtype)])[0]
        proposals.append(proposal)
        probs.append(random_probs(chance, len(proposal.tree) + 1, vocab))
        noise.append(each)
    return proposals, probs, noise


def random_probs(chance: random.Random, rows: int, vocab: int) -> Tensor:
    """Distributions in float32: dense, cut by top-p, or one-hot. All of a vocabulary resemble each other somewhat."""
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    scores = scores + torch.randn(rows, vocab, generator=torch.Generator().manual_seed(chance.randrange(2**30)))
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.8),
        SamplingParams(temperature=0.0),
    ]
    return L.probs_from_logits(scores, chance.choice(params))


def drawn(
    chance: random.Random, vocab: int, kinds: Sequence[DrawKind], noise: KeyedNoise, dtype: torch.dtype
) -> Proposal:
    """A tree whose nodes have up to four draws each; two draws may name one child, and a distribution may serve two
    tree rows."""
    tokens: list[int] = []
    parents: list[int] = []
    draws: list[list[Draw]] = [[]]
    dists = random_probs(chance, 3, vocab).to(dtype)
    open_rows, depths = [0], [0]
    while open_rows and len(tokens) < 12:
        row = open_rows.pop(0)
        if depths[row] == 4:
            continue
        gone: dict[int, Tensor] = {}
        child_of: dict[int, int] = {}
        for index in range(chance.choice([1, 1, 2, 4]) if row == 0 else chance.choice([0, 1, 1, 3])):
            kind, number = chance.choice(list(kinds)), chance.choice([0, 0, 1, 2])
            q = gone.get(number, dists[number]) if kind is DrawKind.WITHOUT_REPLACEMENT else dists[number]
            if kind is DrawKind.DETERMINISTIC:
                token = chance.randrange(vocab)
            else:
                u = torch.tensor([noise.uniform(Purpose.DRAFT, depths[row], 10 * row + index)], dtype=torch.float64)
                token = int(L.draw(q[None], u))
            if token == vocab:
                continue  # nothing is left to draw
            if kind is DrawKind.WITHOUT_REPLACEMENT:
                gone[number] = L.without_tokens(q, torch.tensor([token]))
            if token not in child_of:
                child_of[token] = len(tokens)
                tokens.append(token)
                parents.append(row - 1)
                draws.append([])
                depths.append(depths[row] + 1)
                open_rows.append(len(tokens))
            dist = -1 if kind is DrawKind.DETERMINISTIC else number
            draws[row].append(Draw(child_of[token], dist, kind))
    used = any(draw.dist >= 0 for each in draws for draw in each)
    tree = TokenTree(torch.tensor(tokens, dtype=torch.int64), TreeShape(tuple(parents)))
    proposal = Proposal(tree, tuple(map(tuple, draws)), dists if used else None)
    proposal.check()
    return proposal


@pytest.mark.parametrize(("vocab", "count"), [(3, 300), (9, 300), (500, 80), (9001, 12)])
def test_random_proposals_of_every_kind(vocab: int, count: int) -> None:
    proposals, probs, noise = batch(count, vocab, seed=vocab)
    verdicts = RULE.verify(proposals, probs, noise)
    assert eagerly(RULE, proposals, probs, noise) == verdicts
    alone = [eagerly(RULE, [p], [dist], [n])[0] for p, dist, n in zip(proposals, probs, noise, strict=True)]
    assert alone == verdicts
    if count > 50:
        assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2}
        assert {verdict.final for verdict in verdicts} == {Origin.RECOVERED, Origin.BONUS}
        shapes = [{draw.kind for draw in each} for p in proposals for each in p.draws if len(each) > 1]
        assert {frozenset(kinds) for kinds in shapes} >= {frozenset({kind}) for kind in KINDS}
        assert any(len(kinds) == 3 for kinds in shapes)


@pytest.mark.parametrize(("target", "draft"), [("float64", "float32"), ("float32", "float64")])
def test_draft_distributions_of_another_width_of_float(target: str, draft: str) -> None:
    proposals, probs, noise = batch(200, 7, seed=4, draft_dtype=getattr(torch, draft))
    probs = [dist.to(getattr(torch, target)) for dist in probs]
    assert eagerly(RULE, proposals, probs, noise) == RULE.verify(proposals, probs, noise)


def test_candidates_drafted_twice_and_candidates_that_hold_all_mass() -> None:
    """Two siblings of one token; a node whose candidates are the whole support; a distribution one-hot at the last of
    them."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])
    siblings = TokenTree(torch.tensor([1, 1, 0, 2]), TreeShape((-1,) * 4))
    for dist, answers in ((p[0], {0, 1, 2}), (p[1], {2})):
        case = Case(1.0, Proposal.deterministic(siblings), dist.expand(5, 4))
        for u in (0.0, 0.3, 0.6, BELOW_ONE):
            script = {(Purpose.ACCEPT, 0, index): u for index in range(4)}
            verdict = run(RULE, [case], [script])[0][0]
            assert verdict.path and verdict.tokens[0] in answers
            assert verdict.path != (1,)  # the second sibling with a rejected token has no mass left
            assert eagerly(RULE, [case.proposal], [case.probs], [ScriptedNoise(script)]) == [verdict]


def test_verdicts_of_a_device_follow_the_distribution() -> None:
    """Summed over its own cells, found by its own answers: the distribution of a step, with no help from the other
    way."""
    for plans in ((A2, W1), (W3,), (F2, A1)):
        world = build("eager distribution", 3, plans)
        cases = every_proposal(world)
        mine = step_dist(cases, cell_probs(Eager(), cases))
        theirs = step_dist(cases, [kernel_dist(RULE, case) for case in cases])
        assert gap(mine, theirs) < 1e-12


# ------------------------------------------------------------------------------- what is waited for


def test_nothing_is_read_before_all_is(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals, probs, noise = batch(40, 11, seed=2)
    rules: list[tuple[Rule, list[KeyedNoise]]] = [
        (RULE, noise),
        (CoupledSampling(), [KeyedNoise(i, 3, 1) for i in range(40)]),
        (ArgmaxRule(), noise),
    ]
    expected = [rule.verify(proposals, probs, own) for rule, own in rules]
    on_device = [TokenTree(proposal.tree.tokens, proposal.tree.shape) for proposal in proposals]
    read: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        hidden = [Proposal(tree, p.draws, p.probs) for tree, p in zip(on_device, proposals, strict=True)]
        for name in ("tolist", "item", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(Tensor, name, lambda tensor, name=name: pytest.fail(f"{name} of {tensor.shape}"))
        patch.setattr("truedraft.verification.coupled.most_likely", lambda scores: scores.argmax(dim=-1))
        decided: list[BatchVerdicts] = [rule.accept(hidden, probs, own) for rule, own in rules]

        def counted(tensor: Tensor) -> object:
            read.append(tensor.numel())
            return torch._C.TensorBase.tolist(tensor)

        patch.setattr(Tensor, "tolist", counted)
        wants = [*(tree.tokens for tree in on_device), *(each for own in decided for each in own.wanted)]
        numbers = transfers.fetch(wants)
        assert read == [sum(each.numel() for each in wants)]
    for tree, ids in zip(on_device, numbers, strict=False):
        tree.keep_host_ids([int(token) for token in ids])
    read_back = iter(numbers[len(on_device) :])
    for own, verdicts in zip(decided, expected, strict=True):
        assert own.verdicts(hidden, [next(read_back) for _ in own.wanted]) == verdicts


def test_no_requests_have_no_verdicts() -> None:
    assert eagerly(RULE, [], [], []) == RULE.verify([], [], []) == []
