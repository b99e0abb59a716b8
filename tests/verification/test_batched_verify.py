"""What a batch of requests costs in waits for the device, and logits in place of greedy distributions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import ArgmaxRule, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.walk import Number

VOCAB = 300


def logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


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


def chains(count: int) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
    """Requests with drafted chains of 0, 1, 2, ... tokens, drawn from distributions near the target's."""
    params = SamplingParams(temperature=1.0, top_p=0.95)
    proposals, probs, noise = [], [], []
    for request in range(count):
        scores = logits(request + 1, seed=request)
        q = L.probs_from_logits(scores[:request] + 0.7 * logits(request, seed=100 + request), params)
        each = KeyedNoise(seed=request, position=9, step=2)
        uniforms = [each.uniform(Purpose.DRAFT, depth, depth) for depth in range(request)]
        tokens = L.draw(q, torch.tensor(uniforms, dtype=torch.float64))
        kind = DrawKind.INDEPENDENT
        proposals.append(Proposal.chain(tokens, q, kind) if request % 3 else fixed(tokens))
        probs.append(L.probs_from_logits(scores, params))
        noise.append(each)
    for proposal in proposals:
        assert proposal.tree.host_ids is not None  # on the host before anything is counted
    return proposals, probs, noise


def fixed(tokens: Tensor) -> Proposal:
    return Proposal.deterministic(TokenTree.chain(tokens))


def test_speculative_sampling_reads_tensors_twice_for_any_batch_of_chains(waits: Waits) -> None:
    """Once for what the distributions say of the drafted tokens, once for the final tokens."""
    proposals, probs, noise = chains(9)
    waits.count = 0
    verdicts = SpeculativeSampling().verify(proposals, probs, noise)
    assert waits.count == 2
    finals = {verdict.final for verdict, proposal in zip(verdicts, proposals, strict=True) if len(proposal.tree)}
    assert finals == {Origin.RECOVERED, Origin.BONUS}
    alone = [
        SpeculativeSampling().verify([p], [dist], [n])[0] for p, dist, n in zip(proposals, probs, noise, strict=True)
    ]
    assert verdicts == alone


@pytest.mark.parametrize("rule", [CoupledSampling(), ArgmaxRule()], ids=lambda rule: rule.name)
def test_rules_that_compare_read_tensors_once_for_any_batch(rule: Rule, waits: Waits) -> None:
    proposals, probs, _ = chains(6)
    noise = [KeyedNoise(i, 9, 2) for i in range(6)]
    waits.count = 0
    verdicts = rule.verify(proposals, probs, noise)
    assert waits.count == 1
    alone = [rule.verify([p], [dist], [n])[0] for p, dist, n in zip(proposals, probs, noise, strict=True)]
    assert verdicts == alone


def test_draft_distributions_of_another_width_of_float_are_judged_by_their_own_numbers() -> None:
    """p in float64 beside q in float32, and the other way round, in one batch."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float32)
    rule = SpeculativeSampling()
    seen: list[tuple[float, float]] = []

    class Notes(SpeculativeSampling):
        def accept_probability(self, p_x: Number, q_x: Number) -> Number:
            seen.append((p_x, q_x))
            return rule.accept_probability(p_x, q_x)

    wide = Proposal.chain(torch.tensor([0]), q)
    narrow = Proposal.chain(torch.tensor([1]), p[:1])
    Notes().verify([wide, narrow], [p, p.float()], [KeyedNoise(1, 0, 0), KeyedNoise(2, 0, 0)])
    assert seen == [(0.25, float(q[0, 0])), (0.75, 0.75)]


# ------------------------------------------------------------------------------- logits in place of greedy
# distributions


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
