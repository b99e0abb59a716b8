"""The loop: exact resumption after a kill, branches of the stable stretch, errors; by the same configuration alone."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from recipes.common import pretraining_loop

from truedraft.errors import OptionError, TrainingError
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama
from truedraft.models.checkpoint import weights_hash
from truedraft.training.drafts import DraftConfig, stream_loop
from truedraft.training.loop import CHECKPOINT, checkpoint_of, identity_of, refuse_another_run
from truedraft.training.losses import ForwardKL
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum
from truedraft.training.workspace import LOG

SHAPE = LlamaShape(vocab_size=300, width=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=128, head_size=16)
CURRICULUM = Curriculum(stable_length=16, decay_length=32, tokens_per_step=128, tokens_per_pass=64)


class KilledError(Exception):
    """Stands for a kill in the middle of a run."""


def config(stable=6, decay=3, **changes):
    return DraftConfig(schedule=WarmupStableDecay(2, stable, decay), **({"curriculum": CURRICULUM} | changes))


def new_loop(stream, folder, *, stable=6, decay=3):
    return pretraining_loop(SHAPE, config(stable, decay, checkpoint_every_s=0.0), stream, folder)


def weights(loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}


@pytest.fixture
def whole(stream, tmp_path):
    """The weights of an uninterrupted run."""
    loop = new_loop(stream, tmp_path / "whole")
    loop.run()
    return weights(loop)


def assert_resumes(stream, folder, whole, first):
    """To the bit, from the step whose checkpoint is there, and no step is logged twice."""
    assert (checkpoint_of(folder) or (0,))[0] == first
    resumed, steps = new_loop(stream, folder), []
    progress = resumed.run(on_step=lambda record: steps.append(record.step))
    assert (progress.step, progress.tokens) == (9, 9 * 128) and steps == list(range(first, 9))
    found = weights(resumed)
    assert found.keys() == whole.keys()
    for name in whole:
        assert torch.equal(found[name], whole[name]), name
    assert [json.loads(line)["step"] for line in (folder / LOG).read_text().splitlines()] == list(range(9))


@pytest.mark.parametrize("killed_at", [1, 6, 7])
def test_resumed_after_a_kill_equals_uninterrupted_to_the_bit(stream, tmp_path, whole, killed_at):
    def kill(record):
        if record.step == killed_at:
            raise KilledError

    with pytest.raises(KilledError):
        new_loop(stream, tmp_path / "killed").run(on_step=kill)
    assert_resumes(stream, tmp_path / "killed", whole, killed_at)


class Clock:
    """Seconds that pass only where a test lets them."""

    now = 0.0

    def __call__(self):
        return self.now


def test_checkpoints_come_by_time(stream, tmp_path, whole):
    """Of steps of 50 seconds every third is saved: more than two minutes passed; a kill costs those since."""
    loop, saved = new_loop(stream, tmp_path / "slow"), []
    loop.clock, loop.folder.checkpoint_every_s = Clock(), 120.0

    def step(record):
        loop.clock.now += 50.0
        if record.step == 7:
            raise KilledError

    with pytest.raises(KilledError):
        loop.run(on_step=step, on_checkpoint=saved.append)
    assert [(each.step, each.total_steps, each.tokens) for each in saved] == [(3, 9, 384), (6, 9, 768)]
    assert [each.left_s for each in saved] == [300.0, 150.0]  # six and three steps of fifty seconds
    assert saved[1].path == tmp_path / "slow" / CHECKPOINT and saved[1].loss > 0.0
    assert_resumes(stream, tmp_path / "slow", whole, 6)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """Also where a shell runs the tests in the background, and lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(objective, at):
    """An objective that is interrupted by Ctrl-C in the middle of some of its passes."""
    calls = itertools.count()
    accumulate = objective.accumulate

    def interrupted(*arguments):
        if next(calls) in at:
            signal.raise_signal(signal.SIGINT)
        return accumulate(*arguments)

    objective.accumulate = interrupted


@pytest.mark.parametrize(("at", "saved"), [([8], 5), ([8, 9], 0)], ids=["once", "twice"])
def test_ctrl_c_inside_a_step_ends_it_and_saves_but_who_interrupts_twice_does_not_wait(
    stream, tmp_path, whole, at, saved
):
    """In the passes of step 4, of which there are two."""
    loop = new_loop(stream, tmp_path / "interrupted")
    loop.folder.checkpoint_every_s = 1e9
    interrupting(loop.objective, at)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert signal.getsignal(signal.SIGINT) is handler
    assert_resumes(stream, tmp_path / "interrupted", whole, saved)


def test_where_ctrl_c_is_ignored_it_stays_ignored(stream, tmp_path):
    """As for a command that a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        loop = new_loop(stream, tmp_path)
        interrupting(loop.objective, [3])
        assert loop.run().step == 9
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_the_time_is_up_it_saves_and_stops(stream, tmp_path, whole):
    """The log has a torn last line then, as a full disk leaves it, and there is a half-written checkpoint."""
    loop = new_loop(stream, tmp_path / "short")
    assert loop.run(time_is_up=lambda: loop.progress.step == 4).step == 4
    with (tmp_path / "short" / LOG).open("a") as log:
        log.write('{"step": 4, "tok')
    torn = tmp_path / "short" / f"{CHECKPOINT}.abc.tmp"
    torn.write_bytes(b"torn")
    assert_resumes(stream, tmp_path / "short", whole, 4)
    assert not torn.exists()


def test_a_trial_writes_nothing(stream, tmp_path):
    loop = new_loop(stream, tmp_path)
    step_s, size = loop.trial()
    assert step_s > 0.0 and {path.name for path in tmp_path.iterdir()} == {"run.json"}
    loop = new_loop(stream, tmp_path)
    loop.run(until=1)
    assert 0.9 < size / (tmp_path / CHECKPOINT).stat().st_size < 1.1


def test_a_branch_of_the_stable_stretch_equals_a_run_that_was_that_short(stream, tmp_path):
    new_loop(stream, tmp_path / "trunk", stable=20).run(until=4)
    (tmp_path / "branch").mkdir()
    shutil.copy(tmp_path / "trunk" / CHECKPOINT, tmp_path / "branch" / CHECKPOINT)
    branch, short = (new_loop(stream, tmp_path / each, stable=4) for each in ("branch", "short"))
    branch.run()
    short.run()
    expected = weights(short)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(branch).items())


def test_accumulation_does_not_change_the_gradient(stream, tmp_path):
    def first_update(tokens_per_pass):
        curriculum = Curriculum(16, 32, tokens_per_step=128, tokens_per_pass=tokens_per_pass)
        config = DraftConfig(schedule=WarmupStableDecay(1, 1, 1), curriculum=curriculum)
        loop = pretraining_loop(SHAPE, config, stream, tmp_path / str(tokens_per_pass))
        loop.autocast = False
        steps = []
        loop.run(until=1, on_step=steps.append)
        return steps[0].gradient_norm, steps[0].values["loss"]

    assert first_update(16) == pytest.approx(first_update(128), rel=1e-5)


@pytest.mark.parametrize("has", [False, True])
def test_products_are_in_bfloat16_where_the_processor_has_instructions_for_it(stream, tmp_path, monkeypatch, has):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert new_loop(stream, tmp_path).autocast is has
    target = load_causal_lm("embedded:draft", dtype="auto")
    assert target.dtype is (torch.bfloat16 if has else torch.float32)


def test_the_loss_falls_or_stops_the_run_where_it_is_not_finite(stream, tmp_path):
    losses = []
    loop = new_loop(stream, tmp_path / "long", stable=40)
    loop.run(on_step=lambda record: losses.append(record.values["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    loop = new_loop(stream, tmp_path / "other")
    with torch.no_grad():
        next(loop.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite at step 0"):
        loop.run()
    record = json.loads((tmp_path / "other" / "run.json").read_text())
    assert record["versions"]["torch"] and record["machine"] and record["threads"] == 1
    assert len(record["identity"]["data_sha256"]) == 64
    assert len(record["identity"]["start_from"]) == 32 and record["identity"]["loss"] == "CrossEntropy()"


def test_lengths_that_do_not_divide_the_step_are_refused():
    with pytest.raises(TrainingError, match="multiple of the sequence length"):
        Curriculum(stable_length=48, decay_length=64, tokens_per_step=128)


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
    with pytest.raises(OptionError, match="data_sha256"):
        pretraining_loop(SHAPE, config(), stream[:-1], begun)


def test_what_does_not_decide_the_weights_may_differ_and_a_broken_checkpoint_is_named(begun, stream):
    assert pretraining_loop(SHAPE, config(checkpoint_every_s=0.0), stream, begun).run(until=5).step == 5
    longer = config(stable=8, decay=2)  # before the decay its beginning may move
    assert pretraining_loop(SHAPE, longer, stream, begun).run().step == 10
    (begun / CHECKPOINT).write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"cannot read the checkpoint .*remove it to begin again"):
        pretraining_loop(SHAPE, longer, stream, begun)


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


def test_a_run_goes_on_with_its_target_in_another_dtype_and_not_with_another_late_row(stream, tmp_path):
    target = new_llama(SHAPE, seed=1).to(torch.bfloat16)

    def loop(dtype=torch.bfloat16):
        return stream_loop(config(), copy.deepcopy(target).to(dtype), new_llama(SHAPE, seed=0), stream, tmp_path)

    assert loop().run(until=2).step == 2
    assert loop(torch.float32).run(until=3).step == 3
    with torch.no_grad():
        target.get_input_embeddings().weight[-1] += 1.0
    with pytest.raises(OptionError, match="target was"):
        loop()


def test_a_training_of_an_older_version_is_told_as_such():
    for name in ("target", "start_from"):
        with pytest.raises(TrainingError, match=r"'work' was begun by an older version .* in another folder"):
            refuse_another_run({name: "0123456789abcdef"}, {name: "0" * 32}, step=1, folder=Path("work"))
