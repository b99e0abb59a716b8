"""Distributions beside the text: what is kept is what the target says there, and an interruption changes nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from truedraft.errors import TrainingError
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.lm_head import LmHead
from truedraft.training import targets
from truedraft.training.targets import keep_target
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

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
    monkeypatch.setattr(targets, "_CHUNK", 8)
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


def test_an_interruption_is_gone_on_with(lm_head, text, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_CHUNK", 8)
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


def test_finished_files_are_only_read(lm_head, text, tmp_path, monkeypatch):
    keep_target(text, lm_head, tmp_path, "train")
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("a finished file was opened to be written"))
    keep_target(text, lm_head, tmp_path, "train")


def test_a_small_vocabulary_keeps_all_but_one(lm_head, text, tmp_path):
    probs = keep_target(text, LmHead(lm_head.weight[:5], None, lm_head.finish), tmp_path, "train")
    assert probs.ids.shape == (ROWS, 4) and np.isfinite(probs.logs).all()


def test_a_full_disk_is_one_sentence(lm_head, text, tmp_path, monkeypatch):
    opened = Path.open

    def full(path, mode="r", *rest, **more):
        if path.suffix == ".laws":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *rest, **more)

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="No space left on device; what was fini"):
        patch.setattr(Path, "open", full)
        keep_target(text, lm_head, tmp_path, "train")
    keep_target(text, lm_head, tmp_path, "train")
