"""A recurrent head in training: loss and gradient against the formula, what it reads, and what it starts as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.shares import assert_shares_add_up
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig, SelfFeeding
from truedraft.training import losses
from truedraft.training.head_config import HeadLoss, HeadsObjective, heads_optimizer
from truedraft.training.losses import loss_from_spec
from truedraft.training.targets import ComputedTarget
from truedraft.training.texts.self_distillation import CollatedBatch, text_tokens

LENGTH, DECAY = 3, 0.7


def head_of(**sizes) -> RedrafterHead:
    config = {"width": 16, "vocab_size": 50, "state": 12, "exit_width": 16, "layers": 2, "length": LENGTH} | sizes
    head = RedrafterHead(RedrafterConfig(**config))
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return head


def objective_of(head, lm_head, packed: CollatedBatch, spec: str, feed=None) -> HeadsObjective:
    loss = loss_from_spec(spec)
    return HeadsObjective(
        head,
        lm_head,
        lambda _: packed,
        feed or (lambda batch, _: text_tokens(batch, LENGTH)),
        ComputedTarget(lm_head, loss),
        HeadLoss(head, lm_head, loss, decay=DECAY),
    )


def plain_loss(head, lm_head, packed: CollatedBatch, spec: str) -> torch.Tensor:
    """The formula, written down directly: no chunks, no shared rows."""
    loss = loss_from_spec(spec)
    hidden, total = packed.hidden[packed.places], torch.zeros(())
    state = torch.zeros(len(hidden), head.config.state)
    for place in range(LENGTH):
        state = head.advance(state, lm_head.embed(packed.tokens[packed.places + place]))
        vectors = head.leaving(hidden, state)
        logits = lm_head(vectors) if head.output is None else lm_head.finish(head.output(vectors))
        rows = packed.places + 1 + place
        dist = lm_head(packed.hidden[rows]).log_softmax(-1)
        total = total + DECAY**place * loss(dist, logits.log_softmax(-1), packed.tokens[rows]).mean()
    return total


@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("kl", {}),
        ("ce", {"tied": False, "exit_width": 20}),
        ("reverse-kl", {}),
        ("tv", {"rnn": False, "state": 16}),
        ("kl=0.5,tv=0.5", {"tied": False, "exit_width": 28}),
    ],
)
def test_gradient_is_that_of_the_formula(lm_head, packed, monkeypatch, chunk, spec, sizes):
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    head = head_of(**sizes)
    values = objective_of(head, lm_head, packed, spec).accumulate(torch.zeros(1, 2), 0.5)
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    (0.5 * plain_loss(head, lm_head, packed, spec)).backward()
    for name, parameter in head.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name
    assert values["loss"] == pytest.approx(plain_loss(head, lm_head, packed, spec).item(), rel=1e-4)
    assert values["loss"] == pytest.approx(sum(DECAY**k * values[f"place_{k + 1}"] for k in range(LENGTH)))


def test_unrolled_at_once_equals_step_by_step(lm_head, packed):
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


def test_a_place_does_not_see_the_token_it_guesses(lm_head, packed):
    head = head_of()
    hidden = packed.hidden[packed.places]
    tokens = text_tokens(packed, LENGTH)
    other = tokens.clone()
    other[:, 2] = (other[:, 2] + 7) % 50
    before, after = head.unroll(hidden, lm_head.embed(tokens.T)), head.unroll(hidden, lm_head.embed(other.T))
    assert torch.equal(before[:2], after[:2]) and not torch.equal(before[2], after[2])


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_starts_as_the_lm_head(lm_head, packed, tied):
    head = RedrafterTrainingConfig(length=LENGTH, state=24, layers=2, tied=tied).new_head(lm_head)
    hidden = packed.hidden[packed.places]
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


def test_guessing_before_the_step_takes_no_gradient_away(lm_head, packed):
    """Autocast keeps weights that it has cast; those of the guesses, which need no gradient, must not be taken."""
    head = head_of()
    objective = objective_of(head, lm_head, packed, "kl", SelfFeeding(head, lm_head, 0.5, 0))
    with torch.autocast("cpu", torch.bfloat16):
        objective.accumulate(torch.zeros(1, 2), 1.0)
    assert all(weight.grad is not None and weight.grad.norm() > 0 for weight in head.parameters())


def test_shares_of_processes_add_up(lm_head, packed):
    """Of two windows, one twice as long, where guesses are drawn for both."""
    head = head_of()
    objective = objective_of(head, lm_head, packed, "kl", SelfFeeding(head, lm_head, 0.5, 0))
    assert_shares_add_up(objective, head, torch.tensor([[0, 9], [12, 18]]), slice(0, 1), slice(1, 2))


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
