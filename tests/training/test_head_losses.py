"""Heads in training: loss and gradient against the formula, what they read, and what they start as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.shares import assert_shares_add_up
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig, SelfFeeding
from truedraft.training import losses
from truedraft.training.head_config import HeadLoss, HeadsObjective, heads_optimizer
from truedraft.training.losses import (
    CrossEntropy,
    DistillationLoss,
    ForwardKL,
    Mixture,
    computed_target,
    loss_from_spec,
)
from truedraft.training.texts.self_distillation import CollatedBatch, text_tokens

LENGTH, DECAY = 3, 0.7


def head_of(**sizes) -> RedrafterHead:
    config = {"width": 16, "vocab_size": 50, "state": 12, "exit_width": 16, "layers": 2, "length": LENGTH} | sizes
    return shaken(RedrafterHead(RedrafterConfig(**config)))


def shaken(head):
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return head


def medusa_of(lm_head, tied: bool = True, layers: int = 1) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(16, 50, LENGTH, layers, tied, reads_token=layers == 2))
    heads.start_from(lm_head.weight)
    return shaken(heads)


def objective_of(head, lm_head, packed: CollatedBatch, loss: DistillationLoss, feed=None) -> HeadsObjective:
    feed = feed or (lambda batch, _: text_tokens(batch, LENGTH))
    weighted = HeadLoss(head, lm_head, loss, DECAY)
    return HeadsObjective(weighted, lambda _: packed, feed, computed_target(lm_head, loss))


def plain_loss(head, lm_head, packed: CollatedBatch, loss: DistillationLoss) -> torch.Tensor:
    """The formula, written down directly: no chunks, no shared rows."""
    hidden, total = packed.hidden[packed.places], torch.zeros(())
    if isinstance(head, MedusaHeads):
        given = head.logits(hidden, lm_head, lm_head.finish, lm_head.embed(packed.tokens[packed.places]))
    else:
        given, state = [], torch.zeros(len(hidden), head.config.state)
        for place in range(LENGTH):
            state = head.advance(state, lm_head.embed(packed.tokens[packed.places + place]))
            vectors = head.leaving(hidden, state)
            given.append(lm_head(vectors) if head.output is None else lm_head.finish(head.output(vectors)))
    for place, logits in enumerate(given):
        rows = packed.places + 1 + place
        dist = lm_head(packed.hidden[rows]).log_softmax(-1)
        total = total + DECAY**place * loss(dist, logits.log_softmax(-1), packed.tokens[rows]).mean()
    return total


HEADS = {
    "medusa, kl": (lambda lm_head: medusa_of(lm_head), "kl"),
    "medusa, ce": (lambda lm_head: medusa_of(lm_head, layers=2), "ce"),
    "medusa, mixture": (lambda lm_head: medusa_of(lm_head), "ce=0.7,kl=0.3"),
    "medusa, free": (lambda lm_head: medusa_of(lm_head, tied=False), "ce=0.4,kl=0.6"),
    "kl": (lambda _: head_of(), "kl"),
    "ce": (lambda _: head_of(tied=False, exit_width=20), "ce"),
    "reverse-kl": (lambda _: head_of(), "reverse-kl"),
    "tv": (lambda _: head_of(rnn=False, state=16), "tv"),
    "mixture": (lambda _: head_of(tied=False, exit_width=28), "kl=0.5,tv=0.5"),
}


@pytest.mark.parametrize("name", HEADS)
def test_gradient_is_that_of_the_formula(lm_head, packed, monkeypatch, name):
    monkeypatch.setattr(losses, "_CHUNK", 4)
    make, spec = HEADS[name]
    head, loss = make(lm_head), loss_from_spec(spec)
    values = objective_of(head, lm_head, packed, loss).accumulate(torch.zeros(1, 2), 0.5)
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    (0.5 * plain_loss(head, lm_head, packed, loss)).backward()
    for name, parameter in head.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name
    assert values["loss"] == pytest.approx(plain_loss(head, lm_head, packed, loss).item(), rel=1e-4)
    places = [values[f"{head.place_word}_{place}"] for place in range(1, LENGTH + 1)]
    assert values["loss"] == pytest.approx(sum(DECAY**k * value for k, value in enumerate(places)))
    assert lm_head.weight.grad is None


def test_a_share_of_the_distribution_is_a_mixture_of_losses():
    mixture = Mixture(((0.7, CrossEntropy()), (0.3, ForwardKL())))
    for share, loss in ((1.0, ForwardKL()), (0.0, CrossEntropy()), (0.3, mixture)):
        assert MedusaTrainingConfig(law_share=share).distillation_loss == loss


def test_unrolled_at_once_equals_step_by_step_and_no_place_sees_the_token_it_guesses(lm_head, packed):
    head = head_of()
    hidden = packed.hidden[packed.places]
    tokens = text_tokens(packed, LENGTH)
    assert torch.equal(tokens[0], packed.tokens[:LENGTH])
    at_once = head.unroll(hidden, lm_head.embed(tokens.T))
    for position in (0, 11, 26):
        state = head.new_state(1)
        for place in range(LENGTH):
            token = packed.tokens[packed.places[position] + place]
            state = head.advance(state, lm_head.embed(token[None]))
            alone = head.leaving(hidden[position][None], state)
            assert torch.allclose(at_once[place, position], alone[0], atol=1e-5)
    tokens[:, 2] = (tokens[:, 2] + 7) % 50
    after = head.unroll(hidden, lm_head.embed(tokens.T))
    assert torch.equal(at_once[:2], after[:2]) and not torch.equal(at_once[2], after[2])


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_starts_as_the_lm_head(lm_head, packed, tied):
    hidden = packed.hidden[packed.places]
    for config in (
        RedrafterTrainingConfig(length=LENGTH, state=24, tied=tied),
        MedusaTrainingConfig(heads=LENGTH, tied=tied),
    ):
        head = config.new_head(lm_head)
        vectors = head.unroll(hidden, lm_head.embed(text_tokens(packed, LENGTH).T))
        for place in range(LENGTH):
            assert torch.equal(head.place_logits(place, vectors[place], lm_head), lm_head(hidden))


def test_new_weights_are_decided_by_the_seed_alone(lm_head):
    before = torch.get_rng_state()
    made = [RedrafterTrainingConfig(seed=seed).new_head(lm_head).token.weight for seed in (3, 3, 4)]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_self_fed_positions_read_their_own_greedy_guesses(lm_head, packed):
    head = head_of()
    hidden = packed.hidden[packed.places]
    text = text_tokens(packed, LENGTH)
    fed = SelfFeeding(head, lm_head, 1.0, seed=0)(packed, hidden)
    assert torch.equal(fed[:, 0], text[:, 0]) and not torch.equal(fed, text)
    vectors = head.unroll(hidden, lm_head.embed(fed.T))
    for place in range(LENGTH - 1):
        assert torch.equal(head.place_logits(place, vectors[place], lm_head).argmax(-1), fed[:, place + 1])
    assert torch.equal(packed.tokens[packed.places[:, None] + torch.arange(LENGTH)], text)  # labels stay the text's


def test_shares_of_processes_add_up_and_guessing_takes_no_gradient_away(lm_head, packed):
    """Of two windows, one twice as long, where guesses are drawn for both.

    Autocast keeps weights that it has cast; those of the guesses, which need no gradient, must not be taken.
    """
    head = head_of()
    objective = objective_of(head, lm_head, packed, ForwardKL(), SelfFeeding(head, lm_head, 0.5, 0))
    assert_shares_add_up(objective, head, torch.tensor([[0, 9], [12, 18]]), slice(0, 1), slice(1, 2))
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        objective.accumulate(torch.zeros(1, 2), 1.0)
    assert all(weight.grad is not None and weight.grad.norm() > 0 for weight in head.parameters())


def test_the_share_of_self_fed_positions_is_drawn_anew_for_each_batch_and_the_same_again(lm_head):
    head = head_of()
    noise = torch.Generator().manual_seed(5)
    rows = 2000
    tokens = torch.randint(0, 50, (rows + LENGTH,), generator=noise)
    hidden = torch.randn(rows + LENGTH, 16, generator=noise)
    chosen = []
    for first in (0, 0, 7):
        pack = CollatedBatch(hidden, tokens, torch.arange(rows), np.arange(first, first + rows + LENGTH))
        text = text_tokens(pack, LENGTH)
        fed = SelfFeeding(head, lm_head, 0.25, seed=1)(pack, hidden[:rows])
        chosen.append((fed != text).any(dim=1))
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])
    # Nearly every chosen position differs somewhere from its text of 50 equally likely tokens; 6 deviations.
    assert abs(chosen[0].float().mean() - 0.25) < 6 * (0.25 * 0.75 / rows) ** 0.5


def test_outputs_of_its_own_are_for_adam():
    head = head_of(tied=False, exit_width=20)
    muon, adam = (
        {tuple(weight.shape) for weight in inner.param_groups[0]["params"]}
        for inner in heads_optimizer(head, RedrafterTrainingConfig().optimizer)._optimizers
    )
    assert muon == {(12, 16), (12, 12), (20, 28), (20, 20)} and adam == {(12,), (20,), (50, 20)}
