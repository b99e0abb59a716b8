"""What places learn of whole and of kept distributions, against values worked by hand and against plain autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from truedraft.training.losses import CrossEntropy, ForwardKL, TotalVariation, distill, loss_from_spec
from truedraft.training.targets import KeptTarget, TargetRows, computed_rows
from truedraft.training.texts.self_distillation import CollatedBatch

# One row: the target has (1/2, 1/4, 1/4) and gave token 1; what is learned has (1/4, 1/2, 1/4) so far.
P = torch.tensor([[0.5, 0.25, 0.25]])
Q = torch.tensor([[0.25, 0.5, 0.25]])
TOKEN = torch.tensor([1])
ROW = torch.tensor([0])
LOG_2 = math.log(2)

BY_HAND = {
    # -log 1/2; q - onehot
    "ce": (LOG_2, [0.25, -0.5, 0.25]),
    # 1/2 log 2 - 1/4 log 2; q - p
    "kl": (0.25 * LOG_2, [-0.25, 0.25, 0.0]),
    # -1/4 log 2 + 1/2 log 2; q (log q - log p - KL): 1/4 (-1.25 log 2), 1/2 (0.75 log 2), 1/4 (-0.25 log 2)
    "reverse-kl": (0.25 * LOG_2, [-0.3125 * LOG_2, 0.375 * LOG_2, -0.0625 * LOG_2]),
    # 1/2 (1/4 + 1/4); signs (-1, 1, 0) / 2 have the mean 1/8 under q: q (sign / 2 - 1/8)
    "tv": (0.25, [-0.15625, 0.1875, -0.03125]),
}


def gradient_of(rows: TargetRows, logits: torch.Tensor, at: torch.Tensor, loss) -> tuple[torch.Tensor, float]:
    """The gradient in the student's logits of the sum of losses, and that sum."""
    leaf = logits.clone().requires_grad_()
    total = rows.losses(leaf, at, loss).sum()
    total.backward()
    return leaf.grad, float(total.detach())


@pytest.mark.parametrize("spec", BY_HAND)
def test_each_loss_and_its_gradient_by_hand(spec):
    expected, slope = BY_HAND[spec]
    loss = loss_from_spec(spec)
    rows = computed_rows(TOKEN, lambda: P.log() + 3.0, loss)
    gradient, found = gradient_of(rows, Q.log() - 2.0, ROW, loss)
    assert found == pytest.approx(expected, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx(slope, abs=1e-6)


def test_a_mixture_is_the_sum_of_its_parts():
    half = loss_from_spec("ce=0.25,kl=0.75")
    gradient, found = gradient_of(computed_rows(TOKEN, P.log, half), Q.log(), ROW, half)
    assert found == pytest.approx(0.25 * LOG_2 + 0.75 * 0.25 * LOG_2, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([0.25 * 0.25 - 0.75 * 0.25, -0.25 * 0.5 + 0.75 * 0.25, 0.0625])
    mixed = loss_from_spec("kl=0.5,tv=2")
    assert float(distill(Q.log(), P.log(), TOKEN, mixed)) == pytest.approx(0.125 * LOG_2 + 0.5, abs=1e-6)


def test_tokens_alone_do_not_ask_the_target():
    def asked():
        raise AssertionError("the target was asked")

    rows = computed_rows(TOKEN, asked, CrossEntropy())
    assert float(rows.losses(Q.log(), ROW, CrossEntropy())) == pytest.approx(LOG_2)
    assert not CrossEntropy().reads_target and loss_from_spec("ce=0.5,reverse-kl=0.5").reads_target


def test_rows_are_chosen_by_what_each_guess_is_about():
    noise = torch.Generator().manual_seed(1)
    target, own = (torch.randn(5, 11, generator=noise) * 3 for _ in range(2))
    tokens, rows = torch.randint(0, 11, (5,), generator=noise), torch.tensor([0, 2, 2, 4])
    found = computed_rows(tokens, lambda: target, ForwardKL()).losses(own[:4], rows, ForwardKL())
    plain = ForwardKL()(target[rows].log_softmax(-1), own[:4].log_softmax(-1), tokens[rows])
    assert torch.allclose(found, plain)


def kept_rows(ids, probabilities, tokens) -> TargetRows:
    target = KeptTarget(np.array(ids, dtype=np.int32), np.log(np.array(probabilities)).astype(np.float16))
    tokens = torch.tensor(tokens)
    batch = CollatedBatch(torch.zeros(len(tokens), 2), tokens, torch.arange(1), np.arange(len(tokens)))
    return target.rows(batch, slice(0, len(tokens)))


def test_the_rest_of_a_truncated_distribution_is_one_bucket():
    """p keeps token 2 with 1/2, and 1/2 is left; q = (1/8, 1/8, 1/4, 1/2) has 1/4 and 3/4 there."""
    own = torch.tensor([[0.125, 0.125, 0.25, 0.5]]).log()
    for loss, value, slopes in (
        (ForwardKL(), 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), (0.75 - 0.5, 0.25 - 0.5)),
        (TotalVariation(), 0.25, (0.75 * (0.5 - 0.25), 0.25 * (-0.5 - 0.25))),
    ):
        gradient, found = gradient_of(kept_rows([[2]], [[0.5, 0.5]], [0]), own, ROW, loss)
        assert float(found) == pytest.approx(value, abs=1e-3)  # logs are kept in float16
        rest, kept = slopes
        # The rest's slope goes to its tokens by what they have: 1/6, 1/6 and 2/3 of 3/4.
        assert gradient[0].tolist() == pytest.approx([rest / 6, rest / 6, kept, rest * 2 / 3], abs=1e-3)


def test_a_label_outside_of_the_kept_ones_is_the_rest():
    own = torch.tensor([[0.125, 0.125, 0.25, 0.5]] * 2).log()
    found = kept_rows([[2], [2]], [[0.5, 0.5]] * 2, [0, 2]).losses(own, torch.tensor([0, 1]), CrossEntropy())
    assert found.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)], abs=1e-6)


@pytest.mark.parametrize("spec", ["kl", "reverse-kl", "tv", "jsd", "kl=0.5,ce=0.5"])
def test_gradients_of_truncated_distributions_equal_autograd_on_the_buckets(spec):
    noise = torch.Generator().manual_seed(2)
    rows, vocab, kept = 6, 13, 3
    dist = torch.randn(rows, vocab, generator=noise).mul(2).softmax(-1)
    ids = dist.topk(kept).indices
    coarse = torch.cat([dist.gather(1, ids), 1 - dist.gather(1, ids).sum(-1, keepdim=True)], dim=1)
    loss, tokens = loss_from_spec(spec), torch.randint(0, vocab, (rows,), generator=noise)
    own = torch.randn(rows, vocab, generator=noise).requires_grad_()
    kept_at = kept_rows(ids.numpy(), coarse.numpy(), tokens.tolist())
    gradient, found = gradient_of(kept_at, own.detach(), torch.arange(rows), loss)
    inside = torch.zeros(rows, vocab).scatter_(1, ids, 1.0).bool()
    q = own.softmax(-1)
    log_q = torch.cat([q.gather(1, ids), q.masked_fill(inside, 0.0).sum(-1, keepdim=True)], dim=1).log()
    buckets = torch.tensor(
        [row.tolist().index(token) if token in row else kept for row, token in zip(ids, tokens, strict=True)]
    )
    plain = loss(kept_at.log_probs, log_q, buckets).sum()
    plain.backward()
    assert float(found) == pytest.approx(plain.item(), rel=1e-5)
    assert torch.allclose(gradient, own.grad, atol=1e-6)
