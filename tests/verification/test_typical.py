"""Typical acceptance: which nodes stay, which path wins, and that its distribution is not the target's."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from small_worlds import (
    A1,
    CAUGHT,
    COUPLED,
    EXACT,
    F1,
    F2,
    F3,
    W2,
    Case,
    build,
    by_kernel,
    by_verify,
    cell_probs,
    gap,
    repeated,
)
from torch import Tensor

from truedraft.certify.cells import kernel_probs
from truedraft.core import transfers
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Divergence, Origin, Verdict
from truedraft.errors import OptionError
from truedraft.verification import Rule, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.lossy import LenientArgmax

RULE = TypicalAcceptance()


class NoNoise:
    """Noise that nobody may ask for."""

    def uniform(self, *_: object) -> float:
        raise AssertionError("typical acceptance draws nothing")

    gumbel = uniform


def judge(rule: Rule, tree: TokenTree, probs: Tensor) -> Verdict:
    return rule.verify([Proposal.deterministic(tree)], [probs], [NoNoise()])[0]


def uniform_dist(share: float, vocab: int = 8) -> Tensor:
    """`share` on token 0, the rest evenly on the others."""
    dist = torch.full((vocab,), (1.0 - share) / (vocab - 1), dtype=torch.float64)
    dist[0] = share
    return dist


# ------------------------------------------------------------------------------- what stays


def test_the_threshold_by_hand() -> None:
    """An even distribution over four tokens has exp(-H) = 1/4; a one-hot one has 1, so there epsilon decides."""
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    assert RULE.thresholds(probs).tolist() == pytest.approx([0.3 / 4, 0.09, 0.09])
    assert TypicalAcceptance(epsilon=0.5, delta=0.4).thresholds(probs).tolist() == pytest.approx([0.1, 0.4, 0.2])
    assert RULE.stays(0.0901, 0.09) and not RULE.stays(0.09, 0.09)


def test_a_chain_stays_down_to_the_first_untypical_token() -> None:
    probs = torch.stack([uniform_dist(0.5), uniform_dist(0.9), uniform_dist(0.3), uniform_dist(0.2)])
    verdict = judge(RULE, TokenTree.chain([1, 0, 3]), probs)  # 0.5/7 = 0.071 against 0.3 exp(-1.666) = 0.057
    assert verdict == Verdict((0, 1, 2), (1, 0, 3, 0), Origin.BONUS)
    sure = judge(RULE, TokenTree.chain([1, 0, 3]), torch.stack([uniform_dist(0.9)] * 4))
    assert sure == Verdict((), (0,), Origin.RECOVERED)
    assert judge(RULE, TokenTree.empty(), probs[:1]) == Verdict((), (0,), Origin.BONUS)


def test_the_deepest_path_wins_and_among_those_the_likeliest() -> None:
    even = torch.full((6, 4), 0.25, dtype=torch.float64)
    tree = TokenTree.from_paths([[0], [1, 2], [3, 0], [2, 1]])
    probs = even[:1].repeat(8, 1)
    assert judge(RULE, tree, probs).tokens[:2] == (1, 2)  # all alike: the first of the deepest
    probs[0] = torch.tensor([0.4, 0.2, 0.2, 0.2])
    assert judge(RULE, tree, probs).tokens[:2] == (1, 2)  # token 0 is likelier, and shorter
    probs[0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert judge(RULE, tree, probs).tokens[:2] == (3, 0)
    probs[4] = torch.tensor([0.02, 0.38, 0.3, 0.3])  # node 3 = token 3: its child is no longer typical
    assert judge(RULE, tree, probs).tokens[:2] == (2, 1)


def best_by_force(rule: TypicalAcceptance, tree: TokenTree, probs: Tensor) -> tuple[tuple[int, ...], int]:
    """All paths of the tree, one by one."""
    found: list[tuple[int, float, tuple[int, ...]]] = [(0, 1.0, ())]
    for node in range(len(tree)):
        path = tree.shape.path(node)
        rows = [0, *(each + 1 for each in path)]
        p = [float(probs[row][tree.host_ids[each]]) for row, each in zip(rows, path, strict=False)]
        entropies = [-sum(x * math.log(x) for x in probs[row].tolist() if x > 0) for row in rows]
        if all(x > min(rule.epsilon, rule.delta * math.exp(-h)) for x, h in zip(p, entropies, strict=False)):
            found.append((len(path), math.prod(p), path))
    _, _, path = max(found, key=lambda each: each[:2])
    return path, int(probs[path[-1] + 1 if path else 0].argmax())


def test_random_trees_against_all_their_paths_in_one_batch() -> None:
    chance = random.Random(3)
    trees, probs = [], []
    for seed in range(60):
        paths = [[chance.randrange(6) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(0, 9))]
        trees.append(TokenTree.from_paths(paths))
        logits = torch.randn(len(trees[-1]) + 1, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        probs.append(torch.softmax(1.5 * logits, dim=-1))
    rule = TypicalAcceptance(epsilon=0.12, delta=0.6)
    verdicts = rule.verify([Proposal.deterministic(tree) for tree in trees], probs, [NoNoise()] * len(trees))
    for tree, rows, verdict in zip(trees, probs, verdicts, strict=True):
        path, last = best_by_force(rule, tree, rows)
        assert (verdict.path, verdict.tokens[-1]) == (path, last)
        assert verdict.tokens[:-1] == tuple(tree.host_ids[node] for node in path)
    assert len({len(verdict.path) for verdict in verdicts}) > 3
    assert {verdict.final for verdict in verdicts} == {Origin.RECOVERED, Origin.BONUS}


def test_how_a_token_was_drafted_plays_no_part() -> None:
    probs = torch.stack([uniform_dist(0.4), uniform_dist(0.4), uniform_dist(0.4)])
    tokens, q = torch.tensor([2, 0]), torch.stack([uniform_dist(0.01), uniform_dist(0.99)])
    chains = [Proposal.chain(tokens, q, kind) for kind in DrawKind if kind is not DrawKind.DETERMINISTIC]
    verdicts = RULE.verify(chains, [probs] * 3, [NoNoise()] * 3)
    assert verdicts == [judge(RULE, TokenTree.chain(tokens), probs)] * 3
    assert RULE.judges == frozenset(DrawKind)


# ------------------------------------------------------------------------------- its distribution


MEDUSA = (F3, F2, F1)  # the top tokens of each head, fewer with depth
WORLDS = {
    "drawn chain": build("typical", 3, [A1, A1]),
    "fixed chain": build("typical", 4, [F1, F1]),
    "siblings": build("typical", 4, [W2]),
    "top-3 of one head": build("typical", 4, [F3]),
    "medusa": build("typical", 3, MEDUSA),
    "uneven medusa": build("typical", 3, MEDUSA, bare=1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_is_not_exact_by_the_test_that_finds_the_lossless_rule_exact(name: str) -> None:
    world = WORLDS[name]
    assert by_verify(SpeculativeSampling(), world) < EXACT
    assert by_verify(RULE, world) > CAUGHT


@pytest.mark.parametrize("name", ["drawn chain", "fixed chain", "siblings", "top-3 of one head"])
def test_nor_by_the_recursion_over_the_kernel(name: str) -> None:
    world = WORLDS[name]
    assert by_kernel(SpeculativeSampling(), world) < EXACT
    assert by_kernel(RULE, world) > CAUGHT


@pytest.mark.parametrize("rule", [RULE, TypicalAcceptance(0.3, 0.9), LenientArgmax(0.5)], ids=lambda rule: rule.spec)
def test_the_kernel_says_what_verify_does_where_nothing_lies_below_siblings(rule: Rule) -> None:
    plans = [(A1, A1), (F1, F1, F1), (W2,), (F3,), (repeated(2, COUPLED),), (F1, F2)]
    for style in ("dense", "sparse", "varied"):
        for plan in plans:
            cases = build("kernel", 4, plan, style, "dense").every_proposal()
            for case, dist in zip(cases, cell_probs(rule, cases), strict=True):
                assert gap(dist, kernel_probs(rule, case)) < EXACT
                assert len(dist) == 1  # nothing is left to chance


def test_a_token_that_the_target_forbids_is_never_emitted() -> None:
    for world in [build("zeros", 4, plans, "sparse", "dense") for plans in ((A1, A1), (F2, F2), (W2, A1))]:
        for case in world.every_proposal():
            verdict = RULE.verify([case.proposal], [case.probs], [NoNoise()])[0]
            rows = (0, *(node + 1 for node in verdict.path))
            assert all(float(case.probs[row, token]) > 0 for row, token in zip(rows, verdict.tokens, strict=True))


# ------------------------------------------------------------------------------- its divergence


def test_divergence_is_that_of_a_certain_token() -> None:
    probs = torch.stack([uniform_dist(0.5), uniform_dist(0.2)])
    verdict = judge(RULE, TokenTree.chain([1]), probs)
    p_x = 0.5 / 7
    assert verdict.divergence is not None
    first, last = verdict.divergence
    assert first.total_variation == pytest.approx(1 - p_x) and first.kl == pytest.approx(-math.log(p_x))
    assert first.total_variation_greedy == 0.5 and first.kl_greedy == pytest.approx(math.log(2))
    assert last == Divergence.of_choice(0.2, 0.2)
    assert last.total_variation == last.total_variation_greedy == 0.8


def test_divergence_is_the_mean_over_the_distribution_of_the_candidates() -> None:
    """One-hot distributions of emitted tokens, given the candidates: each verdict's figure is 1 - p of its own
    token."""
    for case in WORLDS["medusa"].every_proposal():
        verdict = RULE.verify([case.proposal], [case.probs], [NoNoise()])[0]
        rows = (0, *(node + 1 for node in verdict.path))
        for row, token, each in zip(rows, verdict.tokens, verdict.divergence or (), strict=True):
            point = torch.zeros_like(case.probs[row])
            point[token] = 1.0
            assert each.total_variation == pytest.approx(0.5 * float((point - case.probs[row]).abs().sum()), abs=EXACT)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("epsilon", "delta", "name"),
    [(0.0, 0.3, "epsilon"), (2.0, 0.3, "epsilon"), (math.nan, 0.3, "epsilon"), (0.1, 0.0, "delta")],
)
def test_values_out_of_range_are_refused(epsilon: float, delta: float, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be above 0"):
        TypicalAcceptance(epsilon, delta)
    with pytest.raises(OptionError, match="finite"):
        TypicalAcceptance(delta=math.inf)


def test_an_empty_batch() -> None:
    assert RULE.verify([], [], []) == []


def test_a_batch_answers_as_each_request_alone() -> None:
    cases: list[Case] = list(itertools.chain.from_iterable(world.every_proposal()[:6] for world in WORLDS.values()))
    cases = [case for case in cases if case.probs.shape[-1] == 3]
    together = RULE.verify([c.proposal for c in cases], [c.probs for c in cases], [NoNoise()] * len(cases))
    alone = [RULE.verify([case.proposal], [case.probs], [NoNoise()])[0] for case in cases]
    assert together == alone and [each.divergence for each in together] == [each.divergence for each in alone]


def test_on_a_device_it_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it looks at is wanted beforehand, so that a step can read it with everything else."""
    reads: list[int] = []

    def counted(tensors: Sequence[Tensor]) -> list[list[float]]:
        reads.append(len(tensors))
        return fetch(tensors)

    fetch = transfers.fetch
    cases = WORLDS["medusa"].every_proposal()
    asked = [c.proposal for c in cases], [c.probs for c in cases], [NoNoise()] * len(cases)
    here = RULE.verify(*asked)
    monkeypatch.setattr(transfers, "fetch", counted)
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    assert RULE.verify(*asked) == here and len(reads) == 1
