"""Distributions that are stored with the text: what is kept, what is learned of it, and what an interruption leaves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.lm_head import LmHead
from truedraft.training import losses
from truedraft.training.losses import (
    CrossEntropy,
    ForwardKL,
    KeptTarget,
    TargetRows,
    TotalVariation,
    keep_target,
    loss_from_spec,
)
from truedraft.training.texts.self_distillation import CollatedBatch, SelfDistillationData, WrittenAnswer

SHAPE = LlamaShape(vocab_size=90, width=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=8)
ROWS = 25


@pytest.fixture(scope="module")
def lm_head():
    model = new_llama(SHAPE, seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return LmHead.of(model)


@pytest.fixture
def text():
    noise = torch.Generator().manual_seed(3)
    bits = torch.randn(ROWS, 16, generator=noise).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return SelfDistillationData([WrittenAnswer([1], list(range(ROWS)), 0.0, False)], bits)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_likeliest_tokens_and_the_mass_of_the_rest(lm_head, text, tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "_STORED", 8)
    done = []
    probs = keep_target(text, lm_head, tmp_path, "train", on_progress=lambda *counts: done.append(counts))
    dist = lm_head(text.hidden(slice(None))).float().softmax(-1)
    ids, logs = probs.at(np.arange(ROWS))
    assert ids.shape == (ROWS, 64) and logs.shape == (ROWS, 65)
    assert torch.allclose(logs[:, :64].exp(), dist.gather(1, ids), rtol=5e-3, atol=1e-6)
    assert torch.allclose(logs[:, 64].exp(), 1 - dist.gather(1, ids).sum(-1), rtol=2e-2, atol=1e-5)
    assert torch.allclose(logs.exp().sum(-1), torch.ones(ROWS), atol=1e-5)
    assert (dist.gather(1, ids).diff(dim=1) <= 0).all()
    assert done[0] == (0, ROWS) and done[-1] == (ROWS, ROWS)
    per_row = sum(map(len, contents(tmp_path).values())) / ROWS
    assert per_row == 64 * 4 + 65 * 2  # as the module's text says


def test_an_interruption_is_gone_on_with_and_finished_files_are_only_read(lm_head, text, tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "_STORED", 8)
    (tmp_path / "a").mkdir()
    keep_target(text, lm_head, tmp_path / "a", "train")
    whole = contents(tmp_path / "a")
    for ids, logs in ((0, 0), (17 * 256, 9 * 130), (3 * 256 + 7, 25 * 130), (25 * 256, 25 * 130 - 1)):
        folder = tmp_path / f"{ids}-{logs}"
        folder.mkdir()
        (folder / "train.law_ids").write_bytes(whole["train.law_ids"][:ids])
        (folder / "train.laws").write_bytes(whole["train.laws"][:logs])
        keep_target(text, lm_head, folder, "train")
        assert contents(folder) == whole
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("a finished file was opened to be written"))
    keep_target(text, lm_head, tmp_path / "a", "train")


def test_a_small_vocabulary_keeps_all_but_one(lm_head, text, tmp_path):
    probs = keep_target(text, LmHead(lm_head.weight[:5], None, lm_head.finish), tmp_path, "train")
    assert probs.ids.shape == (ROWS, 4) and np.isfinite(probs.logs).all()


def gradient_of(rows: TargetRows, logits: torch.Tensor, at: torch.Tensor, loss) -> tuple[torch.Tensor, float]:
    """The gradient in the student's logits of the sum of losses, and that sum."""
    leaf = logits.clone().requires_grad_()
    total = rows.losses(leaf, at, loss).sum()
    total.backward()
    return leaf.grad, float(total.detach())


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
        gradient, found = gradient_of(kept_rows([[2]], [[0.5, 0.5]], [0]), own, torch.tensor([0]), loss)
        assert float(found) == pytest.approx(value, abs=1e-3)  # logs are kept in float16
        rest, kept = slopes
        # The rest's slope goes to its tokens by what they have: 1/6, 1/6 and 2/3 of 3/4.
        assert gradient[0].tolist() == pytest.approx([rest / 6, rest / 6, kept, rest * 2 / 3], abs=1e-3)
    labels = kept_rows([[2], [2]], [[0.5, 0.5]] * 2, [0, 2]).losses(own[[0, 0]], torch.tensor([0, 1]), CrossEntropy())
    assert labels.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)], abs=1e-6), "of the rest, and kept"


@pytest.mark.parametrize("spec", ["reverse-kl", "kl=0.5,ce=0.5"])
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
