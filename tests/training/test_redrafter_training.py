"""`train_heads` from prompts to a folder: exact after a kill, honest numbers, errors that lose nothing."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.head_runs import assert_resumed_equals_uninterrupted, copied, log_of, trained_in
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import ModelError, OptionError, TrainingError
from truedraft.kinds.redrafter import traced_beams as beam_trees
from truedraft.kinds.redrafter.drafter import Redrafter
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig
from truedraft.training import evaluate
from truedraft.training.heads import train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.prompts import PromptSets

ANSWER = 20
CONFIG = RedrafterTrainingConfig(
    length=3,
    state=24,
    layers=1,
    tokens=400,
    writing=WritingConfig(answer_tokens=16, batch=8),
    steps=6,
    self_fed=0.3,
    learning_rate=2e-2,
    positions_per_step=64,
    evaluate_every=3,
    checkpoint_every_s=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    """What is measured at the end takes most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_TOKENS", ANSWER)
        patch.setattr(beam_trees, "_POSITIONS", 40)
        yield


@pytest.fixture(scope="module")
def target_folder(learned_folder):
    return learned_folder


@pytest.fixture(scope="module")
def prompts(stream):
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    return PromptSets(pieces[:18], pieces[18:25], pieces[25:27], stream[900:1000])


@pytest.fixture(scope="module")
def trained(target_folder, prompts, tmp_path_factory):
    return trained_in(target_folder, prompts, tmp_path_factory.mktemp("redrafter"), CONFIG)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RedrafterHead.load(folder).state_dict()


def test_what_it_leaves_behind(trained, target_folder):
    out, result, said = trained
    checkpoint, target = RedrafterHead.load(out), load_model(target_folder)
    assert checkpoint.record.fingerprint == target.fingerprint and checkpoint.record.target_name == str(target_folder)
    assert (checkpoint.config.state, checkpoint.config.length) == (24, 3)
    assert checkpoint.record.facts["served"] == [each.as_dict() for each in result.report.evaluations]
    record = json.loads((out / "work" / "run.json").read_text())
    assert record["identity"]["self_fed"] == 0.3 and len(record["identity"]["text_sha256"]) == 64
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["steps"] == 6
    log = log_of(out)
    assert [entry["step"] for entry in log if "place_1_top_1" in entry] == [2, 5]
    assert all(0.0 <= log[2][f"place_{k}_top_1"] <= log[2][f"place_{k}_top_5"] <= 1.0 for k in (1, 2, 3))
    assert "places right" in next(remark for what, done, _, remark in said if what == "training" and done == 6)
    assert list(result.report.facts["accuracy"]) == [f"place_{k}_top_{top}" for k in (1, 2, 3) for top in (1, 5)]


def test_the_measured_acceptance_is_that_of_the_engine(trained, target_folder, prompts):
    out, result, _ = trained
    target = load_model(target_folder)
    rounds = {(each.temperature, each.about["nodes"]) for each in result.report.evaluations}
    assert rounds == {(t, n) for t in (0, 1) for n in (8, 32)}
    for served in result.report.evaluations:
        params = SamplingParams(max_tokens=ANSWER, temperature=served.temperature)
        sizes = {name: served.about[name] for name in ("nodes", "beams", "length")}
        drafter = Redrafter(RedrafterHead.load(out), **sizes, sampled=False)  # chosen beams, which are replayed
        answers = Engine(target, drafter, controller="fixed", entropy=0).generate(list(prompts.test), params)
        counts = [(answer.stats.emitted_tokens, answer.stats.target_calls) for answer in answers]
        emitted, calls = map(sum, zip(*counts, strict=True))
        assert (served.stats.emitted_tokens, served.stats.target_calls) == (emitted, calls)
        assert served.as_dict()["mean_acceptance_length"] == pytest.approx(emitted / calls)
        assert 0.9 < served.about["promised"] <= 4.0
    assert {kind: len(of_kind) for kind, of_kind in result.report.facts["beams"].items()} == {
        "greedy": 18,
        "sampled": 18,
    }
    assert RedrafterHead.load(out).record.facts["survival"].keys() <= {"greedy", "sampled"}
    plan = Redrafter(RedrafterHead.load(out)).size_plans(SamplingParams())[0]
    assert plan.curve.measured_on == "the target's answers to 7 held-out prompts"
    assert RedrafterHead.load(out).record.facts["beams"].keys() == {"greedy", "sampled"}
    assert Redrafter(RedrafterHead.load(out)).size_plans(SamplingParams(max_tokens=ANSWER))


@pytest.mark.parametrize("loss", ["kl", "tv=0.5,kl=0.5"])
def test_training_teaches(target_folder, prompts, tmp_path, trained, loss):
    long = replace(CONFIG, steps=40, evaluate_every=40, loss=loss, self_fed=0.0)
    result = train_heads(target_folder, prompts, copied(trained, tmp_path), long)
    log = log_of(tmp_path)
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    before, after = (sum(each.report.facts["accuracy"].values()) for each in (trained[1], result))
    assert after > before + 0.1, (before, after)


def test_resumed_after_a_kill_equals_uninterrupted_to_the_bit(trained, target_folder, prompts, tmp_path):
    assert_resumed_equals_uninterrupted(trained, target_folder, prompts, tmp_path, CONFIG, killed_at=4)


def test_distributions_are_stored_once_and_read_again(trained, target_folder, prompts, tmp_path):
    said = []
    config = replace(CONFIG, laws="stored", steps=3)
    copied(trained, tmp_path)
    train_heads(target_folder, prompts, tmp_path, config, callbacks=Callbacks(lambda *words: said.append(words)))
    assert {what for what, *_ in said} >= {"storing distributions", "training"}
    size = (tmp_path / "work" / "train.laws").stat().st_size
    assert size == len(trained[1].as_dict() and load_rows(tmp_path)) * 65 * 2
    (tmp_path / "work" / "checkpoint.pt").unlink()
    first = weights(tmp_path)
    train_heads(target_folder, prompts, tmp_path, config)
    assert all(torch.equal(weight, first[name]) for name, weight in weights(tmp_path).items())


def load_rows(out: Path) -> list[int]:
    lines = (out / "work" / "train.jsonl").read_text().splitlines()
    return [id_ for line in lines for id_ in json.loads(line)["answer"]]


def test_another_configuration_is_refused_by_name(trained, target_folder, prompts, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(trained[0], folder)
    record = (folder / "work" / "run.json").read_text()
    for changes, message in (
        ({"length": 4}, "length was 3 and is now 4"),
        ({"loss": "tv"}, "loss was kl and is now tv"),
        ({"self_fed": 0.0}, "self_fed was 0.3 and is now 0.0"),
        ({"laws": "stored"}, "laws was computed and is now stored"),
        ({"place_decay": 0.7}, "place_decay was 0.8 and is now 0.7"),
    ):
        with pytest.raises(OptionError, match=message):
            train_heads(target_folder, prompts, folder, replace(CONFIG, **changes))
    assert (folder / "work" / "run.json").read_text() == record


def test_sizes_that_make_no_head_are_refused_before_the_target_writes(target_folder, prompts, tmp_path):
    with pytest.raises(OptionError, match="got an exit width of 40"):
        train_heads(target_folder, prompts, tmp_path / "out", replace(CONFIG, exit_width=40))
    with pytest.raises(OptionError, match="sums embeddings"):
        train_heads(target_folder, prompts, tmp_path / "out", replace(CONFIG, rnn=False))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_loses_nothing(trained, target_folder, prompts, tmp_path, monkeypatch):
    opened = Path.open

    def full(path, mode="r", *rest, **more):
        if path.name.startswith("train.laws") and "r" not in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *rest, **more)

    config = replace(CONFIG, laws="stored", steps=2)
    copied(trained, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="No space left on device"):
        patch.setattr(Path, "open", full)
        train_heads(target_folder, prompts, tmp_path, config)
    assert not [*(tmp_path / "work").glob("checkpoint.pt.*")]
    train_heads(target_folder, prompts, tmp_path, config)
    assert RedrafterHead.load(tmp_path).record.facts["steps"] == 2


def test_start_from_a_head_of_another_kind(trained, target_folder, prompts, tmp_path):
    RedrafterHead.load(trained[0]).save(tmp_path / "other", HeadRecord("another", "0" * 32))
    record = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(record | {"kind": "medusa"}))
    with pytest.raises(ModelError, match="holds Medusa heads, not a recurrent drafter; use medusa:"):
        train_heads(target_folder, prompts, tmp_path / "b", replace(CONFIG, start_from=tmp_path / "other"))


def test_unusable_numbers():
    for options, message in (
        ({"length": 0}, "length must be a whole number of 1 or more, got 0"),
        ({"state": 0}, "state must be a whole number of 1 or more"),
        ({"layers": -1}, "layers must be a whole number of 0 or more"),
        ({"loss": "l2"}, "unknown loss 'l2'"),
        ({"loss": "kl=x"}, "is not a positive number"),
        ({"laws": "guessed"}, "unknown kind of distributions 'guessed'; .*valid: computed, stored"),
        ({"laws": "stored", "loss": "ce"}, "laws need not be stored for the loss 'ce'"),
        ({"self_fed": 1.5}, r"self_fed must be a number in \[0, 1\]"),
        ({"place_decay": 0.0}, "place_decay must lie in"),
        ({"epochs": -1.0}, "epochs must be a number above 0"),
    ):
        with pytest.raises(OptionError, match=message):
            RedrafterTrainingConfig(**options)
