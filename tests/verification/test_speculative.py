"""Speculative sampling end to end: keyed noise drafts and judges, and the answers have the target's distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_worlds import A1, NODES, Case, Table, build, cell_probs, gap
from torch import Tensor

from truedraft.certify.cells import completed, kernel_probs, step_probs
from truedraft.core import probs as L
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal, merge
from truedraft.core.tree import TokenTree, TreeShape
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.exact import target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow

RULE = SpeculativeSampling()
VOCAB = 3


def draw(dist: Tensor, uniform: float) -> int:
    return int(L.draw(dist[None], torch.tensor([uniform], dtype=torch.float64)))


def drafted(
    draft: Table, prefix: tuple[int, ...], noise: KeyedNoise, widths: tuple[int, ...], kind: DrawKind
) -> Proposal:
    """A sampled tree, breadth first, with as many draws at each depth as `widths` says."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[tuple[int, ...]] = [()]
    draws: list[list[Draw]] = [[]]
    dists: list[Tensor] = []
    row = 0
    counts: Counter[int] = Counter()
    while row < len(paths):
        path = paths[row]
        if len(path) < len(widths):
            dist = draft.probs((*prefix, *path))
            dists.append(dist)
            nodes: dict[int, int] = {}
            for _ in range(min(widths[len(path)], int((dist > 0).sum()))):
                token = draw(dist, noise.uniform(Purpose.DRAFT, len(path), counts[len(path)]))
                counts[len(path)] += 1
                if token not in nodes:
                    nodes[token] = len(tokens)
                    tokens.append(token)
                    parents.append(row - 1)
                    draws.append([])
                    paths.append((*path, token))
                draws[row].append(Draw(nodes[token], len(dists) - 1, kind))
                if kind is DrawKind.WITHOUT_REPLACEMENT:
                    dist = L.without_tokens(dist, torch.tensor([token]))
        row += 1
    tree = TokenTree(torch.tensor(tokens, dtype=torch.int64), TreeShape(tuple(parents)))
    return Proposal(tree, tuple(map(tuple, draws)), torch.stack(dists))


@pytest.mark.parametrize(
    ("widths", "kind"),
    [((1, 1), DrawKind.INDEPENDENT), ((2, 2), DrawKind.INDEPENDENT), ((2, 1), DrawKind.WITHOUT_REPLACEMENT)],
    ids=["chain", "tree with repeats", "tree without replacement"],
)
def test_answers_drafted_and_judged_by_keyed_noise(widths: tuple[int, ...], kind: DrawKind) -> None:
    """Three tokens, whole steps, 2,000 seeds: chi-square over 27 answers, false alarm below 1e-7 (and the same seeds).

    The exact tests know no keys; this one would notice a key that serves two decisions, or two steps that share one.
    """
    seeds, length = 2_000, 3
    target, draft = Table("keyed p", VOCAB, "dense"), Table("keyed q", VOCAB, "dense")
    seen: Counter[tuple[int, ...]] = Counter()
    front: dict[int, tuple[tuple[int, ...], int]] = dict.fromkeys(range(seeds), ((), 0))
    while front:
        noises = {seed: KeyedNoise(seed, len(answer), step) for seed, (answer, step) in front.items()}
        proposals = {seed: drafted(draft, front[seed][0], noises[seed], widths, kind) for seed in front}
        probs = [
            torch.stack(
                [
                    target.probs(front[s][0]),
                    *(target.probs((*front[s][0], *p.tree.path_tokens(i))) for i in range(len(p.tree))),
                ]
            )
            for s, p in proposals.items()
        ]
        verdicts = RULE.verify(list(proposals.values()), probs, list(noises.values()))
        ahead = {}
        for seed, verdict in zip(proposals, verdicts, strict=True):
            answer = (*front[seed][0], *verdict.tokens)
            if len(answer) >= length:
                seen[answer[:length]] += 1
            else:
                ahead[seed] = (answer, front[seed][1] + 1)
        front = ahead
    exact = target_dist(target.probs, length)
    statistic = sum((seen[answer] - seeds * mass) ** 2 / (seeds * mass) for answer, mass in exact.items())
    assert sum(seen.values()) == seeds
    assert statistic < 88.0  # chi-square with 26 degrees of freedom: 1e-8 above 88


# ------------------------------------------------------------------------------- merged proposals


def chains_of(draft: Table, depth: int) -> list[tuple[float, Proposal]]:
    found = []
    for tokens in itertools.product(range(draft.vocab), repeat=depth):
        rows = [draft.probs(tokens[:i]) for i in range(depth)]
        mass = math.prod(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        if mass:
            found.append((mass, Proposal.chain(torch.tensor(tokens), torch.stack(rows))))
    return found


@pytest.mark.parametrize("fixed", [False, True], ids=["two samplers", "two samplers and a fixed path"])
def test_merged_proposals_of_several_drafters_keep_the_distribution(fixed: bool) -> None:
    """Whether the second drafter has a draw below a node depends on its own first token: whole proposals show it."""

    for style in ("dense", "varied"):
        target, first, second = (Table(f"merged {name}", VOCAB, style) for name in ("p", "a", "b"))
        cases = []
        for left, one in chains_of(first, 2):
            for right, two in chains_of(second, 2):
                parts = [one, Proposal.deterministic(TokenTree.chain([1, 2])), two] if fixed else [one, two]
                merged = merge(parts)[0]
                merged.check()
                paths = [(), *(merged.tree.path_tokens(i) for i in range(len(merged.tree)))]
                cases.append(Case(left * right, merged, torch.stack([target.probs(path) for path in paths])))
        probs = cell_probs(RULE, cases)
        for case, dist in zip(cases, probs, strict=True):
            assert gap(dist, kernel_probs(RULE, case)) < 1e-12
        assert gap(completed(step_probs(cases, probs), target.probs, 3), target_dist(target.probs, 3)) < 1e-12


@pytest.mark.parametrize("rule", [SpeculativeSampling(), CoupledSampling()], ids=lambda rule: rule.name)
def test_fixed_draws_beside_an_unused_table_of_distributions(rule: Rule) -> None:
    """A merge of prompt lookup with a drafter that drafted nothing has a table of distributions that no draw names."""
    nothing = Proposal(TokenTree.empty(), ((),), torch.zeros(0, VOCAB, dtype=torch.float64))
    merged = merge([Proposal.deterministic(TokenTree.chain([1])), nothing])[0]
    probs = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    verdict = rule.verify([merged], [probs], [KeyedNoise(0, 0, 0)])[0]
    assert verdict == Verdict((0,), (1, 0), Origin.BONUS)


@pytest.mark.parametrize("rule", [SpeculativeSampling(), CoupledSampling()], ids=lambda rule: rule.name)
def test_an_empty_batch_has_no_verdicts(rule: Rule) -> None:
    assert rule.verify([], [], []) == []


# ------------------------------------------------------------------------------- float32, and distributions at their
# limits


class Constant:
    """The same number for every decision."""

    def __init__(self, value: float) -> None:
        self.value = value

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self.value

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        return None


def float32_dist(weights: list[float]) -> Tensor:
    dist = torch.tensor(weights, dtype=torch.float32)
    return dist / dist.sum()


weights = st.lists(
    st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32), st.sampled_from([1e-38, 1e-7, 0.5, 1.0])),
    min_size=4,
    max_size=4,
).filter(lambda w: sum(w) > 1e-6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    weights,
    weights,
    weights,
    st.sampled_from([0.0, 1e-300, 2.0**-54, 0.25, 0.5, 1.0 - 2.0**-30, 1.0 - 2.0**-53]),
    st.sampled_from([DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC]),
    st.integers(0, 3),
)
def test_no_token_that_the_target_forbids_is_ever_emitted_in_float32(
    p: list[float], below: list[float], q: list[float], u: float, kind: DrawKind, turn: int
) -> None:
    """Whatever the noise and the roundings: each emitted token has mass in the target's distribution of its place."""
    probs = torch.stack([float32_dist(p), *(float32_dist(below) for _ in range(4))])
    draft = float32_dist(q)
    support = torch.nonzero(draft).flatten().tolist()
    tokens = (support[turn % len(support) :] + support[: turn % len(support)])[:3]
    dist = -1 if kind is DrawKind.DETERMINISTIC else 0
    draws = (tuple(Draw(i, dist, kind) for i in range(len(tokens))), *(() for _ in tokens))
    tree = TokenTree.from_paths([[token] for token in tokens])
    verdict = RULE.verify(
        [Proposal(tree, draws, draft[None])] if dist == 0 else [Proposal(tree, draws)],
        [probs[: len(tokens) + 1]],
        [Constant(u)],
    )[0]
    assert probs[0, verdict.tokens[0]] > 0
    if len(verdict.tokens) == 2:
        assert probs[1, verdict.tokens[1]] > 0


def test_a_token_that_the_target_forbids_is_rejected_even_where_the_draft_has_no_mass_left() -> None:
    """A drafter that draws more often than its distribution has tokens breaks its contract; it must not break the
    answer."""
    assert RULE.accept_probability(0.0, 0.0) == 0.0


def test_acceptance_probability() -> None:
    assert RULE.accept_probability(0.25, 0.5) == 0.5
    assert RULE.accept_probability(0.5, 0.25) == 1.0
    assert RULE.accept_probability(0.5, 0.5) == 1.0
    assert RULE.accept_probability(0.0, 0.5) == 0.0
    assert RULE.accept_probability(5e-324, 1.0) > 0.0


def test_distributions_equal_up_to_rounding_never_give_nan() -> None:
    """p and q differ in the last bit of one token: a rejection is nearly impossible, and must still draw a token."""
    p = torch.tensor([0.3, 0.7], dtype=torch.float32)
    q = p.clone()
    q[0] = torch.nextafter(q[0], torch.tensor(1.0))
    case = Proposal.chain(torch.tensor([0]), q[None])
    verdict = RULE.verify([case], [p.expand(2, 2)], [Constant(1.0 - 2.0**-53)])[0]
    assert verdict.final is Origin.RECOVERED
    assert verdict.tokens[0] in (0, 1)
    outcomes = RULE.outcomes([JudgedRow(p, (DrawnToken(0, 0, q, DrawKind.INDEPENDENT),))])
    assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1.0)


def test_float32_cells_are_those_of_float64() -> None:
    """The distribution of float32 distributions is exact up to their own rounding: 3e-7 for a dozen operations on
    numbers below 1."""

    for plans in [(A1, A1), (NODES["all kinds"],), (NODES["two drafters without replacement"],)]:
        for case in build("float32", 3, plans).every_proposal():
            probs = case.proposal.probs
            narrow = Proposal(case.proposal.tree, case.proposal.draws, None if probs is None else probs.float())
            assert gap(kernel_probs(RULE, Case(1.0, narrow, case.probs.float())), kernel_probs(RULE, case)) < 2e-6


def test_origins() -> None:
    verdict = Verdict((0, 2), (5, 6, 7), Origin.RECOVERED)
    assert verdict.origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED)
    assert Verdict((), (5,), Origin.BONUS).origins == (Origin.BONUS,)


def test_requests_and_noise_must_match() -> None:
    for rule in (RULE, CoupledSampling()):
        with pytest.raises(ValueError, match=r"no batch|zip"):
            rule.verify([Proposal.empty()], [], [KeyedNoise(0, 0, 0)])
