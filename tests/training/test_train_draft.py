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

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel
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
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.training import drafts, evaluate
from truedraft.training.drafts import DraftConfig, train_draft
from truedraft.training.loop import Callbacks, TrainingLoop, checkpoint_of
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.tokenizer import load_tokenizer, save_tokenizer
from truedraft.training.workspace import TimeBudget

CURRICULUM = Curriculum(stable_length=32, decay_length=64, tokens_per_step=256, tokens_per_pass=256)


def config(steps=30, **changes):
    sizes = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64}
    return DraftConfig(**(sizes | changes), schedule=WarmupStableDecay(2, steps, 10), curriculum=CURRICULUM)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """What is measured at the end takes most of the time of these tests."""
    monkeypatch.setattr(evaluate, "_TOKENS", 12)


@pytest.fixture
def data(tmp_path, tokenizer, stream):
    path = tmp_path / "data.jsonl"
    text = tokenizer.decode(stream[1:-1].tolist())
    path.write_text(json.dumps({"text": text}) + "\n")
    return path


def test_distillation_raises_alpha(target_folder, data, tmp_path):
    alphas = []
    result = train_draft(
        target_folder,
        [data],
        tmp_path / "out",
        config(),
        callbacks=Callbacks(on_step=lambda r: alphas.append(r.values["alpha"])),
    )
    assert sum(alphas[-5:]) / 5 > sum(alphas[:5]) / 5 + 0.15
    assert result.report.alpha > alphas[0] + 0.15
    assert result.steps == 40
    assert result.tokens == 40 * 256


def test_the_result_is_an_ordinary_folder_with_a_card(target_folder, data, tmp_path):
    out = tmp_path / "out"
    result = train_draft(target_folder, [data], out, config(steps=2))
    assert load_causal_lm(out).num_parameters() == load_causal_lm(out).get_input_embeddings().weight.numel() + sum(
        p.numel() for name, p in load_causal_lm(out).named_parameters() if "embed" not in name
    )
    assert load_tokenizer(out).get_vocab() == load_tokenizer(target_folder).get_vocab()
    with safe_open(out / "model.safetensors", "pt") as shard:
        assert "lm_head.weight" not in shard.keys()  # noqa: SIM118  (tied: stored once)
    card = (out / "README.md").read_text()
    assert f"{result.report.alpha:.4f}" in card
    assert f"{result.report.greedy_agreement:.4f}" in card
    about = ModelCard(card).data
    assert about.base_model == target_folder.name and "draft-model" in about.tags
    for served in result.evaluations:
        row = f"temperature {served.temperature:g}, 4 drafted tokens | {served.stats.mean_acceptance_length:.2f} |"
        assert f"| tokens per target call, {row}" in card


def test_acceptance_is_that_of_the_engine(target_folder, data, tmp_path):
    result = train_draft(target_folder, [data], tmp_path / "out", config(steps=2))
    stream = np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32)
    held_out = stream[-int(len(stream) * 0.05) :]
    prompts = [held_out[len(held_out) * number // 4 :][:64].tolist() for number in range(4)]
    target, drafter = load_model(target_folder), DraftModel(load_model(tmp_path / "out"), num_speculative_tokens=4)
    for served, temperature in zip(result.evaluations, (0.0, 1.0), strict=True):
        engine = Engine(target, drafter, controller="fixed", entropy=0)
        answers = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=temperature))
        emitted, calls = (sum(getattr(a.stats, name) for a in answers) for name in ("emitted_tokens", "target_calls"))
        assert (served.stats.emitted_tokens, served.stats.target_calls) == (emitted, calls)
        assert served.stats.mean_acceptance_length == emitted / calls and served.temperature == temperature


def test_what_the_engine_cannot_run_is_trained_for_all_the_same(target_folder, data, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedModelError("it has a mixer")

    monkeypatch.setattr(drafts, "load_model", refuse)
    notes = []
    result = train_draft(
        target_folder, [data], tmp_path / "out", config(steps=2), callbacks=Callbacks(on_note=notes.append)
    )
    assert result.evaluations == () and notes == ["the draft was not measured in the engine: it has a mixer"]


def test_text_that_is_read_too_often_is_said_and_then_refused(target_folder, tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("x = 1\n" * 60)
    few, notes = Curriculum(16, 16, 64, 64), []
    often = replace(config(steps=1), curriculum=few)
    count = len(tokenizer.encode("x = 1\n" * 60, add_special_tokens=False))
    steps = -(-5 * count // 64)
    some = replace(often, schedule=WarmupStableDecay(1, steps, 1))
    train_draft(
        target_folder, [tmp_path / "short.txt"], tmp_path / "a", some, callbacks=Callbacks(on_note=notes.append)
    )
    assert len(notes) == 1 and f"reads {64 * (steps + 1):,}, each of them" in notes[0]
    many = replace(often, schedule=WarmupStableDecay(1, 50 * steps, 1))
    with pytest.raises(DataError, match="beyond 40 times it learns nothing more: give more text, or fewer steps"):
        train_draft(target_folder, [tmp_path / "short.txt"], tmp_path / "b", many)


def test_within_minutes_it_trains_less_and_goes_on_with_what_it_began(target_folder, data, tmp_path):
    clock, plans = iter(range(0, 10**9, 5)), []
    budget = TimeBudget(1.0, lambda: float(next(clock)))
    result = train_draft(
        target_folder,
        [data],
        tmp_path / "out",
        config(),
        budget=budget,
        callbacks=Callbacks(on_plan=plans.append, on_note=plans.append),
    )
    assert 1 <= result.steps <= 12 and result.evaluations and result.report.tokens > 0
    assert "are free, all within 1 minutes" in plans[0]
    notes = []
    more = train_draft(
        target_folder,
        [data],
        tmp_path / "out",
        config(),
        budget=TimeBudget(60),
        callbacks=Callbacks(on_note=notes.append),
    )
    begun = checkpoint_of(tmp_path / "out" / "work")[1]
    assert more.steps == begun["schedule.stable_steps"] + begun["schedule.decay_steps"] <= 40 and notes == []


def test_few_steps_are_refused_before_the_target_writes(target_folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "trial", lambda loop: (20.0, 1000))
    plans = Callbacks(on_plan=[].append)
    with pytest.raises(
        TrainingError, match="in 1 minutes there is time for 2 steps of training, 20 s each, from which"
    ):
        train_draft(target_folder, [data], tmp_path / "out", config(), budget=TimeBudget(1), callbacks=plans)
    assert not (tmp_path / "out").exists()


def test_prompts_are_answered_by_the_target_and_their_answers_learned(target_folder, tokenizer, tmp_path):
    asked = [f"def add_{number}(left, right):\n" for number in range(9)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    writing = WritingConfig(answer_tokens=40, batch=4)
    plans, notes = [], []
    told = Callbacks(on_plan=plans.append, on_note=notes.append)
    some = replace(config(steps=2), tokens=400, writing=writing)
    result = train_draft(target_folder, [tmp_path / "p.jsonl"], tmp_path / "out", some, callbacks=told)
    assert plans[0].startswith("the target writes up to 400 tokens, 4.8 kB; 12 steps of training take about")
    assert notes[0] == "there are 9 prompts, and 10 are asked for with --tokens" and result.evaluations
    lines = (tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [tokenizer.decode(each["prompt"]) for each in answers] == asked
    stream = np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32).tolist()
    assert stream[: len(answers[0]["prompt"]) + 1 + len(answers[0]["answer"])] == [
        tokenizer.eos_token_id,
        *answers[0]["prompt"],
        *answers[0]["answer"],
    ]
    begun = checkpoint_of(tmp_path / "out" / "work")[1]
    assert not [name for name in begun if name.startswith(("tokens", "writing"))], "the text's hash says it all"


def test_an_end_of_text_that_only_the_configuration_names_is_used(target_folder, data, tmp_path):
    shutil.copytree(target_folder, tmp_path / "target", ignore=shutil.ignore_patterns("work"))
    settings = tmp_path / "target" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    model = tmp_path / "target" / "config.json"
    for named in (7, [7, 0]):
        model.write_text(json.dumps({**json.loads(model.read_text()), "eos_token_id": named}))
        assert load_tokenizer(tmp_path / "target").eos_token_id == 7
    train_draft(tmp_path / "target", [data], tmp_path / "out", config(steps=2))
    assert np.fromfile(tmp_path / "out" / "work" / "train.bin", dtype=np.uint32)[0] == 7
    assert DraftModel(load_model(tmp_path / "out")).check(load_model(tmp_path / "target")) is None


def test_interrupted_and_called_again_it_goes_on(target_folder, data, tmp_path):
    class KilledError(Exception):
        pass

    def kill(record):
        if record.step == 7:
            raise KilledError

    small = DraftConfig(
        width=32,
        heads=2,
        intermediate=64,
        schedule=WarmupStableDecay(2, 8, 2),
        curriculum=CURRICULUM,
        checkpoint_every_s=0.0,
    )
    with pytest.raises(KilledError):
        train_draft(target_folder, [data], tmp_path / "out", small, callbacks=Callbacks(on_step=kill))
    steps = []
    train_draft(
        target_folder, [data], tmp_path / "out", small, callbacks=Callbacks(on_step=lambda r: steps.append(r.step))
    )
    assert steps == [7, 8, 9]  # the checkpoint of step 7 was still to be written


def test_start_from_an_earlier_draft(target_folder, data, tmp_path):
    train_draft(target_folder, [data], tmp_path / "one", config())
    alphas = []
    train_draft(
        target_folder,
        [data],
        tmp_path / "two",
        config(steps=2, start_from=tmp_path / "one"),
        callbacks=Callbacks(on_step=lambda r: alphas.append(r.values["alpha"])),
    )
    assert alphas[0] > 0.4  # a new draft begins below 0.2


def test_held_out_files_are_measured_on(target_folder, data, tmp_path):
    (tmp_path / "held.txt").write_text("def add_seven(left, right):\n    total = left + right\n" * 3)
    result = train_draft(target_folder, [data], tmp_path / "out", config(steps=2), held_out=[tmp_path / "held.txt"])
    assert 10 < result.report.tokens < 200


def test_bad_data_is_refused(target_folder, tmp_path):
    with pytest.raises(DataError, match="no training data was given"):
        train_draft(target_folder, [], tmp_path / "out", config())
    (tmp_path / "short.txt").write_text("x = 1\n")
    with pytest.raises(DataError, match="give more text or a shorter sequence length"):
        train_draft(target_folder, [tmp_path / "short.txt"], tmp_path / "out", config())


def test_another_vocabulary_is_refused(target_folder, data, tmp_path):
    other = LlamaShape(
        vocab_size=290, width=32, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=16
    )
    save_llama(new_llama(other, seed=0), tmp_path / "other")
    save_tokenizer(train_tokenizer(["some other text"], vocab_size=270, context=64), tmp_path / "other")
    with pytest.raises(VocabularyMismatchError, match="another tokenizer"):
        train_draft(target_folder, [data], tmp_path / "out", config(start_from=tmp_path / "other"))
    save_tokenizer(load_tokenizer(target_folder), tmp_path / "other")
    with pytest.raises(VocabularyMismatchError, match="290 logits, the target 300"):
        train_draft(target_folder, [data], tmp_path / "out", config(start_from=tmp_path / "other"))


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
    target_folder, data, tmp_path, monkeypatch, name, kind, message
):
    monkeypatch.chdir(tmp_path)
    for folder in ("bare", "endless"):
        shutil.copytree(target_folder, tmp_path / folder, ignore=shutil.ignore_patterns("work"))
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    settings = tmp_path / "endless" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    model = tmp_path / "endless" / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "eos_token_id": None}))
    with pytest.raises(kind, match=message):
        train_draft(name, [data], tmp_path / "out", config())


def test_nothing_is_written_to_the_screen(target_folder, data, tmp_path, capfd):
    capfd.readouterr()
    train_draft(target_folder, [data], tmp_path / "out", config(steps=2))
    assert capfd.readouterr() == ("", "")


def test_going_on_with_another_draft_is_refused(target_folder, data, tmp_path):
    train_draft(target_folder, [data], tmp_path / "out", config(steps=2))
    with pytest.raises(OptionError, match="width was 32 and is now 64"):
        train_draft(target_folder, [data], tmp_path / "out", config(steps=2, width=64))


def test_sizes_that_make_no_model_are_refused():
    for sizes, message in (
        ({"width": 30}, "multiple of twice the heads"),
        ({"kv_heads": 3}, "multiple of the kv heads"),
    ):
        with pytest.raises(OptionError, match=message):
            config(**sizes)


def test_sequences_longer_than_the_context_are_cut_and_that_is_said(target_folder, data, tmp_path):
    notes = []
    long = replace(config(steps=2), curriculum=Curriculum(256, 512, 512, 512))
    train_draft(target_folder, [data], tmp_path / "out", long, callbacks=Callbacks(on_note=notes.append))
    assert notes == ["the context is 128 tokens, so training uses sequences of 128, and of 128 while the rate decays"]


@pytest.mark.parametrize(("context", "step", "expected"), [(1000, 4096, 512), (300, 3000, 300), (299, 3000, 250)])
def test_sequences_are_cut_to_a_short_context(context, step, expected):
    fitted = Curriculum(step // 2, step, tokens_per_step=step).fitting(context)
    assert (fitted.stable_length, fitted.decay_length) == (expected, expected)
    assert Curriculum().fitting(2048) == Curriculum()
