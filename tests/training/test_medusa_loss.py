"""The heads' loss and gradient against plain autograd, and that training lowers it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from truedraft.errors import OptionError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.models.lm_head import LmHead
from truedraft.training import losses
from truedraft.training.head_config import HeadLoss, HeadsObjective
from truedraft.training.losses import DistillationLoss, ForwardKL
from truedraft.training.targets import ComputedTarget
from truedraft.training.texts.self_distillation import CollatedBatch, text_tokens

HEADS, DECAY = 3, 0.8


def new_heads(tied: bool, lm_head: LmHead, layers: int = 1) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(16, 50, HEADS, layers, tied, reads_token=layers == 2))
    heads.start_from(lm_head.weight)
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return heads


def objective_of(heads: MedusaHeads, lm_head: LmHead, packed: CollatedBatch, loss: DistillationLoss) -> HeadsObjective:
    return HeadsObjective(
        heads,
        lm_head,
        lambda _: packed,
        lambda batch, _: text_tokens(batch, HEADS),
        ComputedTarget(lm_head, loss),
        HeadLoss(heads, lm_head, loss, decay=DECAY),
    )


def plain_loss(heads: MedusaHeads, lm_head: LmHead, packed: CollatedBatch, share: float) -> torch.Tensor:
    """The formula, written down directly."""
    embedded = lm_head.embed(packed.tokens[packed.places])
    logits = heads.logits(packed.hidden[packed.places], lm_head, lm_head.finish, embedded)
    total = torch.zeros(())
    for head in range(HEADS):
        rows = packed.places + 1 + head
        dist = lm_head(packed.hidden[rows]).softmax(-1)
        mixture = share * dist + (1 - share) * functional.one_hot(packed.tokens[rows], 50)
        cross_entropy = -(mixture * logits[head].log_softmax(-1)).sum(-1)
        entropy = -(dist * dist.log()).sum(-1)  # which no head can change
        total = total + DECAY**head * (cross_entropy - share * entropy).mean()
    return total


@pytest.mark.parametrize("chunk", [4, 10, 256])
@pytest.mark.parametrize(("tied", "share", "layers"), [(True, 1.0, 1), (True, 0.0, 2), (True, 0.3, 1), (False, 0.6, 1)])
def test_gradient_is_that_of_the_formula(lm_head, packed, monkeypatch, chunk, tied, share, layers):
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    heads = new_heads(tied, lm_head, layers)
    loss = MedusaTrainingConfig(law_share=share).distillation_loss
    objective = objective_of(heads, lm_head, packed, loss)
    values = objective.accumulate(torch.zeros(1, 2), 0.5)
    found = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    (0.5 * plain_loss(heads, lm_head, packed, share)).backward()
    for name, parameter in heads.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name
    assert values["loss"] == pytest.approx(plain_loss(heads, lm_head, packed, share).item(), rel=1e-5)
    assert values["loss"] == pytest.approx(sum(DECAY**k * values[f"head_{k + 1}"] for k in range(HEADS)))
    assert lm_head.weight.grad is None


def test_a_new_head_starts_as_the_lm_head(lm_head, packed):
    heads = MedusaHeads(MedusaConfig(16, 50, HEADS, 1, False))
    heads.start_from(lm_head.weight)
    logits = heads.logits(packed.hidden, lm_head, lm_head.finish)
    for head in range(HEADS):
        assert torch.equal(logits[head], lm_head(packed.hidden))


def test_unusable_decays(lm_head):
    for decay in (0.0, 1.1):
        with pytest.raises(OptionError, match="place_decay must lie in"):
            HeadLoss(new_heads(True, lm_head), lm_head, ForwardKL(), decay=decay)
