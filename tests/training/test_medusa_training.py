"""`train_heads` from prompts to a folder of heads: exact after a kill, honest numbers, errors that lose nothing."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from cli.tiny import save_tiny_llama
from training.head_runs import copied, full_disk, log_of, same_weights, trained_in
from truedraft import Engine, SamplingParams, load_model
from truedraft.errors import CompositionError, DataError, OptionError, TrainingError
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.training import heads as heads_module
from truedraft.training import loop as loop_module
from truedraft.training.head_config import heads_optimizer
from truedraft.training.heads import HeadJob, train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.report import licence_of, made_by
from truedraft.training.texts.answer_writer import SELF, WritingConfig, WrittenAnswer
from truedraft.training.texts.data import load_tokenizer, save_tokenizer
from truedraft.training.texts.self_distillation import SelfDistillationData
from truedraft.training.workspace import TimeBudget

HEADS = 2
CONFIG = MedusaTrainingConfig(
    heads=HEADS, tokens=400, writing=WritingConfig(answer_tokens=16, batch=8), steps=7, learning_rate=2e-2,
    positions_per_step=64, window=8, evaluate_every=3, checkpoint_every_s=0.0,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture(scope="module")
def target_folder(learned_folder):
    return learned_folder


@pytest.fixture(scope="module")
def trained(target_folder, prompts, tmp_path_factory, short_answers):
    return trained_in(target_folder, prompts, tmp_path_factory.mktemp("heads"), CONFIG)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return MedusaHeads.load(folder).state_dict()


def test_the_trees_that_it_leaves_behind(trained):
    out, _, _ = trained
    checkpoint = MedusaHeads.load(out)
    assert checkpoint.record.trees.keys() == {"greedy", "sampled"}
    for kind, tree in checkpoint.record.facts["trees"].items():
        compared = tree["compared"]
        best = max(compared, key=lambda way: compared[way], default="calibrated")
        assert tree["chosen"] == ("counted" if best == "counted" else "likeliest")
        drafter = Medusa(MedusaHeads.load(out), nodes=4)
        params = SamplingParams(temperature=0.0 if kind == "greedy" else 1.0)
        assert drafter.guess_trees.is_fixed(params) == (best == "counted")
        curve = drafter.acceptance_curve(params)
        assert curve is not None and curve.measured_on == "the target's answers to 6 held-out prompts"
    record = json.loads((out / "work" / "run.json").read_text())
    assert record["command"] and record["versions"]["torch"]


def test_training_teaches(target_folder, prompts, tmp_path, trained):
    long = replace(CONFIG, steps=60, evaluate_every=60)
    result = train_heads(target_folder, prompts, copied(trained, tmp_path), long)
    log = log_of(tmp_path)
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    new = MedusaHeads(MedusaConfig(32, 300, HEADS))
    assert any(not torch.equal(weights(tmp_path)[name].float(), new.state_dict()[name]) for name in new.state_dict())
    greedy = result.report.facts["trees"]["greedy"]
    assert greedy["accuracy"][0]["top_1"] > 0.3
    assert next(each["replayed"] for each in greedy["promises"] if each["nodes"] == 8) > 1.5


def test_an_interruption_of_the_writing_is_gone_on_with(trained, target_folder, prompts, tmp_path):
    def stop(what, done, total, remark):
        if done >= 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(target_folder, prompts, tmp_path, CONFIG, callbacks=Callbacks(on_progress=stop))
    train_heads(target_folder, prompts, tmp_path, CONFIG)
    for name in ("train.jsonl", "train.hidden", "tree.jsonl", "tree.hidden"):
        assert (tmp_path / "work" / name).read_bytes() == (trained[0] / "work" / name).read_bytes(), name


@pytest.mark.parametrize("failing", ["checkpoint.pt", "log.jsonl"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(trained, target_folder, prompts, tmp_path, failing):
    copied(trained, tmp_path)
    with full_disk(failing, 2), pytest.raises(TrainingError, match="No space left on device"):
        train_heads(target_folder, prompts, tmp_path, CONFIG)
    assert not [*(tmp_path / "work").glob("checkpoint.pt.*")]
    train_heads(target_folder, prompts, tmp_path, CONFIG)
    assert same_weights(MedusaHeads, trained[0], tmp_path)


def test_a_disk_that_fills_while_torch_writes(trained, target_folder, prompts, tmp_path, monkeypatch):
    """torch turns the failure of its file into an error of another kind, where it opens the file itself."""

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    save = torch.save
    monkeypatch.setattr(loop_module.torch, "save", lambda state, file: save(state, Full(file)))
    with pytest.raises(TrainingError, match=r"cannot write .*checkpoint\.pt'"):
        train_heads(target_folder, prompts, copied(trained, tmp_path), CONFIG)


def test_free_outputs_are_trained_by_adam_and_start_at_the_lm_head(trained, target_folder, prompts, tmp_path):
    free = replace(CONFIG, tied=False, steps=2)
    train_heads(target_folder, prompts, copied(trained, tmp_path), free)
    heads = MedusaHeads.load(tmp_path)
    assert heads.config.tied is False
    optimizer = heads_optimizer(heads.requires_grad_(True), CONFIG.optimizer)
    muon, adam = (inner.param_groups[0]["params"] for inner in optimizer._optimizers)
    assert {tuple(weight.shape) for weight in muon} == {(32, 32)}
    assert {tuple(weight.shape) for weight in adam} == {(32,), (300, 32)}
    drafter = Medusa(MedusaHeads.load(tmp_path))
    answer = Engine(load_model(target_folder), drafter, controller="fixed").generate(prompts.test[0])
    assert answer.token_ids == Engine(load_model(target_folder)).generate(prompts.test[0]).token_ids


def test_start_from_heads_that_fit(trained, target_folder, prompts, tmp_path):
    more = replace(CONFIG, start_from=trained[0], steps=1, learning_rate=1e-9)
    train_heads(target_folder, prompts, copied(trained, tmp_path), more)
    assert same_weights(MedusaHeads, trained[0], tmp_path, within=1e-3)
    shutil.copytree(trained[0], tmp_path / "other")
    record = json.loads((trained[0] / "config.json").read_text())
    record["target"] = {"name": "another", "fingerprint": "0" * 32}
    (tmp_path / "other" / "config.json").write_text(json.dumps(record))
    for changes, message in (
        ({"layers": 2}, r"have layers 1, not 2 as asked for; ask for the same sizes"),
        ({"start_from": tmp_path / "other"}, r"were trained for another .* and the target is"),
    ):
        with pytest.raises(CompositionError, match=message):
            train_heads(target_folder, prompts, tmp_path / "b", replace(more, **changes))
    assert not (tmp_path / "b" / "work" / "train.jsonl").exists()  # the target wrote nothing


def test_without_text_only_the_embedded_target_knows_what_to_read(target_folder, prompts, tmp_path):
    """And of answers that are too short nothing is learned."""
    with pytest.raises(DataError, match=r"no text to cut prompts .* with --data FILE"):
        train_heads(target_folder, [], tmp_path / "out", CONFIG)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        train_heads(target_folder, [tmp_path / "empty.txt"], tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()
    short = replace(CONFIG, heads=4, writing=WritingConfig(answer_tokens=4))
    with pytest.raises(DataError, match="heads that reach 4 tokens ahead learn from answers of at least 5"):
        train_heads(target_folder, prompts, tmp_path / "out", short)


@pytest.fixture
def writes_nothing(monkeypatch):
    """The jobs that get as far as the writing, which is not done."""
    found = []

    def keep(job: HeadJob, *_):
        found.append(job)
        raise InterruptedError

    monkeypatch.setattr(heads_module, "write_texts", keep)
    return found


def test_data_files_become_prompts_and_far_too_little_is_refused(
    target_folder, tokenizer, stream, tmp_path, writes_nothing
):
    (tmp_path / "a.txt").write_text(tokenizer.decode(stream[1:1500].tolist()))
    much, notes = replace(CONFIG, tokens=8000, prompt_tokens=40, tree_prompts=2, test_prompts=2), []

    def train(config):
        told = Callbacks(on_note=notes.append)
        train_heads(target_folder, [tmp_path / "a.txt"], tmp_path / "out", config, callbacks=told)

    got = r"gives \d+ prompts that share nothing, for about \d+ tokens by the target, and 8,000 are asked for"
    with pytest.raises(DataError, match=got + ": give more text, or ask for fewer tokens"):
        train(much)
    with pytest.raises(InterruptedError):
        train(replace(much, tokens=2000, test_prompts=50))
    assert "and 2,000 are asked for; heads learn more from more text" in notes[0]
    assert "of 50 to measure on: with more text the figures are surer" in notes[1]
    (job,) = writes_nothing
    assert len(job.prompts.train) > 10 and job.prompts.text.dtype == np.uint32 and job.data == "a.txt"


def test_disk_and_time_are_said_before_the_target_writes(target_folder, prompts, tmp_path, writes_nothing):
    plans = []
    with pytest.raises(InterruptedError):
        train_heads(target_folder, prompts, tmp_path / "out", CONFIG, callbacks=Callbacks(on_plan=plans.append))
    disk = (20 * 16 + 2 * 6 * 16) * 32 * 2  # answers x tokens x width x bytes: the vectors alone
    assert plans[0].startswith("the target writes up to 320 tokens to train on; with their vectors and a checkpoint")
    number, unit = re.search(r"up to ([0-9.]+) (kB|MB) of the disk", plans[0]).groups()
    assert disk < float(number) * {"kB": 1e3, "MB": 1e6}[unit] < disk + 150_000
    assert "are free; then come 7 steps of training, about" in plans[0]
    assert writes_nothing[0].step_s > 0.0


def test_within_minutes_it_writes_trains_and_measures_less_and_goes_on_with_what_it_began(
    target_folder, prompts, tmp_path
):
    """A budget that is spent at once leaves the least of everything; its heads are measured all the same."""
    clock = iter(range(0, 10**9, 5))
    notes = []
    spent = TimeBudget(0.5, lambda: float(next(clock)))
    result = train_heads(
        target_folder, prompts, tmp_path, CONFIG, budget=spent, callbacks=Callbacks(on_note=notes.append)
    )
    assert result.effort.steps == 1 and 2 <= result.effort.written_tokens / 16 < 20
    assert any("in the time given the target wrote" in note for note in notes)
    assert result.report.evaluations and (tmp_path / "README.md").is_file()
    text = (tmp_path / "work" / "train.jsonl").read_bytes()
    again = train_heads(
        target_folder, prompts, tmp_path, CONFIG, budget=TimeBudget(60), callbacks=Callbacks(on_note=notes.append)
    )
    assert (tmp_path / "work" / "train.jsonl").read_bytes() == text and again.effort.steps == 1
    with pytest.raises(OptionError, match="minutes are a limit for stage 1"):
        train_heads(target_folder, prompts, tmp_path / "two", replace(CONFIG, stage=2), budget=TimeBudget(1))


def test_minutes_are_kept_whatever_replaying_takes(target_folder, prompts, tmp_path, monkeypatch):
    """By a clock that steps of the engine, of training and positions of a replay move on, these by far the most."""
    now, replayed = [0.0], []

    def takes(owner, name, seconds):
        plain = getattr(owner, name)

        def slow(*given, **named):
            now[0] += seconds(*given)
            return plain(*given, **named)

        monkeypatch.setattr(owner, name, slow)

    def replaying(config, head, lm_head, target, text, follow):
        replayed.append(len(text.tokens))
        return 0.05 * len(text.tokens)

    takes(Engine, "step", lambda *_: 0.05)
    takes(loop_module.TrainingLoop, "_step", lambda *_: 0.5)
    takes(MedusaTrainingConfig, "calibrate", replaying)
    monkeypatch.setattr(heads_module, "_LEAST_REPLAYED", 64)
    budget = TimeBudget(0.5, lambda: now[0])
    result = train_heads(target_folder, prompts, tmp_path, replace(CONFIG, steps=20), budget=budget)
    assert now[0] <= 1.1 * 30.0 and result.effort.steps > 1
    assert len(replayed) == 2 and replayed[0] < 2 * 6 * 16, "a little is replayed first, then what fits"


def test_minutes_that_buy_next_to_no_steps_are_refused_before_anything_is_written(
    target_folder, prompts, tmp_path, monkeypatch
):
    """A step of a minute, which is tried with as few positions as there are."""
    tried = []

    def slow(job, lm_head):
        tried.append(job.config.positions_per_step)
        return 60.0 * job.config.positions_per_step / 256, 1000

    monkeypatch.setattr(heads_module, "_trial", slow)
    config = replace(CONFIG, steps=300, positions_per_step=2048)
    told = Callbacks(on_note=[].append, on_plan=[].append)
    with pytest.raises(
        TrainingError, match="in 4 minutes there is time for 1 steps of training, 60 s each, from which a"
    ):
        train_heads(target_folder, prompts, tmp_path / "out", config, budget=TimeBudget(4), callbacks=told)
    assert tried == [256] and not (tmp_path / "out").exists()
    job = HeadJob(str(target_folder), prompts, config, told, TimeBudget(4))
    for step_s, positions in ((0.1, 512), (0.01, 2048)):

        def scaled(job, _, step_s=step_s):
            return step_s * job.config.positions_per_step / 256, 0

        monkeypatch.setattr(heads_module, "_trial", scaled)
        found, _ = heads_module._tried(job, None)
        assert found.config.positions_per_step == positions and found.step_s == step_s * positions / 256
    monkeypatch.setattr(heads_module, "_trial", lambda job, _: (0.1, 0))
    unlimited, _ = heads_module._tried(replace(job, budget=TimeBudget()), None)
    assert unlimited.config.positions_per_step == 2048


def test_what_a_budget_buys_is_said_once_the_target_has_begun_to_write(target_folder, prompts):
    plans, notes = [], []
    config = replace(CONFIG, steps=None, epochs=2.0, positions_per_step=16)
    told = Callbacks(on_note=notes.append, on_plan=plans.append)
    job = HeadJob(str(target_folder), prompts, config, told, TimeBudget(4, lambda: 0.0), step_s=0.5)
    heads_module._say_what_fits(job, 30.0)  # seconds for 20 answers of 16 tokens: there are 86
    assert plans == ["writing takes about 30.0 seconds"]
    assert notes == []
    heads_module._say_what_fits(job, 240.0)
    assert plans[1] == "writing takes about 86.4 seconds"
    with pytest.raises(TrainingError, match=r"time for about 2 tokens of text and 1 steps of training, 0\.5 s each"):
        heads_module._say_what_fits(job, 10_000.0)


def test_it_may_learn_from_questions_that_the_target_asks_itself(learned_folder, tmp_path):
    """The same after a kill; with prompts and texts of one's own beside them; held-out ones are of all kinds."""
    target = tmp_path / "chatty"
    shutil.copytree(learned_folder, target, ignore=shutil.ignore_patterns("work"))
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = (
        "{% for m in messages %}def {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}    {% endif %}"
    )
    save_tokenizer(tokenizer, target)
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"add_{number}(left, right):"}) + "\n" for number in range(12)))
    config = replace(CONFIG, tree_prompts=4, test_prompts=3, steps=2)
    said, notes = [], []
    told = Callbacks(lambda *words: said.append(words), on_note=notes.append)
    result = train_heads(target, [SELF, own], tmp_path / "out", config, callbacks=told)
    assert {words[0] for words in said} >= {"asking", "writing text", "training"}
    assert result.report.promised_on.endswith("held-out prompts from questions of its own, own.jsonl")
    lines = (tmp_path / "out" / "work" / "train.jsonl").read_text().splitlines()
    asked = [tokenizer.decode(json.loads(line)["prompt"]) for line in lines]
    assert any(text.startswith("def add_1") for text in asked) and all(text.endswith("\n    ") for text in asked)
    questions = (tmp_path / "out" / "work" / "questions.jsonl").read_text()
    (tmp_path / "out" / "work" / "train.jsonl").write_text("".join(f"{line}\n" for line in lines[:2]))
    (tmp_path / "out" / "work" / "checkpoint.pt").unlink()
    train_heads(target, [SELF, own], tmp_path / "out", config, callbacks=told)
    assert (tmp_path / "out" / "work" / "train.jsonl").read_text().splitlines() == lines
    assert (tmp_path / "out" / "work" / "questions.jsonl").read_text() == questions


def test_a_promise_on_a_target_that_repeats_itself_is_marked():
    def text(*answers):
        return SelfDistillationData([WrittenAnswer([0], list(each), 1.0, False) for each in answers], np.zeros((0, 2)))

    assert heads_module._repeats(text(range(30), [1, 2])) == ""
    told = heads_module._repeats(text([1, 2] * 20, range(40)))
    assert told == " (THE TARGET REPEATS ITSELF THERE: 47% of 8-grams occurred before in their answer)"


def test_a_card_names_the_targets_licence(tmp_path):
    assert licence_of("smollm2") in ("apache-2.0", None) and licence_of("no/such-model") is None
    save_tiny_llama(tmp_path, seed=0, layers=1)
    assert licence_of(str(tmp_path)) is None and "which its files do not name" in made_by(str(tmp_path))
    (tmp_path / "README.md").write_text("---\nbase_model: x\nlicense: llama3.2\n---\n# A model\nlicense: mit\n")
    assert licence_of(str(tmp_path)) == "llama3.2"
    assert f"learned from {tmp_path.name}, and is under the licence of that: llama3.2." in made_by(str(tmp_path))


def test_a_card_says_what_hubs_and_readers_ask_for(trained, target_folder):
    out, result, _ = trained
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == target_folder.name
    assert card.data.tags == ["speculative-decoding", "medusa", "truedraft"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("truedraft", "text-generation")
    count = sum(weight.numel() for weight in weights(out).values())
    assert f"| parameters | {count:,} |" in card.text and f"| steps | {result.effort.steps} |" in card.text
    for each in result.report.evaluations:
        about, length = each.about, each.stats.mean_acceptance_length
        name = f"temperature {each.temperature:g}, {about['nodes']} nodes, {about['trees']} trees"
        assert f"{name} | {length:.2f} (promised {about['promised']:.2f}) |" in card.text
    command = json.loads((out / "work" / "run.json").read_text())["command"]
    assert f"    {shlex.join(command)}" in card.text
