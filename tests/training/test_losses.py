"""Losses against values worked by hand, and their gradients against finite differences and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.training.losses import (
    AdaptiveVariation,
    CrossEntropy,
    DistillationLoss,
    ForwardKL,
    JensenShannon,
    Mixture,
    NegativeLogAcceptance,
    ReverseKL,
    TotalVariation,
    computed_rows,
    loss_from_spec,
)

LOG_2 = math.log(2)
# p = (1/2, 1/2, 0), q = (1/4, 1/2, 1/4)
P = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
LABEL = torch.tensor([2])
DIVERGENCES = (
    ForwardKL(), ReverseKL(), JensenShannon(0.5), JensenShannon(0.2), TotalVariation(), NegativeLogAcceptance(),
    AdaptiveVariation(),
)  # fmt: skip


def slopes_of(loss: DistillationLoss) -> Tensor:
    """The gradient in the logits of q."""
    logits = Q.log().clone().requires_grad_()
    loss(P.log(), logits.log_softmax(-1), LABEL).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (ForwardKL(), 0.5 * LOG_2),
        (TotalVariation(), 0.25),
        (NegativeLogAcceptance(), math.log(4 / 3)),
        # w = exp(-2 * 3/4) of 1/2 log 2, and the rest of 1/4
        (AdaptiveVariation(2.0), math.exp(-1.5) * 0.5 * LOG_2 + (1 - math.exp(-1.5)) * 0.25),
        (CrossEntropy(), math.log(4)),
        (JensenShannon(0.5), 0.5 * (0.5 * math.log(4 / 3)) + 0.5 * (0.25 * math.log(2 / 3) + 0.25 * LOG_2)),
        (Mixture(((2.0, TotalVariation()), (0.5, CrossEntropy()))), 0.5 + 0.5 * math.log(4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_by_hand_where_the_target_has_no_mass_at_a_token(loss, expected):
    assert float(loss(P.log(), Q.log(), LABEL)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "expected", "slopes"),
    [
        # -log 1/2; q - onehot
        ("ce", LOG_2, [0.25, -0.5, 0.25]),
        # 1/2 log 2 - 1/4 log 2; q - p
        ("kl", 0.25 * LOG_2, [-0.25, 0.25, 0.0]),
        # -1/4 log 2 + 1/2 log 2; q (log q - log p - KL): 1/4 (-1.25 log 2), 1/2 (0.75 log 2), 1/4 (-0.25 log 2)
        ("reverse-kl", 0.25 * LOG_2, [-0.3125 * LOG_2, 0.375 * LOG_2, -0.0625 * LOG_2]),
        # 1/2 (1/4 + 1/4); signs (-1, 1, 0) / 2 have the mean 1/8 under q: q (sign / 2 - 1/8)
        ("tv", 0.25, [-0.15625, 0.1875, -0.03125]),
        ("ce=0.25,kl=0.75", (0.25 + 0.1875) * LOG_2, [0.0625 - 0.1875, -0.125 + 0.1875, 0.0625]),
    ],
)
def test_values_and_gradients_by_hand_of_the_rows_of_a_text(spec, expected, slopes):
    """Logits differ from log probabilities by a constant; the text's token is 1."""
    loss, target = loss_from_spec(spec), torch.tensor([[0.5, 0.25, 0.25]])
    rows = computed_rows(torch.tensor([1]), lambda: target.log() + 3.0, loss)
    logits = (Q.float().log() - 2.0).requires_grad_()
    total = rows.losses(logits, torch.tensor([0]), loss).sum()
    total.backward()
    assert float(total) == pytest.approx(expected, abs=1e-6)
    assert logits.grad[0].tolist() == pytest.approx(slopes, abs=1e-6)


def test_rows_are_chosen_by_what_each_guess_is_about_and_tokens_alone_do_not_ask_the_target():
    noise = torch.Generator().manual_seed(1)
    target, own = (torch.randn(5, 11, generator=noise) * 3 for _ in range(2))
    tokens, rows = torch.randint(0, 11, (5,), generator=noise), torch.tensor([0, 2, 2, 4])
    found = computed_rows(tokens, lambda: target, ForwardKL()).losses(own[:4], rows, ForwardKL())
    plain = ForwardKL()(target[rows].log_softmax(-1), own[:4].log_softmax(-1), tokens[rows])
    assert torch.allclose(found, plain)
    alone = computed_rows(torch.tensor([1]), lambda: pytest.fail("the target was asked"), CrossEntropy())
    assert float(alone.losses(Q.log(), torch.tensor([0]), CrossEntropy())) == pytest.approx(LOG_2)
    assert not CrossEntropy().reads_target and loss_from_spec("ce=0.5,reverse-kl=0.5").reads_target


@pytest.mark.parametrize("loss", DIVERGENCES, ids=repr)
def test_equal_distributions_cost_nothing(loss):
    dist = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    assert torch.allclose(loss(dist, dist, torch.zeros(4, dtype=torch.long)), torch.zeros(4), atol=1e-6)


@pytest.mark.parametrize("loss", [*DIVERGENCES[:-1], CrossEntropy(), loss_from_spec("kl=0.5,tv=0.5")], ids=repr)
def test_gradients_against_finite_differences(loss):
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(3, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: loss(target, x.log_softmax(-1), labels).sum(), (logits,))


def test_gradients_of_losses_that_are_made_of_others_also_without_mass():
    """The weight of the adaptive loss has none; that of log acceptance is the variation's over alpha, 3/4 here."""
    divergence, variation = slopes_of(ForwardKL()), slopes_of(TotalVariation())
    weight = math.exp(-1.5)
    mixed = weight * divergence + (1 - weight) * variation
    assert torch.allclose(slopes_of(AdaptiveVariation(2.0)), mixed, atol=1e-12)
    assert torch.allclose(slopes_of(NegativeLogAcceptance()), variation / 0.75, atol=1e-12)
    for loss in (ForwardKL(), JensenShannon(), TotalVariation(), NegativeLogAcceptance(), AdaptiveVariation()):
        assert torch.isfinite(slopes_of(loss)).all()


def test_words_for_losses():
    assert loss_from_spec("kl") == ForwardKL()
    assert loss_from_spec("kl=0.25, tv") == Mixture(((0.25, ForwardKL()), (1.0, TotalVariation())))
    with pytest.raises(UnknownOptionError, match="did you mean 'reverse-kl'"):
        loss_from_spec("reverse-lk")
    for bad in ("kl=x", "kl=-1,tv", "kl=nan"):
        with pytest.raises(OptionError, match="not a positive number"):
            loss_from_spec(bad)
