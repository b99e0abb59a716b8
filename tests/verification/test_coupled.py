"""Coupled sampling: tokens fixed by distribution and noise, drafted and judged with the same noise."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from small_worlds import A1, A2, COUPLED, EXACT, F2, W2, Case, Table, World, build, cell_probs, gap
from torch import Tensor

from support.coupled_choice import coupled_choice
from truedraft.certify.exact import answer_probs, expected_verdict
from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.errors import IncompatibleRuleError
from truedraft.verification import CoupledSampling, SpeculativeSampling

RULE = CoupledSampling()


class LineNoise:
    """Gumbel noise over two tokens with a given difference G1 - G0 at each depth: all that a choice depends on."""

    def __init__(self, differences: list[float]) -> None:
        self.differences = differences

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        assert vocab == 2
        return torch.tensor([0.0, self.differences[depth]], dtype=torch.float64, device=device)

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        raise AssertionError("coupled sampling draws nothing by a uniform number")


def logistic(x: float) -> float:
    """P(G1 - G0 <= x) for two independent standard Gumbel numbers."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def cells(edges: list[float]) -> list[tuple[float, float, float]]:
    """The line cut at the edges: (width in probability, a value just above its lower end, its middle)."""
    places = [-math.inf, *sorted({e for e in edges if math.isfinite(e)}), math.inf]
    found = []
    for low, high in itertools.pairwise(places):
        width = (logistic(high) if high < math.inf else 1.0) - (logistic(low) if low > -math.inf else 0.0)
        inside = (low + high) / 2 if math.isfinite(low + high) else (high - 1 if math.isfinite(high) else low + 1)
        inside = inside if math.isfinite(inside) else 0.0
        near = low + min(1e-9, (inside - low) / 2) if math.isfinite(low) else inside
        found.append((width, near, inside))
    return found


def edge_of(dist: Tensor) -> float:
    """Token 1 is chosen iff G1 - G0 > log p0 - log p1."""
    p0, p1 = dist.tolist()
    return math.inf if p1 == 0 else -math.inf if p0 == 0 else math.log(p0) - math.log(p1)


def drafted(world: World, difference: float) -> tuple[Proposal, Tensor]:
    """A token drafted with the noise that verification will see, and the target's distributions."""
    dist = world.drafters[0].probs(())[None]
    token = int(coupled_choice(dist, torch.tensor([0.0, difference], dtype=torch.float64)))
    probs = torch.stack([world.target.probs(()), world.target.probs((token,))])
    return Proposal.chain(torch.tensor([token]), dist, DrawKind.COUPLED), probs


@pytest.mark.parametrize(("p", "q"), [("dense", "dense"), ("one-hot", "dense"), ("dense", "one-hot")])
def test_joint_distribution_of_draft_and_target_over_two_tokens_in_every_cell(p: str, q: str) -> None:
    """P(draft = i, target = j) by cells; the diagonal is min(p, q), for two tokens the best any coupling does."""
    for trial in range(8):
        world = build(f"joint/{trial}", 2, [A1], p, q)
        target, draft = world.target.probs(()), world.drafters[0].probs(())
        joint = np.zeros((2, 2))
        line = cells([edge_of(target), edge_of(draft), *(edge_of(world.target.probs((t,))) for t in range(2))])
        for width, near, inside in line:
            seen = set()
            for value in (near, inside):  # a cell is a cell: its ends and its middle agree
                proposal, probs = drafted(world, value)
                verdict = RULE.verify([proposal], [probs], [LineNoise([value, 0.0])])[0]
                seen.add((proposal.tree.host_ids[0], verdict.tokens[0], len(verdict.path)))
            assert len(seen) == 1
            guess, token, count = seen.pop()
            assert count == (guess == token)
            joint[guess, token] += width
        assert joint.sum() == pytest.approx(1.0, abs=EXACT)
        assert np.abs(joint.sum(axis=0) - target.numpy()).max() < EXACT
        assert np.abs(joint.sum(axis=1) - draft.numpy()).max() < EXACT
        assert np.abs(joint.diagonal() - torch.minimum(target, draft).numpy()).max() < EXACT
        tv = float(L.total_variation(target, draft))
        assert joint.trace() >= (1 - tv) / (1 + tv) - EXACT


def test_answers_over_two_tokens_have_the_targets_distribution_in_every_cell() -> None:
    """Of every proposal, and of chains drafted under the noise that judges; the target goes on with the same noise."""
    found = answer_probs(RULE, torch.device("cpu"))
    assert found.distance < EXACT and found.moved == 0.0 and found.cells > 500


# ------------------------------------------------------------------------------- three tokens, by quadrature


def flip(low_choice: Tensor, dist: Tensor, first: Tensor) -> Tensor:
    """For noise (0, a, b), a given: the b above which the shipped choice is token 2; bisected, all rows at once."""
    low, high = torch.full_like(first, -60.0), torch.full_like(first, 60.0)
    for _ in range(70):
        middle = (low + high) / 2
        noise = torch.stack([torch.zeros_like(first), first, middle], dim=-1)
        chosen = coupled_choice(dist.expand(len(first), 3), noise) == 2
        low, high = torch.where(chosen, low, middle), torch.where(chosen, middle, high)
    return high


def test_choices_over_three_tokens_have_the_distribution_by_quadrature() -> None:
    """The choice depends on a = G1 - G0 and b = G2 - G0 alone: a is logistic, b given a has a closed form.

    Where the shipped function flips is bisected; the integral over a, split where it has a kink, is Gauss-Legendre.
    """
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(60))
    for seed in range(6):
        dist = Table(f"race/{seed}", 3, "dense").probs(())
        kink = logistic(float(dist[0].log() - dist[1].log()))  # where the choice between tokens 0 and 1 flips
        mass = [0.0, 0.0, 0.0]
        for low, high in [(0.0, kink), (kink, 1.0)]:
            v = (high - low) / 2 * nodes + (high + low) / 2
            w = (high - low) / 2 * weights
            a = v.log() - (-v).log1p()
            b = flip(a, dist, a)
            below = ((1 + (-a).exp()) / (1 + (-a).exp() + (-b).exp())) ** 2  # P(G2 - G0 <= b given a)
            rest = coupled_choice(dist.expand(len(a), 3), torch.stack([torch.zeros_like(a), a, b - 1e-6], dim=-1))
            for token in (0, 1):
                mass[token] += float((w * below * (rest == token)).sum())
            mass[2] += float((w * (1 - below)).sum())
        assert mass == pytest.approx(dist.tolist(), abs=1e-10)


def test_agreement_is_the_exponential_race() -> None:
    """P(draft = target = i) = 1 / sum_k max(p_k/p_i, q_k/q_i), and at least (1 - TV)/(1 + TV) in all.

    400,000 seeded races through the shipped functions; 5.5 standard errors, false alarm below 4e-8 for each number.
    """
    count = 400_000
    for vocab in (3, 5):
        p, q = (Table(name, vocab, "dense").probs(()) for name in ("race p", "race q"))
        uniform = torch.rand(count, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
        gumbel = -(-uniform.log()).log()
        target, draft = coupled_choice(p.expand(count, vocab), gumbel), coupled_choice(q.expand(count, vocab), gumbel)
        agree = 0.0
        for i in range(vocab):
            chance = 1.0 / float(torch.maximum(p / p[i], q / q[i]).sum())
            seen = float(((target == i) & (draft == i)).double().mean())
            assert abs(seen - chance) < 5.5 * math.sqrt(chance * (1 - chance) / count)
            drawn = float((target == i).double().mean())
            assert abs(drawn - float(p[i])) < 5.5 * math.sqrt(float(p[i]) / count)
            agree += chance
        tv = float(L.total_variation(p, q))
        assert agree >= (1 - tv) / (1 + tv)


# ------------------------------------------------------------------------------- choices and walks


def test_choice_by_hand() -> None:
    dist = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]], dtype=torch.float64)
    assert L.most_likely(dist).tolist() == [0, 1]  # greedy: the argmax, ties to the lowest id
    assert coupled_choice(dist, torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)).tolist() == [1, 1]
    assert coupled_choice(dist, torch.tensor([[0.0, 1.0, 9.0], [3.0, 0.0, 9.0]], dtype=torch.float64)).tolist() == [
        1,
        0,
    ]
    assert coupled_choice(dist.float(), torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)).tolist() == [0, 1]


def follow(proposal: Proposal, probs: Tensor, noise: KeyedNoise) -> Verdict:
    """The walk in plain Python."""
    return expected_verdict(Case(1.0, proposal, probs), noise)


def test_batched_verify_follows_the_slow_walk() -> None:
    worlds = [
        build("walk", 3, plans, "dense", "dense", bare) for plans, bare in [((A2, A2), 0), ((W2, F2), -1), ((), -1)]
    ]
    cases = [case for world in worlds for case in world.every_proposal()]
    noises = [KeyedNoise(seed=i, position=4, step=i % 5) for i in range(len(cases))]
    verdicts = RULE.verify([c.proposal for c in cases], [c.probs for c in cases], noises)
    assert verdicts == [follow(c.proposal, c.probs, noise) for c, noise in zip(cases, noises, strict=True)]
    assert {len(verdict.path) for verdict in verdicts} == {0, 1, 2}
    assert {verdict.final for verdict in verdicts} == {Origin.RECOVERED, Origin.BONUS}


def large_case(number: int, vocab: int) -> tuple[Proposal, Tensor]:
    """A tree over a large vocabulary, whose distributions are dense, cut, or one-hot; some of its tokens get
    accepted."""
    generator = torch.Generator().manual_seed(number)
    probs = L.probs_from_logits(
        torch.randn(6, vocab, generator=generator) * (1 + number % 5), SamplingParams(temperature=1.0)
    )
    if number % 3 == 1:
        probs = probs * (probs >= probs.topk(40, dim=-1).values[:, -1:])
        probs = probs / probs.sum(dim=-1, keepdim=True)
    noise = KeyedNoise(number, 4, 1)
    first, second = (
        int((probs[row].double().log() + noise.gumbel(depth, vocab, torch.device("cpu"))).argmax())
        for row, depth in ((0, 0), (1, 1))
    )
    paths = [[], [[first, second, 5], [8, 9]], [[first, 3], [8, 9, 10]]][number % 3 if number % 4 else 0]
    return (Proposal.deterministic(TokenTree.from_paths(paths)) if paths else Proposal.empty()), probs


def test_large_vocabularies_follow_the_slow_walk_whatever_stands_beside_them() -> None:
    """Where the rule does not look at every token: the walk of a request alone, in a batch, and on a device."""
    cases = [large_case(number, vocab) for number, vocab in enumerate([3_000, 9_000, 9_000, 40_000] * 3)]
    proposals = [proposal for proposal, _ in cases]
    probs = [rows[: 1 + len(proposal.tree)] for proposal, rows in cases]
    noises = [KeyedNoise(number, 4, 1) for number in range(len(cases))]
    expected = [follow(*each) for each in zip(proposals, probs, noises, strict=True)]
    assert RULE.verify(proposals, probs, noises) == expected
    assert [
        RULE.verify([p], [dist], [noise])[0] for p, dist, noise in zip(proposals, probs, noises, strict=True)
    ] == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        assert RULE.verify(proposals, probs, noises) == expected
    assert {len(verdict.path) for verdict in expected} >= {0, 1, 2}


def test_a_row_that_is_no_distribution_gives_some_token() -> None:
    """The caller discards it, but it must be one that can be looked up."""
    for vocab in (5, 9_000):
        broken = torch.full((1, vocab), math.nan)
        verdict = RULE.verify([Proposal.empty()], [broken], [KeyedNoise(1, 2, 3)])[0]
        assert 0 <= verdict.tokens[0] < vocab


def test_greedy_requests_follow_the_argmax() -> None:
    proposal = Proposal.deterministic(TokenTree.from_paths([[1, 0], [0]]))
    probs = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0]], dtype=torch.float64)
    noise = KeyedNoise(1, 0, 0)
    assert RULE.greedy_form.verify([proposal], [probs], [noise]) == [Verdict((0, 1), (1, 0, 2), Origin.BONUS)]
    assert RULE.verify([proposal], [probs], [noise]) == [follow(proposal, probs, noise)]


def any_proposal(
    chance: random.Random, vocab: int, draft: Table, prefix: tuple[int, ...], noise: KeyedNoise
) -> Proposal:
    """Whatever a drafter may guess: nothing, arbitrary fixed trees, or coupled chains with the same noise."""
    kind = chance.choice(["none", "fixed", "coupled", "coupled"])
    if kind == "none":
        return Proposal.empty()
    if kind == "fixed":
        paths = [[chance.randrange(vocab) for _ in range(chance.randint(1, 3))] for _ in range(4)]
        return Proposal.deterministic(TokenTree.from_paths(paths))
    tokens: list[int] = []
    rows = []
    for depth in range(chance.randint(1, 4)):
        rows.append(draft.probs((*prefix, *tokens)[-2:]))
        tokens.append(int(coupled_choice(rows[-1][None], noise.gumbel(depth, vocab, torch.device("cpu")))))
    return Proposal.chain(torch.tensor(tokens), torch.stack(rows), COUPLED)


def test_same_seed_same_tokens_whatever_is_drafted() -> None:
    vocab, length = 6, 120
    target, draft = Table("seeded p", vocab, "dense"), Table("seeded q", vocab, "dense")

    def answer(seed: int, drafting: random.Random | None) -> tuple[list[int], int]:
        tokens: tuple[int, ...] = ()
        steps = 0
        while len(tokens) < length:
            noise = KeyedNoise(seed, position=len(tokens), step=steps)
            steps += 1
            proposal = Proposal.empty() if drafting is None else any_proposal(drafting, vocab, draft, tokens, noise)
            tree = proposal.tree
            paths = [(), *(tree.path_tokens(i) for i in range(len(tree)))]
            probs = torch.stack([target.probs((*tokens, *path)[-2:]) for path in paths])
            tokens = (*tokens, *RULE.verify([proposal], [probs], [noise])[0].tokens)
        return list(tokens[:length]), steps

    plain, calls = answer(7, None)
    assert calls == length
    for trial in range(4):
        drafted, fewer = answer(7, random.Random(trial))
        assert drafted == plain
        assert fewer < length
    assert answer(8, None)[0] != plain
    assert len(set(plain)) == vocab


def test_kinds() -> None:
    RULE.check(list(DrawKind), "anything")
    SpeculativeSampling().check(set(DrawKind) - {COUPLED}, "anything")
    with pytest.raises(IncompatibleRuleError, match=r"'speculative'.*coupled draws of drafter 'gumbel'.*independent"):
        SpeculativeSampling().check([DrawKind.INDEPENDENT, COUPLED], "gumbel")


def test_coupled_siblings_judged_by_ratio_would_be_wrong() -> None:
    """Why the pair is refused: two siblings drafted with one noise are one token, and the second is no fresh draw."""
    p, q = torch.tensor([0.5, 0.35, 0.15], dtype=torch.float64), torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    dist = {(token,): 0.0 for token in range(3)}
    for token in range(3):
        draws = ((Draw(0, 0, DrawKind.INDEPENDENT), Draw(0, 0, DrawKind.INDEPENDENT)), ())
        case = Case(
            1.0,
            Proposal(TokenTree.chain([token]), draws, q[None]),
            torch.stack([p, torch.eye(3, dtype=torch.float64)[0]]),
        )
        for verdict, mass in cell_probs(SpeculativeSampling(), [case])[0].items():
            dist[verdict.tokens[:1]] += float(q[token]) * mass
    assert gap(dist, {(0,): 0.5, (1,): 0.35, (2,): 0.15}) == pytest.approx(0.05)  # by hand: (0.55, 0.3, 0.15)
