"""Text that a draft writes itself while it is trained: what it draws, and that a training goes on with the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from truedraft.errors import OptionError
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama
from truedraft.training.drafts import DraftConfig, OwnText, stream_loop
from truedraft.training.loop import read_checkpoint
from truedraft.training.losses import CrossEntropy
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.data import Curriculum

SHAPE = LlamaShape(vocab_size=300, width=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, head_size=16)
BATCH = torch.randint(0, 300, (12, 33), generator=torch.Generator().manual_seed(3))  # as long as the context


def test_the_second_half_is_what_the_student_draws_as_it_is_now() -> None:
    student = new_llama(SHAPE, seed=1)
    own = OwnText(student, 1.0, seed=0)
    written = own(BATCH)
    assert torch.equal(written[:, :16], BATCH[:, :16]) and torch.equal(written[:, 32], BATCH[:, 32])
    assert ((written != BATCH)[:, 16:32].float().mean(1) > 0.8).all(), "of 300 tokens a draw is seldom the text's"
    assert all(weight.requires_grad for weight in student.parameters())
    with torch.no_grad():  # from now on it says what it has read
        for weight in student.model.layers.parameters():
            weight.zero_()
        student.model.norm.weight.fill_(10)
        for table in (student.lm_head, student.model.embed_tokens):
            table.weight.copy_(10 * torch.eye(300, 32))
    few = BATCH.clamp_max(31)
    assert torch.equal(own(few)[:, 16:32], few[:, 15:16].expand(-1, 16)), "also behind what ends a text"


def test_which_sequences_and_what_they_become_depends_on_no_neighbour() -> None:
    student = new_llama(SHAPE, seed=1)
    own = OwnText(student, 0.5, seed=0)
    written = own(BATCH)
    assert 2 <= int((written != BATCH).any(1).sum()) <= 10
    assert torch.equal(torch.cat([own(each[None]) for each in BATCH]), written)
    assert not torch.equal(OwnText(student, 0.5, seed=1)(BATCH), written)


def test_a_training_goes_on_with_the_same_text(target_folder: Path, stream: np.ndarray, tmp_path: Path) -> None:
    target, schedule, lengths = load_causal_lm(target_folder), WarmupStableDecay(1, 3, 2), Curriculum(16, 32, 64, 64)
    config = DraftConfig(schedule=schedule, curriculum=lengths, on_policy=0.5)
    for folder, stops in (("whole", [None]), ("resumed", [1, 4, None])):
        for until in stops:
            stream_loop(config, target, new_llama(SHAPE, seed=2), stream, tmp_path / folder).run(until=until)
    whole, resumed = (read_checkpoint(tmp_path / each / "checkpoint.pt")["model"] for each in ("whole", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_a_loss_of_the_text_alone_has_nothing_to_learn_from_it() -> None:
    for options, said in (({"loss": CrossEntropy(), "on_policy": 0.5}, "compares distr"), ({"on_policy": 2}, "on_p")):
        with pytest.raises(OptionError, match=said):
            DraftConfig(**options)
