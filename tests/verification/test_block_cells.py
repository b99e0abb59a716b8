"""Block verification as users run it: the batched `verify`, in both ways, at one noise value in every decision cell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from decision_cells import ScriptedNoise, cell_probs, completed, kernel_dist, run, step_dist
from small_worlds import A1, A2, F1, F2, INDEPENDENT, STYLES, Case, Choice, World, build, every_proposal, gap
from test_block_distribution import BROKEN, BROKEN_ON, CAUGHT, EXACT, RULE, BlockReference
from test_eager_verdicts import KINDS, batch, eagerly
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise, Noise, Purpose
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import BlockVerification, SpeculativeSampling
from truedraft.verification.exact import target_dist
from truedraft.verification.rule import JudgedRow, Outcome
from truedraft.verification.walk import Number

MERGED = (Choice("a", INDEPENDENT), Choice("b", INDEPENDENT))


class Twice(BlockVerification):
    """Judges every batch in both ways and insists that they agree."""

    def __init__(self) -> None:
        self.judged = 0

    def verify(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        verdicts = super().verify(proposals, probs, noise)
        if proposals:
            scripts = [ScriptedNoise(own.script) for own in noise]  # type: ignore[attr-defined]
            assert eagerly(RULE, proposals, probs, scripts) == verdicts
            self.judged += len(verdicts)
        return verdicts


CHAINS = [
    *(build("block cells", 2, [A1] * 4, p, q) for p, q in STYLES),
    *(build("block cells", 3, [A1] * 3, p, q) for p, q in [("dense", "dense"), ("varied", "varied")]),
    *(build("block cells", 3, [A1] * 2, p, q) for p, q in STYLES),
    *(build("block cells", vocab, [A1] * 2, "dense", q) for vocab, q in [(4, "dense"), (4, "sparse"), (5, "dense")]),
    build("block cells", 3, [A1] * 4, "dense", "dense"),
    build("block cells", 3, [A1] * 3, "dense", "dense", bare=1),
]
MIXED = [
    build("block cells", vocab, plans, p, q, bare)
    for plans, vocab, p, q, bare in [
        ((A2, A1, A1), 2, "dense", "dense", -1),
        ((A1, A1, A2), 2, "varied", "varied", -1),
        ((A1, MERGED, A1), 2, "dense", "dense", 0),
        ((F1, A1, A1), 3, "dense", "dense", -1),
        ((A1, F2, A1), 2, "dense", "sparse", -1),
        ((A1, A1, F1), 3, "sparse", "dense", 1),
        ((F2, F1), 3, "dense", "dense", -1),
        ((A1, F1, A1), 4, "sparse", "dense", -1),
        ((F1, A1, A1), 5, "dense", "dense", -1),
        ((), 3, "dense", "dense", -1),
    ]
]


@pytest.mark.parametrize("worlds", [CHAINS, MIXED], ids=["chains", "blocks between other draws"])
@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
def test_in_every_decision_cell(worlds: list[World], vocab: int) -> None:
    """All proposals of all worlds with one vocabulary, chains and trees of several shapes, in the same batches."""
    rule = Twice()
    worlds = [world for world in worlds if world.vocab == vocab]
    groups = [every_proposal(world) for world in worlds]
    found = iter(cell_probs(rule, [case for group in groups for case in group]))
    for world, group in zip(worlds, groups, strict=True):
        probs = [next(found) for _ in group]
        for case, dist in zip(group, probs, strict=True):
            assert gap(dist, kernel_dist(RULE, case)) < EXACT
        step = step_dist(group, probs)
        length = len(world.plans) + 1
        assert gap(completed(step, world.target.dist, length), target_dist(world.target.dist, length)) < EXACT
        if all(plan == A1 for plan in world.plans):
            assert gap(step, BlockReference(world).step(())) < EXACT
    assert rule.judged > 5 * sum(map(len, groups))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rule: type(rule).__name__)
def test_a_broken_rule_is_caught_through_verify(broken: BlockVerification) -> None:
    assert by_verify(RULE) < EXACT
    assert by_verify(broken) > CAUGHT


def by_verify(rule: BlockVerification) -> float:
    cases = every_proposal(BROKEN_ON)
    step = step_dist(cases, cell_probs(rule, cases))
    return gap(completed(step, BROKEN_ON.target.dist, 3), target_dist(BROKEN_ON.target.dist, 3))


def test_a_kernel_that_hides_what_verify_does_is_caught() -> None:
    class Hides(BlockVerification):
        def pass_probability(self, weight: Number, mass: Number) -> Number:
            return 0.9 * super().pass_probability(weight, mass)

        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            return RULE.outcomes(group)

    cases = every_proposal(BROKEN_ON)
    gaps = [gap(dist, kernel_dist(Hides(), case)) for case, dist in zip(cases, cell_probs(Hides(), cases), strict=True)]
    assert max(gaps) > CAUGHT


def test_keys_asked_for_are_those_of_the_prefixes_longest_first() -> None:
    """A prefix's key is that of its last token; none is asked twice (`ScriptedNoise`), none is the drafter's."""
    cases = every_proposal(build("block keys", 3, [A1] * 3))
    for script in ({}, {(Purpose.ACCEPT, depth, 0): 0.3 for depth in range(3)}):
        for verdict, asked in run(RULE, cases, [script] * len(cases)):
            kept = len(verdict.path)
            prefixes = [(Purpose.ACCEPT, length - 1, 0) for length in range(3, max(kept, 1) - 1, -1)]
            final = Purpose.RECOVERED if verdict.final is Origin.RECOVERED else Purpose.BONUS
            assert asked == [*prefixes, (final, kept, 0)]
            assert (verdict.final is Origin.BONUS) == (kept == 3)


def test_a_token_that_would_be_rejected_alone_is_kept_by_those_behind_it() -> None:
    """p_1/q_1 = 1/2 and p_2/q_2 = 2: together they are as likely under the target as under the draft."""
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    case = Case(1.0, Proposal.chain(torch.tensor([0, 0]), q), p)
    script = {(Purpose.ACCEPT, depth, 0): 0.9 for depth in range(2)}
    assert run(RULE, [case], [script])[0][0].path == (0, 1)
    assert run(SpeculativeSampling(), [case], [script])[0][0].path == ()


# ------------------------------------------------------------------------------- random proposals, in batches


@pytest.mark.parametrize(("vocab", "count"), [(3, 200), (9, 200), (500, 60), (9001, 8)])
def test_both_ways_on_random_proposals_together_and_alone(vocab: int, count: int) -> None:
    """Trees, merged trees, chains and candidates in float32, near the target's distributions or not."""
    proposals, probs, noise = batch(count, vocab, seed=vocab, of=[KINDS[0], KINDS[2]])
    mine = chains(count, vocab)
    proposals, probs, noise = [*proposals, *mine[0]], [*probs, *mine[1]], [*noise, *mine[2]]
    verdicts = RULE.verify(proposals, probs, noise)
    assert eagerly(RULE, proposals, probs, noise) == verdicts
    each = list(zip(proposals, probs, noise, strict=True))
    assert [RULE.verify([p], [dist], [n])[0] for p, dist, n in each] == verdicts
    assert [eagerly(RULE, [p], [dist], [n])[0] for p, dist, n in each] == verdicts
    if count > 50:
        assert {len(verdict.path) for verdict in verdicts[count:]} == {0, 1, 2, 3, 4}


def chains(count: int, vocab: int) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
    """Chains of 0 to 4 tokens, drawn as a drafter draws, from distributions near the target's."""
    generator = torch.Generator().manual_seed(vocab)
    proposals, probs, noise = [], [], []
    for number in range(count):
        length = number % 5
        scores = 2 * torch.randn(length + 1, vocab, generator=generator)
        q = torch.softmax(scores[:length] + 0.5 * torch.randn(length, vocab, generator=generator), dim=-1)
        tokens = torch.multinomial(q, 1, generator=generator)[:, 0] if length else torch.zeros(0, dtype=torch.int64)
        proposals.append(Proposal.chain(tokens, q))
        probs.append(torch.softmax(scores, dim=-1))
        noise.append(KeyedNoise(number, 3, 1))
    return proposals, probs, noise


@pytest.mark.parametrize(("target", "draft"), [("float64", "float32"), ("float32", "float64")])
def test_draft_distributions_of_another_width_of_float(target: str, draft: str) -> None:
    proposals, probs, noise = chains(150, 7)
    proposals = [
        Proposal.chain(p.tree.tokens, p.probs.to(getattr(torch, draft))) for p in proposals if p.probs is not None
    ]
    probs = [dist.to(getattr(torch, target)) for dist in probs]
    assert eagerly(RULE, proposals, probs, noise) == RULE.verify(proposals, probs, noise)


def test_the_weights_of_a_device_are_those_of_the_host_to_the_bit() -> None:
    numbers = torch.tensor([0.0, 1e-45, 1e-30, 0.1, 1 / 3, 0.5, 0.7, 1.0], dtype=torch.float64)
    above, p, q = (each.flatten() for each in torch.meshgrid(numbers, numbers, numbers, indexing="ij"))
    expected = [RULE.weight(*each) for each in zip(above.tolist(), p.tolist(), q.tolist(), strict=True)]
    assert RULE.weight(above, p, q).tolist() == expected
    by_hand = [
        min(1.0, w * a / b) if w * a and b else float(w * a > 0)
        for w, a, b in zip(*(each.tolist() for each in (above, p, q)), strict=True)
    ]
    assert expected == pytest.approx(by_hand)


def test_a_broken_part_breaks_both_ways_alike() -> None:
    proposals, probs, noise = chains(150, 5)
    right = RULE.verify(proposals, probs, noise)
    for broken in [rule for rule in BROKEN if type(rule).weight is BlockVerification.weight]:
        eager = eagerly(broken, proposals, probs, noise)
        assert eager == broken.verify(proposals, probs, noise)
        assert eager != right, broken


def test_deterministic_candidates_are_judged_as_by_speculative_sampling() -> None:
    """With q one-hot the weight is the product of p(x): jointly as many stay as one by one, so they go one by one."""
    proposals, probs, noise = batch(100, 5, seed=3, of=[KINDS[2]])
    assert any(len(verdict.path) > 1 for verdict in RULE.verify(proposals, probs, noise))
    assert RULE.verify(proposals, probs, noise) == SpeculativeSampling().verify(proposals, probs, noise)


def test_nothing_is_read_before_all_is(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals, probs, noise = batch(30, 11, seed=2, of=[KINDS[0], KINDS[2]])
    mine = chains(30, 11)
    proposals, probs, noise = [*proposals, *mine[0]], [*probs, *mine[1]], [*noise, *mine[2]]
    expected = RULE.verify(proposals, probs, noise)
    hidden = [Proposal(TokenTree(p.tree.tokens, p.tree.shape), p.draws, p.probs) for p in proposals]
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        for name in ("tolist", "item", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(Tensor, name, lambda tensor, name=name: pytest.fail(f"{name} of {tensor.shape}"))
        decided = RULE.accept(hidden, probs, noise)
    numbers = transfers.fetch(decided.wanted)
    for proposal in hidden:
        proposal.tree.keep_host_ids(proposal.tree.tokens.tolist())
    assert decided.verdicts(hidden, numbers) == expected


def test_verify_changes_nothing_it_was_given() -> None:
    proposals, probs, noise = chains(20, 6)
    before = [(dist.clone(), p.probs.clone()) for dist, p in zip(probs, proposals, strict=True) if p.probs is not None]
    first = RULE.verify(proposals, probs, noise)
    assert eagerly(RULE, proposals, probs, noise) == RULE.verify(proposals, probs, noise) == first
    for proposal, dist, (mine, drafted) in zip(proposals, probs, before, strict=True):
        assert torch.equal(dist, mine)
        assert proposal.probs is not None and torch.equal(proposal.probs, drafted)
