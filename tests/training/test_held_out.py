"""Accuracy on held-out answers, against counting position by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truedraft.errors import DataError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.lm_head import LmHead
from truedraft.training import head_config
from truedraft.training.head_config import HeldOutAccuracy
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

SHAPE = LlamaShape(vocab_size=9, width=8, layers=1, heads=2, kv_heads=1, intermediate=16, context=64, head_size=4)
REACH = 2


@pytest.fixture(scope="module")
def lm_head():
    return LmHead.of(new_llama(SHAPE, seed=1))


@pytest.fixture(params=["medusa", "redrafter"])
def head(request):
    if request.param == "medusa":
        found = MedusaHeads(MedusaConfig(8, 9, REACH, reads_token=True))
    else:
        found = RedrafterHead(RedrafterConfig(8, 9, 6, 8, length=REACH))
    noise = torch.Generator().manual_seed(2)
    for weight in found.parameters():
        weight.data.normal_(generator=noise)
    return found


@pytest.fixture
def text():
    noise = torch.Generator().manual_seed(3)
    answers = [torch.randint(0, 9, (length,), generator=noise).tolist() for length in (12, 3, 4, 0, 9)]
    bits = torch.randn(28, 8, generator=noise).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return SelfDistillationData(
        [WrittenAnswer([1], answer, float(i % 2), False) for i, answer in enumerate(answers)], bits
    )


@torch.no_grad()
def counted(head, lm_head, text: SelfDistillationData) -> dict[str, float]:
    """One position after another; an answer's last token is never drafted."""
    ranks: list[list[int]] = [[] for _ in range(REACH)]
    for first, end in zip(text.starts, text.starts[1:], strict=False):
        for row in range(first, end):
            if row + REACH >= end - 1:
                continue
            tokens = torch.tensor(text.tokens[row : row + REACH])[None]
            vectors = head.unroll(text.hidden(slice(row, row + 1)).float(), lm_head.embed(tokens.T))
            for place in range(REACH):
                logits = head.place_logits(place, vectors[place], lm_head)[0].float().tolist()
                order = sorted(range(9), key=lambda id_, logits=logits: (-logits[id_], id_))
                ranks[place].append(order.index(int(text.tokens[row + 1 + place])))
    return {
        f"{head.place_word}_{place + 1}_top_{top}": sum(rank < top for rank in of_place) / len(of_place)
        for place, of_place in enumerate(ranks)
        for top in (1, 5)
    }


def test_the_shares_are_those_of_counting(head, lm_head, text, monkeypatch):
    monkeypatch.setattr(head_config, "_POSITIONS", 5)
    monkeypatch.setattr(head_config, "_ROWS", 3)
    found = HeldOutAccuracy.on(head, lm_head, text, 1000)()
    assert found == pytest.approx(counted(head, lm_head, text))
    assert 0.0 < found[f"{head.place_word}_1_top_5"] < 1.0


def test_some_answers_of_every_temperature_are_read_and_too_short_ones_refused(head, lm_head, text):
    assert len(HeldOutAccuracy.on(head, lm_head, text, 1000).windows) == 3
    assert len(HeldOutAccuracy.on(head, lm_head, text, 11).windows) == 2
    short = SelfDistillationData(text.records[1:2], text.bits[12:15])
    with pytest.raises(DataError, match="fewer than the 4 tokens that heads which reach 2 tokens ahead"):
        HeldOutAccuracy.on(head, lm_head, short, 1000)
