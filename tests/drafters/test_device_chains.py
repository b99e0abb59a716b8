"""Chains that stay on the device hold what the same chains drawn on the host hold."""

from __future__ import annotations

import pytest
import torch

from support.tiny_models import PROMPTS, noisy
from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import DraftModel
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.growing import DeviceChain

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, coupled=True),
]


def proposals_of(drafter: DraftModel, budgets: list[Budget], far: bool) -> list[Proposal]:
    """Proposals for requests of all kinds side by side."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(transfers, "waits", lambda device: far)
        batch = [
            DraftRequest(number, params, list(PROMPTS[number]))
            for number, (params, _) in enumerate(zip(KINDS, budgets, strict=True))
        ]
        for request in batch:
            drafter.begin(request)
        noise = [KeyedNoise(request.id, 9, 1, greedy=request.params.greedy) for request in batch]
        proposals = drafter.propose(batch, budgets, noise)
        assert all(proposal.tree.is_known is not (far and len(proposal.tree) > 0) for proposal in proposals)
        for request in batch:
            drafter.end(request)
        return proposals


@pytest.mark.parametrize(
    "budgets",
    [
        [Budget(4)] * 4,
        [Budget(4), Budget(1), Budget(0), Budget(3)],
        [Budget(4, nodes=2), Budget(9), Budget(2, width=1), Budget(4, width=0)],
    ],
)
def test_a_chain_is_the_same_wherever_it_is_drawn(budgets: list[Budget]) -> None:
    drafter = DraftModel(noisy("llama", 0.1), num_speculative_tokens=5)
    for ours, theirs in zip(
        proposals_of(drafter, budgets, far=True), proposals_of(drafter, budgets, far=False), strict=True
    ):
        assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()
        assert ours.tree.shape == theirs.tree.shape
        assert ours.draws == theirs.draws
        assert (ours.probs is None) == (theirs.probs is None)
        assert ours.probs is None or (theirs.probs is not None and torch.equal(ours.probs, theirs.probs))


def test_which_trees_are_chains_that_no_token_cuts() -> None:
    assert DeviceChain.fits(Budget(4), (1, 1, 1, 1))
    assert DeviceChain.fits(Budget(1), (1, 3))
    assert DeviceChain.fits(Budget(3, width=1), (3, 2, 1))
    assert not DeviceChain.fits(Budget(2, width=4), (1, 3))
    assert not DeviceChain.fits(Budget(4, min_probability=0.1), (1, 1, 1, 1))
