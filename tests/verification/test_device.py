"""Verdicts of batches: the same alone, on the CPU and on a device; what is read, and from where decisions come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from small_worlds import (
    A1,
    A2,
    EXACT,
    F1,
    F2,
    TWO_DRAFTERS,
    W1,
    W2,
    W3,
    Case,
    build,
    cell_probs,
    eagerly,
    gap,
    run,
)
from torch import Tensor

from truedraft.certify.cells import BELOW_ONE, ScriptedNoise, kernel_probs, step_probs
from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, DrawKind, Proposal, merge
from truedraft.core.tree import TokenTree, TreeShape
from truedraft.core.verdict import Origin, Verdict
from truedraft.testing import altered
from truedraft.verification import ArgmaxRule, BlockVerification, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.walk import Number

RULE, BLOCK = SpeculativeSampling(), BlockVerification()
KINDS = (DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC)
Requests = tuple[list[Proposal], list[Tensor], list[KeyedNoise]]

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


def block_chains(count: int, vocab: int) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
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


def block_batch(count: int, vocab: int) -> Requests:
    """Trees, merged trees and candidates, and then chains."""
    return tuple(
        one + other
        for one, other in zip(
            batch(count, vocab, seed=vocab, of=[KINDS[0], KINDS[2]]), block_chains(count, vocab), strict=True
        )
    )


@pytest.mark.parametrize(("vocab", "count"), [(3, 300), (9, 200), (500, 60), (9001, 8)])
@pytest.mark.parametrize("rule", [RULE, BLOCK], ids=lambda rule: rule.name)
def test_random_proposals_together_and_alone_both_ways(rule: Rule, vocab: int, count: int) -> None:
    """Near the target's distributions or not, in float32; nothing that was given is changed."""
    given = batch(count, vocab, seed=vocab) if rule is RULE else block_batch(count, vocab)
    proposals, probs, _ = given
    before = [table.clone() for table in (*probs, *(p.probs for p in proposals if p.probs is not None))]
    verdicts = rule.verify(*given)
    assert eagerly(rule, *given) == verdicts
    alone = [eagerly(rule, [p], [dist], [n])[0] for p, dist, n in zip(*given, strict=True)]
    assert alone == verdicts
    tables = (*probs, *(p.probs for p in proposals if p.probs is not None))
    assert all(torch.equal(one, other) for one, other in zip(before, tables, strict=True))
    if count > 50:
        assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2}
        assert {verdict.final for verdict in verdicts} == {Origin.RECOVERED, Origin.BONUS}
        drawn = {frozenset(draw.kind for draw in each) for p in proposals for each in p.draws if len(each) > 1}
        if rule is RULE:
            assert drawn >= {frozenset({kind}) for kind in KINDS} | {frozenset(KINDS)}
        else:
            assert {len(verdict.path) for verdict in verdicts[count:]} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("target", "draft"), [("float64", "float32"), ("float32", "float64")])
@pytest.mark.parametrize("rule", [RULE, BLOCK], ids=lambda rule: rule.name)
def test_draft_distributions_of_another_width_of_float(rule: Rule, target: str, draft: str) -> None:
    of = None if rule is RULE else [KINDS[0], KINDS[2]]
    proposals, probs, noise = batch(200, 7, seed=4, draft_dtype=getattr(torch, draft), of=of)
    probs = [dist.to(getattr(torch, target)) for dist in probs]
    assert eagerly(rule, proposals, probs, noise) == rule.verify(proposals, probs, noise)


def test_the_weights_of_a_device_are_those_of_the_host_to_the_bit() -> None:
    numbers = torch.tensor([0.0, 1e-45, 1e-30, 0.1, 1 / 3, 0.5, 0.7, 1.0], dtype=torch.float64)
    above, p, q = (each.flatten() for each in torch.meshgrid(numbers, numbers, numbers, indexing="ij"))
    expected = [BLOCK.weight(*each) for each in zip(above.tolist(), p.tolist(), q.tolist(), strict=True)]
    assert BLOCK.weight(above, p, q).tolist() == expected
    by_hand = [
        min(1.0, w * a / b) if w * a and b else float(w * a > 0)
        for w, a, b in zip(*(each.tolist() for each in (above, p, q)), strict=True)
    ]
    assert expected == pytest.approx(by_hand)


def test_probabilities_are_read_from_tables_in_their_own_precision() -> None:
    """p in float64 beside q in float32, and the other way round, in one batch."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float32)
    seen: list[tuple[float, float]] = []

    def accept_probability(p_x: Number, q_x: Number) -> Number:
        seen.append((p_x, q_x))
        return RULE.accept_probability(p_x, q_x)

    wide, narrow = Proposal.chain(torch.tensor([0]), q), Proposal.chain(torch.tensor([1]), p[:1])
    watched = altered(RULE, accept_probability=accept_probability)
    watched.verify([wide, narrow], [p, p.float()], [KeyedNoise(1, 0, 0), KeyedNoise(2, 0, 0)])
    assert seen == [(0.25, float(q[0, 0])), (0.75, 0.75)]


def test_deterministic_candidates_are_judged_as_by_speculative_sampling() -> None:
    """With q one-hot the weight is the product of p(x): jointly as many stay as one by one, so they go one by one."""
    given = batch(100, 5, seed=3, of=[KINDS[2]])
    assert any(len(verdict.path) > 1 for verdict in BLOCK.verify(*given))
    assert BLOCK.verify(*given) == RULE.verify(*given)


@pytest.mark.parametrize("rule", [RULE, CoupledSampling(), BLOCK, ArgmaxRule()], ids=lambda rule: rule.name)
def test_no_requests_have_no_verdicts(rule: Rule) -> None:
    assert eagerly(rule, [], [], []) == rule.verify([], [], []) == []


def test_verdicts_of_a_device_follow_the_distribution() -> None:
    """Summed over its own cells, found by its own answers: the distribution of a step, with no help from the other
    way."""
    device = altered(RULE, verify=lambda *given: eagerly(RULE, *given))
    for plans in ((A2, W1), (W3,), (F2, A1)):
        cases = build("eager distribution", 3, plans).every_proposal()
        theirs = step_probs(cases, [kernel_probs(RULE, case) for case in cases])
        assert gap(step_probs(cases, cell_probs(device, cases)), theirs) < EXACT


# ------------------------------------------------------------------------------- decisions by hand


def test_the_first_token_is_kept_exactly_below_its_acceptance_probability() -> None:
    """u < p/q keeps, u = p/q does not: the cell [0, p/q) has the acceptance probability as its width."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    case = Case(1.0, Proposal.chain(torch.tensor([0]), q), p)
    key, last = (Purpose.ACCEPT, 0, 0), (Purpose.BONUS, 1, 0)
    below = math.nextafter(0.5, 0.0)
    (kept, _), (gone, _) = run(RULE, [case, case], [{key: below, last: 0.0}, {key: 0.5}])
    assert kept == Verdict((0,), (0, 0), Origin.BONUS)
    assert gone == Verdict((), (1,), Origin.RECOVERED)  # norm(max(0, p - q)) is all on token 1


def test_equal_distributions_accept_everything_and_disjoint_distributions_nothing() -> None:
    dist = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    one, other = torch.eye(2, dtype=torch.float64)[:, None]
    equal = Case(1.0, Proposal.chain(torch.tensor([0]), dist), dist.expand(2, 2))
    apart = Case(1.0, Proposal.chain(torch.tensor([0]), one), other.expand(2, 2))
    key = (Purpose.ACCEPT, 0, 0)
    (kept, _), (gone, _) = run(RULE, [equal, apart], [{key: BELOW_ONE}, {key: 0.0}])
    assert kept.path == (0,)
    assert gone == Verdict((), (1,), Origin.RECOVERED)


def test_a_token_that_would_be_rejected_alone_is_kept_by_those_behind_it() -> None:
    """p_1/q_1 = 1/2 and p_2/q_2 = 2: together they are as likely under the target as under the draft."""
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    case = Case(1.0, Proposal.chain(torch.tensor([0, 0]), q), p)
    script = {(Purpose.ACCEPT, depth, 0): 0.9 for depth in range(2)}
    assert run(BLOCK, [case], [script])[0][0].path == (0, 1)
    assert run(RULE, [case], [script])[0][0].path == ()


def test_keys_asked_for_are_those_of_the_walk_and_never_the_drafters() -> None:
    """Which key decides what is part of the contract: a drafter's own draws use Purpose.DRAFT. None is asked twice."""
    cases = build("keys", 3, [W2, A1]).every_proposal()
    for (verdict, asked), case in zip(run(RULE, cases, [{}] * len(cases)), cases, strict=True):
        depth = len(verdict.path)
        final = Purpose.BONUS if verdict.final is Origin.BONUS else Purpose.RECOVERED
        expected = []
        for level, row in enumerate([0, *(node + 1 for node in verdict.path)]):
            draws = case.proposal.draws[row]
            judged = sum(key[0] is Purpose.ACCEPT and key[1] == level for key in asked)
            assert (judged == len(draws)) if level == depth else (draws[judged - 1].child == verdict.path[level])
            expected += [(Purpose.ACCEPT, level, index) for index in range(judged)]
        assert asked == [*expected, (final, depth, 0)]


def test_keys_of_a_block_are_those_of_the_prefixes_longest_first() -> None:
    """A prefix's key is that of its last token; none is asked twice (`ScriptedNoise`), none is the drafter's."""
    cases = build("block keys", 3, [A1] * 3).every_proposal()
    for script in ({}, {(Purpose.ACCEPT, depth, 0): 0.3 for depth in range(3)}):
        for verdict, asked in run(BLOCK, cases, [script] * len(cases)):
            kept = len(verdict.path)
            prefixes = [(Purpose.ACCEPT, length - 1, 0) for length in range(3, max(kept, 1) - 1, -1)]
            final = Purpose.RECOVERED if verdict.final is Origin.RECOVERED else Purpose.BONUS
            assert asked == [*prefixes, (final, kept, 0)]
            assert (verdict.final is Origin.BONUS) == (kept == 3)


def test_temperature_zero_follows_the_argmax_whatever_the_noise() -> None:
    for world in [build("greedy", 3, plans, "one-hot", "dense") for plans in [(A2, A1), (W3, W1), (F2, F2)]]:
        cases = world.every_proposal()
        for case, dist in zip(cases, cell_probs(RULE, cases), strict=True):
            longest = max((verdict.tokens for verdict in dist), key=len)
            for i, token in enumerate(longest):
                assert token == int(world.target.probs(longest[:i]).argmax())
            if case.proposal.kinds == {DrawKind.DETERMINISTIC}:
                assert len(dist) == 1  # nothing is left to chance


def test_a_batch_answers_as_each_request_alone_under_scripts() -> None:
    worlds = [build("alone", 3, plans) for plans in [(A1, A1), (W2, F1), (), (TWO_DRAFTERS,)]]
    cases = [case for world in worlds for case in world.every_proposal()][::3]
    keys = [(purpose, depth, index) for purpose in list(Purpose) for depth in range(3) for index in range(3)]
    numbers = torch.rand(len(cases), len(keys), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scripts = [dict(zip(keys, own, strict=True)) for own in numbers.tolist()]
    together = run(RULE, cases, scripts)
    assert together == [run(RULE, [case], [script])[0] for case, script in zip(cases, scripts, strict=True)]
    assert len({verdict for verdict, _ in together}) > 10


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


# ------------------------------------------------------------------------------- what is waited for


@pytest.mark.parametrize("rule", [RULE, BLOCK, CoupledSampling(), ArgmaxRule()], ids=lambda rule: rule.name)
def test_nothing_is_read_before_all_is(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    proposals, probs, noise = block_batch(30, 11) if rule is BLOCK else batch(40, 11, seed=2)
    expected = rule.verify(proposals, probs, noise)
    on_device = [TokenTree(proposal.tree.tokens, proposal.tree.shape) for proposal in proposals]
    read: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        hidden = [Proposal(tree, p.draws, p.probs) for tree, p in zip(on_device, proposals, strict=True)]
        for name in Waits.NAMES:
            patch.setattr(Tensor, name, lambda tensor, name=name: pytest.fail(f"{name} of {tensor.shape}"))
        patch.setattr("truedraft.verification.coupled.most_likely", lambda scores: scores.argmax(dim=-1))
        decided = rule.accept(hidden, probs, noise)

        def counted(tensor: Tensor) -> object:
            read.append(tensor.numel())
            return torch._C.TensorBase.tolist(tensor)

        patch.setattr(Tensor, "tolist", counted)
        wants = [*(tree.tokens for tree in on_device), *decided.wanted]
        numbers = transfers.fetch(wants)
        assert read == [sum(each.numel() for each in wants)]
    for tree, ids in zip(on_device, numbers, strict=False):
        tree.keep_host_ids([int(token) for token in ids])
    assert decided.verdicts(hidden, numbers[len(on_device) :]) == expected


class Waits:
    """Counts the answers that are fetched from tensors; `verify` may fetch few, whatever the batch."""

    NAMES = ("tolist", "item", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in self.NAMES:
            patch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, original: object) -> object:
        def counted(tensor: Tensor) -> object:
            self.count += 1
            return original(tensor)  # type: ignore[operator]

        return counted


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    yield Waits(monkeypatch)


@pytest.mark.parametrize(
    ("rule", "reads"),
    [(RULE, 1), (CoupledSampling(), 1), (ArgmaxRule(), 1)],
    ids=lambda each: getattr(each, "name", ""),
)
def test_rules_read_tensors_as_often_for_any_batch_of_chains(rule: Rule, reads: int, waits: Waits) -> None:
    """What distributions say of drafted tokens is read from arrays, so only the final tokens count."""
    given = block_chains(9, 300)
    assert all(proposal.tree.host_ids is not None for proposal in given[0])  # on the host before anything is counted
    waits.count = 0
    rule.verify(*given)
    assert waits.count == reads


# ------------------------------------------------------------------------------- logits of greedy requests


VOCAB = 300


def logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def fixed(tokens: Tensor) -> Proposal:
    return Proposal.deterministic(TokenTree.chain(tokens))


def noises(count: int) -> list[KeyedNoise]:
    return [KeyedNoise(i, 0, 0) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_greedy_requests_are_judged_by_their_logits_as_by_their_distributions(dtype: torch.dtype) -> None:
    """bfloat16 rounds logits together: the argmax of equals is the lowest id, for distributions and logits alike."""
    tables = [logits(4, seed).to(dtype) for seed in range(8)]
    for table in tables:
        table[:, [250, 30, 299]] = table.amax(dim=-1, keepdim=True)
    best = [table.argmax(dim=-1).tolist() for table in tables]
    proposals = [
        Proposal.empty(),
        fixed(torch.tensor(best[1][:3])),
        fixed(torch.tensor([best[2][0], 30, 5])),
        fixed(torch.tensor([299, 30, 30])),  # an equal of the argmax, but not the lowest
        Proposal.deterministic(TokenTree.from_paths([[7, 8], [best[4][0]]])),
        *(fixed(torch.tensor(each[:3])) for each in best[5:]),
    ]
    given = [table[: len(proposal.tree) + 1] for table, proposal in zip(tables, proposals, strict=True)]
    probs = [L.probs_from_logits(own, SamplingParams(temperature=0.0)) for own in given]
    verdicts = ArgmaxRule().verify(proposals, given, noises(8))
    for rule in (ArgmaxRule(), CoupledSampling(), SpeculativeSampling()):
        assert verdicts == rule.verify(proposals, probs, noises(8))
    assert verdicts[1] == Verdict((0, 1, 2), tuple(best[1]), Origin.BONUS)
    assert verdicts[3] == Verdict((), (30,), Origin.RECOVERED) or best[3][0] != 30
    assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 3}


def test_broken_logits_of_a_greedy_request_touch_no_other() -> None:
    rule = ArgmaxRule()
    scores = logits(2, 5)
    broken = scores.clone()
    broken[0, 17] = torch.nan
    kept = fixed(scores[:1].argmax(dim=-1))
    verdicts = rule.verify([kept, kept], [broken, scores], noises(2))
    assert verdicts[1] == rule.verify([kept], [scores], noises(1))[0]
    assert 0 <= verdicts[0].tokens[0] < VOCAB
