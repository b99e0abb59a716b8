"""Training along a stream: the chunked objective has the gradient of plain autograd, and a draft writes text itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from support.shares import assert_shares_add_up
from truedraft.errors import OptionError
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama
from truedraft.training import losses
from truedraft.training.drafts import DraftConfig, OwnText, StreamObjective, stream_loop
from truedraft.training.loop import read_checkpoint
from truedraft.training.losses import CrossEntropy, ForwardKL, Mixture, TotalVariation
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.data import Curriculum

SHAPE = LlamaShape(vocab_size=50, width=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=8)
OWN_SHAPE = LlamaShape(
    vocab_size=300, width=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, head_size=16
)
BATCH = torch.randint(0, 300, (12, 33), generator=torch.Generator().manual_seed(3))  # as long as the context


@pytest.fixture
def batch():
    return torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(5))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_distillation_gradient(batch, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK", 7)
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
    draft.zero_grad()
    assert_shares_add_up(StreamObjective(draft, ForwardKL(), target), draft, batch, slice(0, 1), slice(1, 3))


def test_without_a_target_it_is_next_token_cross_entropy(batch):
    model = new_llama(SHAPE, seed=3)
    values = StreamObjective(model, CrossEntropy()).accumulate(batch, 1.0)
    logits = model(input_ids=batch[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert values == {"loss": pytest.approx(float(expected.detach()), rel=1e-5)}


def test_the_second_half_is_what_the_student_draws_as_it_is_now() -> None:
    student = new_llama(OWN_SHAPE, seed=1)
    own = OwnText(student, 1.0, seed=0)
    written = own(BATCH)
    assert torch.equal(written[:, :16], BATCH[:, :16]) and torch.equal(written[:, 32], BATCH[:, 32])
    assert ((written != BATCH)[:, 16:32].float().mean(1) > 0.8).all(), "of 300 tokens a draw is seldom the text's"
    assert all(weight.requires_grad for weight in student.parameters())
    with torch.no_grad():  # from now on it says what it has read
        for weight in student.model.layers.parameters():
            weight.zero_()
        student.model.norm.weight.fill_(10)
        for table in (student.lm_head, student.model.embed_tokens):
            table.weight.copy_(10 * torch.eye(300, 32))
    few = BATCH.clamp_max(31)
    assert torch.equal(own(few)[:, 16:32], few[:, 15:16].expand(-1, 16)), "also behind what ends a text"


def test_which_sequences_and_what_they_become_depends_on_no_neighbour() -> None:
    student = new_llama(OWN_SHAPE, seed=1)
    own = OwnText(student, 0.5, seed=0)
    written = own(BATCH)
    assert 2 <= int((written != BATCH).any(1).sum()) <= 10
    assert torch.equal(torch.cat([own(each[None]) for each in BATCH]), written)
    assert not torch.equal(OwnText(student, 0.5, seed=1)(BATCH), written)


def test_a_training_goes_on_with_the_same_text(target_folder: Path, stream: np.ndarray, tmp_path: Path) -> None:
    target, schedule, lengths = load_causal_lm(target_folder), WarmupStableDecay(1, 3, 2), Curriculum(16, 32, 64, 64)
    config = DraftConfig(schedule=schedule, curriculum=lengths, on_policy=0.5)
    for folder, stops in (("whole", [None]), ("resumed", [1, 4, None])):
        for until in stops:
            stream_loop(config, target, new_llama(OWN_SHAPE, seed=2), stream, tmp_path / folder).run(until=until)
    whole, resumed = (read_checkpoint(tmp_path / each / "checkpoint.pt")["model"] for each in ("whole", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_a_loss_of_the_text_alone_has_nothing_to_learn_from_it() -> None:
    for options, said in (({"loss": CrossEntropy(), "on_policy": 0.5}, "compares distr"), ({"on_policy": 2}, "on_p")):
        with pytest.raises(OptionError, match=said):
            DraftConfig(**options)
