"""A checkpoint is gone on with only by the configuration, the data and the models that made it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipes.common import pretraining_loop

from truedraft.errors import OptionError, TrainingError
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.checkpoint import weights_hash
from truedraft.training.drafts import DraftConfig, stream_loop
from truedraft.training.loop import CHECKPOINT, identity_of, refuse_another_run
from truedraft.training.losses import ForwardKL
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum

SHAPE = LlamaShape(vocab_size=300, width=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=128, head_size=16)
CURRICULUM = Curriculum(stable_length=16, decay_length=32, tokens_per_step=128, tokens_per_pass=64)


def config(stable=6, decay=3, **changes):
    return DraftConfig(schedule=WarmupStableDecay(2, stable, decay), **({"curriculum": CURRICULUM} | changes))


@pytest.fixture
def begun(stream, tmp_path):
    """A folder with a checkpoint at step 4."""
    pretraining_loop(SHAPE, config(), stream, tmp_path).run(until=4)
    return tmp_path


def test_another_configuration_is_refused_by_name(begun, stream):
    for changes, name in (
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"optimizer": OptimizerConfig(1e-3)}, "optimizer.matrix_rate was 0.002 and is now 0.001"),
        ({"curriculum": Curriculum(16, 64, 128, 64)}, "curriculum.decay_length was 32 and is now 64"),
        ({"stable": 3}, "schedule.stable_steps was 6 and is now 3"),
    ):
        record = (begun / "run.json").read_text()
        with pytest.raises(OptionError, match=name):
            pretraining_loop(SHAPE, config(**changes), stream, begun)
        assert (begun / "run.json").read_text() == record  # a refused attempt leaves no trace


def test_other_data_are_refused(begun, stream):
    with pytest.raises(OptionError, match="data_sha256"):
        pretraining_loop(SHAPE, config(), stream[:-1], begun)


def test_what_does_not_decide_the_weights_may_differ(begun, stream):
    assert pretraining_loop(SHAPE, config(checkpoint_every_s=0.0), stream, begun).run(until=5).step == 5


def test_before_the_decay_its_beginning_may_move(begun, stream):
    assert pretraining_loop(SHAPE, config(stable=8, decay=2), stream, begun).run().step == 10


def test_a_broken_checkpoint_is_named(begun, stream):
    (begun / CHECKPOINT).write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"cannot read the checkpoint .*remove it to begin again"):
        pretraining_loop(SHAPE, config(), stream, begun)


def test_the_loss_is_a_part_of_the_identity():
    mixed, plain = identity_of(DraftConfig()), identity_of(DraftConfig(loss=ForwardKL()))
    assert plain["loss"] == "ForwardKL()" and mixed["loss.weights"] == "((0.5, ForwardKL()), (0.5, TotalVariation()))"
    assert json.loads(json.dumps(mixed)) == mixed and "device" not in mixed


def test_every_weight_counts():
    """Also the last row of a tensor, by the last bit of its last value."""
    model = new_llama(SHAPE, seed=1)
    found = {weights_hash(new_llama(SHAPE, seed=1)), weights_hash(new_llama(SHAPE, seed=2))}
    assert weights_hash(model) in found and len(found) == 2
    for weight in model.parameters():
        with torch.no_grad():
            weight[(-1,) * weight.dim()] *= 1 + 2**-22
        found.add(weights_hash(model))
    assert len(found) == 2 + len(list(model.parameters()))


def test_a_target_with_another_late_row_is_not_gone_on_with(stream, tmp_path):
    settings = DraftConfig(schedule=WarmupStableDecay(2, 6, 3), curriculum=CURRICULUM)
    target = new_llama(SHAPE, seed=1)
    stream_loop(settings, target, new_llama(SHAPE, seed=0), stream, tmp_path).run(until=2)
    assert stream_loop(settings, target, new_llama(SHAPE, seed=0), stream, tmp_path).run(until=3).step == 3
    with torch.no_grad():
        target.get_input_embeddings().weight[-1] += 1.0
    with pytest.raises(OptionError, match="target was"):
        stream_loop(settings, target, new_llama(SHAPE, seed=0), stream, tmp_path)


def test_a_training_of_an_older_version_is_told_as_such():
    for name in ("target", "start_from"):
        with pytest.raises(
            TrainingError, match=r"'work' was begun by an older version .* begin again in another folder"
        ):
            refuse_another_run({name: "0123456789abcdef"}, {name: "0" * 32}, step=1, folder=Path("work"))
