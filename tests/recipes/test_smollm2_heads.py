"""The recipe that trains heads of several kinds on one GPU: what it reads of the target, writes, and keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes.smollm2.heads import TEXTS, PaddedTarget, _Job, packed, read_texts
from recipes.smollm2.writer import Writer
from transformers import LlamaForCausalLM

from truedraft.core.tree import chain_shape
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.kinds.dflash2.training import DFlash2TrainingConfig
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.base import Segment
from truedraft.models.lm_head import LmHead
from truedraft.training import chains
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

SHAPE = LlamaShape(vocab_size=160, width=64, layers=3, heads=4, kv_heads=2, intermediate=96, head_size=16)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    model = new_llama(SHAPE, seed=1).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.mul_(6.0)  # far from uniform, so that a wrong row would show
    return model


@torch.no_grad()
def test_a_padded_forward_shows_what_transformers_computes(llama: LlamaForCausalLM) -> None:
    target, texts = PaddedTarget(llama), [torch.arange(1, 6), torch.arange(9, 2, -1)]
    segments = [Segment(target.new_cache(), each, chain_shape(len(each)), ()) for each in texts]  # type: ignore[arg-type, func-returns-value]
    found = target.forward_showing(segments, (1, 0))
    alone = [llama(each[None], output_hidden_states=True) for each in texts]
    logits = torch.cat([each.logits[0] for each in alone])
    torch.testing.assert_close(found.logits, logits, rtol=1e-4, atol=1e-4)
    for shown, number in zip(found.layers, (1, 0), strict=True):
        expected = torch.cat([each.hidden_states[number + 1][0] for each in alone])
        torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-4)


def test_answers_written_together_are_greedy_ones_with_the_vectors_that_gave_them(llama: LlamaForCausalLM) -> None:
    """Prompts of several lengths, one of whose answers is ended early by a token that it has."""
    prompts, writer = [[5], [9, 3, 77, 12], [31, 8]], Writer(llama, [])
    written = list(writer.write(prompts, [0.0] * 3, 8, torch.Generator()))
    for prompt, answer in zip(prompts, written, strict=True):
        ids = torch.tensor([*prompt, *answer.tokens.tolist()])[None]
        with torch.no_grad():
            output = llama(ids, output_hidden_states=True)
        rows = slice(len(prompt) - 1, -1)
        assert answer.tokens.tolist() == output.logits[0, rows].argmax(-1).tolist()
        torch.testing.assert_close(answer.hidden, output.hidden_states[-1][0, rows].bfloat16(), rtol=0.02, atol=0.02)
    end = int(written[1].tokens[2])
    first = written[1].tokens.tolist().index(end)
    stopped = list(Writer(llama, [end]).write(prompts, [0.0] * 3, 8, torch.Generator()))[1]
    assert stopped.stopped and stopped.tokens.tolist() == written[1].tokens[: first + 1].tolist()


def test_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    train = [WrittenAnswer([1, 40_000], [7], 0.0, False), WrittenAnswer([3], [5, 6, 2], 1.0, True)]
    held = [WrittenAnswer([4, 4, 4], [9, 9], 0.8, False)]
    np.savez_compressed(tmp_path / TEXTS, train=packed(train), held=packed(held))
    assert read_texts(tmp_path / TEXTS) == (train, held)


def test_a_kind_of_heads_is_trained_by_the_padded_forward(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "load_model", lambda *_, **__: PaddedTarget(llama))
    config = DFlash2TrainingConfig(layers=(0, 1), length=3, anchors=4, rank=4, positions_per_step=24, steps=2)
    records = [WrittenAnswer([7, first], list(range(first, first + 12)), 0.0, False) for first in (5, 30, 60)]
    text = SelfDistillationData(records, np.zeros((36, 64), np.uint16))
    job = _Job("dflash2", config, (0.01,), LmHead.of(llama), (text, text), "print")
    job.train(60, tmp_path, "name")
    head = DFlash2Head.load(tmp_path)
    assert head.record.fingerprint == "print" and head.config.layers == (0, 1) and head.reach == 3
    assert float(head.candidate_selector.successor_codebook.abs().max()) > 0.0
