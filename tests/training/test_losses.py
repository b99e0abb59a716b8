"""Losses against values worked by hand, and their gradients against finite differences and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.training.losses import (
    AdaptiveVariation,
    CrossEntropy,
    ForwardKL,
    JensenShannon,
    Mixture,
    NegativeLogAcceptance,
    ReverseKL,
    TotalVariation,
    loss_from_spec,
)

# p = (1/2, 1/2, 0), q = (1/4, 1/2, 1/4)
P = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
LABEL = torch.tensor([2])

BY_HAND = [
    (ForwardKL(), 0.5 * math.log(2)),
    (TotalVariation(), 0.25),
    (NegativeLogAcceptance(), math.log(4 / 3)),
    # w = exp(-2 * 3/4) of 1/2 log 2, and the rest of 1/4
    (AdaptiveVariation(2.0), math.exp(-1.5) * 0.5 * math.log(2) + (1 - math.exp(-1.5)) * 0.25),
    (CrossEntropy(), math.log(4)),
    (
        JensenShannon(0.5),
        0.5 * (0.5 * math.log(4 / 3)) + 0.5 * (0.25 * math.log(2 / 3) + 0.25 * math.log(2)),
    ),
    (Mixture(((2.0, TotalVariation()), (0.5, CrossEntropy()))), 0.5 + 0.5 * math.log(4)),
]


@pytest.mark.parametrize(("loss", "expected"), BY_HAND, ids=lambda value: type(value).__name__)
def test_values_by_hand(loss, expected):
    assert float(loss(P.log(), Q.log(), LABEL)) == pytest.approx(expected, abs=1e-12)


def test_reverse_kl_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    expected = 0.25 * math.log(0.5) + 0.5 * math.log(2)
    assert float(ReverseKL()(p.log(), Q.log(), LABEL)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        ForwardKL(), ReverseKL(), JensenShannon(0.5), JensenShannon(0.2), TotalVariation(), NegativeLogAcceptance(),
        AdaptiveVariation(),
    ],
    ids=repr,
)  # fmt: skip
def test_equal_distributions_cost_nothing(loss):
    dist = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    assert torch.allclose(loss(dist, dist, torch.zeros(4, dtype=torch.long)), torch.zeros(4), atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        ForwardKL(),
        ReverseKL(),
        JensenShannon(0.3),
        TotalVariation(),
        NegativeLogAcceptance(),
        CrossEntropy(),
        Mixture(((0.5, ForwardKL()), (0.5, TotalVariation()))),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_gradients_against_finite_differences(loss):
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(3, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: loss(target, x.log_softmax(-1), labels).sum(), (logits,))


def test_gradient_of_forward_kl_in_the_logits_is_q_minus_p():
    logits = Q.log().clone().requires_grad_()
    ForwardKL()(P.log(), logits.log_softmax(-1), LABEL).sum().backward()
    assert torch.allclose(logits.grad, Q - P, atol=1e-12)


def test_total_variation_is_one_minus_the_overlap():
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 50, 11, generator=generator, dtype=torch.float64).log_softmax(-1)
    alpha = torch.minimum(p, q).exp().sum(-1)
    assert torch.allclose(TotalVariation()(p, q, torch.zeros(50, dtype=torch.long)), 1 - alpha)


def test_the_weight_of_the_adaptive_loss_has_no_gradient():
    logits = Q.log().clone().requires_grad_()
    AdaptiveVariation(2.0)(P.log(), logits.log_softmax(-1), LABEL).sum().backward()
    parts = []
    for loss in (ForwardKL(), TotalVariation()):
        leaf = Q.log().clone().requires_grad_()
        loss(P.log(), leaf.log_softmax(-1), LABEL).sum().backward()
        parts.append(leaf.grad)
    weight = math.exp(-1.5)
    assert torch.allclose(logits.grad, weight * parts[0] + (1 - weight) * parts[1], atol=1e-12)


def test_the_gradient_of_log_acceptance_is_that_of_the_variation_over_it():
    gradients = []
    for loss in (NegativeLogAcceptance(), TotalVariation()):
        leaf = Q.log().clone().requires_grad_()
        loss(P.log(), leaf.log_softmax(-1), LABEL).sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(gradients[0], gradients[1] / 0.75, atol=1e-12)


def test_mass_of_zero_gives_no_nan_in_value_or_gradient():
    logits = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    target = torch.tensor([[0.5, 0.5, 0.0]]).log()
    for loss in (
        ForwardKL(), JensenShannon(), TotalVariation(), NegativeLogAcceptance(), AdaptiveVariation()
    ):  # fmt: skip
        (gradient,) = torch.autograd.grad(loss(target, logits.log_softmax(-1), LABEL).sum(), logits)
        assert torch.isfinite(gradient).all()


def test_words_for_losses():
    assert loss_from_spec("kl") == ForwardKL()
    assert loss_from_spec("kl=0.25, tv") == Mixture(((0.25, ForwardKL()), (1.0, TotalVariation())))
    with pytest.raises(UnknownOptionError, match="unknown loss 'reverse-lk'; did you mean 'reverse-kl'"):
        loss_from_spec("reverse-lk")
    for bad in ("kl=x", "kl=-1,tv", "kl=nan"):
        with pytest.raises(OptionError, match="not a positive number"):
            loss_from_spec(bad)
