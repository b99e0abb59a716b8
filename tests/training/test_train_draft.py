"""`train_draft` from files to a model folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import ModelCard
from recipes.common import train_tokenizer
from safetensors import safe_open

from training.conftest import SHAPE
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel, from_spec
from truedraft.errors import (
    DataError,
    ModelError,
    ModelNotFoundError,
    OptionError,
    TrainingError,
    UnknownOptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from truedraft.models.architecture import load_causal_lm, new_llama, save_llama
from truedraft.training import drafts
from truedraft.training.drafts import DraftConfig, train_draft
from truedraft.training.loop import Callbacks, TrainingLoop, checkpoint_of
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import Curriculum, load_tokenizer, save_tokenizer
from truedraft.training.workspace import TimeBudget

CURRICULUM = Curriculum(stable_length=32, decay_length=64, tokens_per_step=256, tokens_per_pass=256)


def config(steps=30, **changes):
    sizes = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64}
    return DraftConfig(**(sizes | changes), schedule=WarmupStableDecay(2, steps, 10), curriculum=CURRICULUM)


pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture
def data(tmp_path, tokenizer, stream):
    path = tmp_path / "data.jsonl"
    text = tokenizer.decode(stream[1:-1].tolist())
    path.write_text(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture
def train(target_folder, data, tmp_path):
    """Trains into a folder; what is said of it, `on_...`, may be a list."""

    def run(config, out="out", data=data, target=target_folder, **more):
        told = {name: more.pop(name) for name in list(more) if name.startswith("on_")}
        callbacks = Callbacks(**{name: each.append if isinstance(each, list) else each for name, each in told.items()})
        return train_draft(target, [data], tmp_path / out, config, callbacks=callbacks, **more)

    return run


def test_distillation_raises_alpha_and_an_earlier_draft_begins_there(train, tmp_path):
    steps, more = [], []
    result = train(config(), on_step=steps)
    alphas = [each.values["alpha"] for each in steps]
    assert sum(alphas[-5:]) / 5 > sum(alphas[:5]) / 5 + 0.15
    assert result.report.alpha > alphas[0] + 0.15
    assert (result.steps, result.tokens) == (40, 40 * 256)
    train(config(steps=2, start_from=tmp_path / "out"), "two", on_step=more)
    assert more[0].values["alpha"] > 0.4  # a new draft begins below 0.2


def test_the_result_is_an_ordinary_folder_with_a_card_and_nothing_is_written_to_the_screen(
    train, target_folder, tmp_path, capfd
):
    capfd.readouterr()
    result, out = train(config(steps=2)), tmp_path / "out"
    assert capfd.readouterr() == ("", "")
    assert load_tokenizer(out).get_vocab() == load_tokenizer(target_folder).get_vocab()
    with safe_open(out / "model.safetensors", "pt") as shard:
        assert "lm_head.weight" not in shard.keys()  # noqa: SIM118  (tied: stored once)
    card = (out / "README.md").read_text()
    assert f"{result.report.alpha:.4f}" in card and f"{result.report.greedy_agreement:.4f}" in card
    assert f"| parameters | {load_causal_lm(out).num_parameters():,} |" in card
    about = ModelCard(card).data
    assert about.base_model == target_folder.name and "draft-model" in about.tags
    for served in result.evaluations:
        row = f"temperature {served.temperature:g}, 4 drafted tokens | {served.stats.mean_acceptance_length:.2f} |"
        assert f"| tokens per target call, {row}" in card
    text = "def add_seven(left, right):\n    total = left + right\n"
    (tmp_path / "held.txt").write_text(text * 3)
    assert 10 < train(config(steps=2), "held", held_out=[tmp_path / "held.txt"]).report.tokens < 200


def test_acceptance_is_that_of_the_engine(train, target_folder, tmp_path):
    result = train(config(steps=2))
    stream = np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32)
    held_out = stream[-int(len(stream) * 0.05) :]
    prompts = [held_out[len(held_out) * number // 4 :][:64].tolist() for number in range(4)]
    target, drafter = load_model(target_folder), DraftModel(load_model(tmp_path / "out"), num_speculative_tokens=4)
    for served, temperature in zip(result.evaluations, (0.0, 1.0), strict=True):
        engine = Engine(target, drafter, controller="fixed", entropy=0)
        answers = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=temperature))
        emitted, calls = (sum(getattr(a.stats, name) for a in answers) for name in ("emitted_tokens", "target_calls"))
        assert (served.stats.emitted_tokens, served.stats.target_calls) == (emitted, calls)
        assert served.stats.mean_acceptance_length == emitted / calls and served.temperature == temperature


def test_what_the_engine_cannot_run_is_trained_for_all_the_same(train, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedModelError("it has a mixer")

    monkeypatch.setattr(drafts, "load_model", refuse)
    notes = []
    assert train(config(steps=2), on_note=notes).evaluations == ()
    assert notes == ["the draft was not measured in the engine: it has a mixer"]


def test_text_that_is_read_too_often_is_said_and_then_refused(train, tokenizer, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("x = 1\n" * 60)
    notes, often = [], replace(config(steps=1), curriculum=Curriculum(16, 16, 64, 64))
    steps = -(-5 * len(tokenizer.encode(short.read_text(), add_special_tokens=False)) // 64)
    train(replace(often, schedule=WarmupStableDecay(1, steps, 1)), "a", short, on_note=notes)
    assert len(notes) == 1 and f"reads {64 * (steps + 1):,}, each of them" in notes[0]
    with pytest.raises(DataError, match="beyond 40 times it learns nothing more: give more text, or fewer steps"):
        train(replace(often, schedule=WarmupStableDecay(1, 50 * steps, 1)), "b", short)


def test_within_minutes_it_trains_less_and_goes_on_with_what_it_began(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "trial", lambda loop: (20.0, 1000))
        with pytest.raises(TrainingError, match="there is time for 2 steps of training, 20 s each, from which"):
            train(config(), budget=TimeBudget(1), on_plan=[])
    assert not (tmp_path / "out").exists(), "the target has written nothing"
    clock, said, notes = iter(range(0, 10**9, 5)), [], []
    result = train(config(), budget=TimeBudget(1.0, lambda: float(next(clock))), on_plan=said, on_note=said)
    assert 1 <= result.steps <= 12 and result.evaluations and result.report.tokens > 0
    assert "are free, all within 1 minutes" in said[0]
    more = train(config(), budget=TimeBudget(60), on_note=notes)
    begun = checkpoint_of(tmp_path / "out" / "work")[1]
    assert more.steps == begun["schedule.stable_steps"] + begun["schedule.decay_steps"] <= 40 and notes == []


def test_prompts_are_answered_by_the_target_and_their_answers_learned(train, tokenizer, tmp_path):
    asked = [f"def add_{number}(left, right):\n" for number in range(9)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    plans, notes = [], []
    some = replace(config(steps=2), tokens=400, writing=WritingConfig(answer_tokens=40, batch=4))
    result = train(some, data=tmp_path / "p.jsonl", on_plan=plans, on_note=notes)
    assert plans[0].startswith("the target writes up to 400 tokens, 4.8 kB; 12 steps of training take about")
    assert notes[0] == "there are 9 prompts, and 10 are asked for with --tokens" and result.evaluations
    lines = (tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [tokenizer.decode(each["prompt"]) for each in answers] == asked
    stream = np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32).tolist()
    first = [tokenizer.eos_token_id, *answers[0]["prompt"], *answers[0]["answer"]]
    assert stream[: len(first)] == first
    begun = checkpoint_of(tmp_path / "out" / "work")[1]
    assert not [name for name in begun if name.startswith(("tokens", "writing"))], "the text's hash says it all"


def changed(folder, out, tokenizer=None, model=None):
    """A copy of a target with other values in its tokenizer's and its own configuration."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("work"))
    for name, values in (("tokenizer_config.json", tokenizer), ("config.json", model)):
        settings = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(settings | (values or {})))


def test_an_end_of_text_that_only_the_configuration_names_is_used(train, target_folder, tmp_path):
    for name, end in (("several", [7, 0]), ("target", 7)):
        changed(target_folder, tmp_path / name, {"eos_token": None}, {"eos_token_id": end})
        assert load_tokenizer(tmp_path / name).eos_token_id == 7
    train(config(steps=2), target=tmp_path / "target")
    assert np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32)[0] == 7
    assert DraftModel(load_model(tmp_path / "out")).check(load_model(tmp_path / "target")) is None


def test_the_likeliest_ids_of_the_text_are_recorded_and_measured_with(train, target_folder, tmp_path):
    train(replace(config(steps=2), draft_vocab=20))
    text = np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32)
    counts = np.bincount(text)
    recorded = json.loads((tmp_path / "out" / "draft_ids.json").read_text())["ids"]
    assert len(recorded) == 20 and counts[recorded].tolist() == sorted(counts.tolist(), reverse=True)[:20]
    drafter = from_spec(f"draft:{tmp_path / 'out'}", load_model(target_folder))
    assert drafter.ids.tolist() == recorded
    train(replace(config(steps=2), draft_vocab=0))
    assert not (tmp_path / "out" / "draft_ids.json").exists(), "of the same training, whose draft guesses among all now"


def test_interrupted_and_called_again_it_goes_on(train):
    def kill(record):
        if record.step == 7:
            raise KeyboardInterrupt

    small, steps = replace(config(steps=8), schedule=WarmupStableDecay(2, 8, 2), checkpoint_every_s=0.0), []
    with pytest.raises(KeyboardInterrupt):
        train(small, on_step=kill)
    train(small, on_step=steps)
    assert [each.step for each in steps] == [7, 8, 9]  # the checkpoint of step 7 was still to be written
    with pytest.raises(OptionError, match="width was 32 and is now 64"):
        train(replace(small, width=64))


def test_another_vocabulary_is_refused(train, target_folder, tmp_path):
    save_llama(new_llama(replace(SHAPE, vocab_size=290), seed=0), tmp_path / "other")
    save_tokenizer(train_tokenizer(["some other text"], vocab_size=270, context=64), tmp_path / "other")
    with pytest.raises(VocabularyMismatchError, match="another tokenizer"):
        train(config(start_from=tmp_path / "other"))
    save_tokenizer(load_tokenizer(target_folder), tmp_path / "other")
    with pytest.raises(VocabularyMismatchError, match="290 logits, the target 300"):
        train(config(start_from=tmp_path / "other"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("./nowhere", ModelNotFoundError, "there is no folder"),
        ("embedded:targt", UnknownOptionError, "did you mean 'target'"),
        ("bare", ModelError, "has no tokenizer"),
        ("endless", ModelError, "neither the tokenizer nor the configuration of .* names an end-of-text token"),
    ],
)
def test_a_target_that_cannot_be_used_is_an_error_of_ours(
    train, target_folder, tmp_path, monkeypatch, name, kind, message
):
    monkeypatch.chdir(tmp_path)
    changed(target_folder, tmp_path / "bare")
    changed(target_folder, tmp_path / "endless", {"eos_token": None}, {"eos_token_id": None})
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(kind, match=message):
        train(config(), target=name)


def test_unusable_data_and_sizes(train, target_folder, tmp_path):
    with pytest.raises(DataError, match="no training data was given"):
        train_draft(target_folder, [], tmp_path / "out", config())
    (tmp_path / "short.txt").write_text("x = 1\n")
    with pytest.raises(DataError, match="give more text or a shorter sequence length"):
        train(config(), data=tmp_path / "short.txt")
    for sizes in ({"width": 30}, {"kv_heads": 3}):
        with pytest.raises(OptionError, match=r"must be a multiple of (twice the|the kv) heads"):
            config(**sizes)


def test_sequences_longer_than_the_context_are_cut_and_that_is_said(train):
    notes = []
    train(replace(config(steps=2), curriculum=Curriculum(256, 512, 512, 512)), on_note=notes)
    assert notes == ["the context is 128 tokens, so training uses sequences of 128, and of 128 while the rate decays"]
    for context, step, expected in ((1000, 4096, 512), (300, 3000, 300), (299, 3000, 250)):
        fitted = Curriculum(step // 2, step, tokens_per_step=step).fitting(context)
        assert (fitted.stable_length, fitted.decay_length) == (expected, expected)
    assert Curriculum().fitting(2048) == Curriculum()
