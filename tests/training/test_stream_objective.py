"""The chunked objective has the gradient that plain autograd gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from support.shares import assert_shares_add_up
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.training import losses
from truedraft.training.drafts import StreamObjective
from truedraft.training.losses import CrossEntropy, ForwardKL, Mixture, TotalVariation

SHAPE = LlamaShape(vocab_size=50, width=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=8)


@pytest.fixture
def batch():
    return torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(5))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [7, 60, 512])
def test_distillation_gradient(batch, monkeypatch, chunk):
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    target, draft = new_llama(SHAPE, seed=1), new_llama(SHAPE, seed=2)
    loss = Mixture(((0.5, ForwardKL()), (0.5, TotalVariation())))
    values = StreamObjective(draft, loss, target).accumulate(batch, 0.25)
    found = gradients(draft)
    draft.zero_grad()
    log_p = target(input_ids=batch[:, :-1]).logits.detach().log_softmax(-1).flatten(0, 1)
    log_q = draft(input_ids=batch[:, :-1]).logits.log_softmax(-1).flatten(0, 1)
    expected = loss(log_p, log_q, batch[:, 1:].flatten()).mean()
    (0.25 * expected).backward()
    assert values["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, gradient in gradients(draft).items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name
    assert all(p.grad is None for p in target.parameters())


def test_without_a_target_it_is_next_token_cross_entropy(batch):
    model = new_llama(SHAPE, seed=3)
    values = StreamObjective(model, CrossEntropy()).accumulate(batch, 1.0)
    logits = model(input_ids=batch[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert values == {"loss": pytest.approx(float(expected.detach()), rel=1e-5)}


def test_shares_of_processes_add_up(batch):
    draft = new_llama(SHAPE, seed=2)
    objective = StreamObjective(draft, ForwardKL(), new_llama(SHAPE, seed=1))
    assert_shares_add_up(objective, draft, batch, slice(0, 1), slice(1, 3))
