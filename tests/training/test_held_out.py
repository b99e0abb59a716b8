"""Accuracy on held-out answers, against counting position by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truedraft.errors import DataError
from truedraft.heads import MedusaConfig, MedusaHeads, RedrafterConfig, RedrafterHead
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.lm_head import LmHead
from truedraft.training import held_out
from truedraft.training.held_out import HeldOutAccuracy
from truedraft.training.medusa_trainee import MedusaTrainee
from truedraft.training.redrafter_trainee import RedrafterTrainee
from truedraft.training.self_text import SelfText, Written
from truedraft.training.trainee import place_logits

SHAPE = LlamaShape(vocab_size=9, width=8, layers=1, heads=2, kv_heads=1, intermediate=16, context=64, head_size=4)
REACH = 2


@pytest.fixture(scope="module")
def lm_head():
    return LmHead.of(new_llama(SHAPE, seed=1))


@pytest.fixture(params=["medusa", "redrafter"])
def trainee(request, lm_head):
    if request.param == "medusa":
        found = MedusaTrainee(MedusaHeads(MedusaConfig(8, 9, REACH, reads_token=True)), lm_head)
    else:
        found = RedrafterTrainee(RedrafterHead(RedrafterConfig(8, 9, 6, 8, length=REACH)), lm_head)
    noise = torch.Generator().manual_seed(2)
    for weight in found.module.parameters():
        weight.data.normal_(generator=noise)
    return found


@pytest.fixture
def text():
    noise = torch.Generator().manual_seed(3)
    answers = [torch.randint(0, 9, (length,), generator=noise).tolist() for length in (12, 3, 4, 0, 9)]
    bits = torch.randn(28, 8, generator=noise).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return SelfText([Written([1], answer, float(i % 2), False) for i, answer in enumerate(answers)], bits)


@torch.no_grad()
def counted(trainee, text: SelfText) -> dict[str, float]:
    """One position after another; an answer's last token is never drafted."""
    ranks: list[list[int]] = [[] for _ in range(REACH)]
    for first, end in zip(text.starts, text.starts[1:], strict=False):
        for row in range(first, end):
            if row + REACH >= end - 1:
                continue
            tokens = torch.tensor(text.tokens[row : row + REACH])[None]
            vectors = trainee.vectors(text.hidden(slice(row, row + 1)).float(), tokens)
            for place in range(REACH):
                logits = place_logits(trainee, place, vectors[place])[0].float().tolist()
                order = sorted(range(9), key=lambda id_, logits=logits: (-logits[id_], id_))
                ranks[place].append(order.index(int(text.tokens[row + 1 + place])))
    return {
        f"{trainee.word}_{place + 1}_top_{top}": sum(rank < top for rank in of_place) / len(of_place)
        for place, of_place in enumerate(ranks)
        for top in (1, 5)
    }


def test_the_shares_are_those_of_counting(trainee, text, monkeypatch):
    monkeypatch.setattr(held_out, "_POSITIONS", 5)
    monkeypatch.setattr(held_out, "_ROWS", 3)
    found = HeldOutAccuracy.on(trainee, text, 1000)()
    assert found == pytest.approx(counted(trainee, text))
    assert 0.0 < found[f"{trainee.word}_1_top_5"] < 1.0


def test_some_answers_of_every_temperature_are_read(trainee, text):
    assert len(HeldOutAccuracy.on(trainee, text, 1000).windows) == 3
    assert len(HeldOutAccuracy.on(trainee, text, 11).windows) == 2


def test_answers_shorter_than_the_reach_are_refused(trainee, text):
    short = SelfText(text.records[1:2], text.bits[12:15])
    with pytest.raises(DataError, match="fewer than the 4 tokens that heads which reach 2 tokens ahead"):
        HeldOutAccuracy.on(trainee, short, 1000)
