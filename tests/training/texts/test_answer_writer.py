"""Text that the target writes: the engine's own answers with their vectors, the same after every interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.tiny import save_tiny_llama
from training.head_runs import full_disk
from truedraft import Engine, load_model
from truedraft.errors import DataError, OptionError, TrainingError
from truedraft.training.loop import Callbacks
from truedraft.training.texts import answer_writer
from truedraft.training.texts.answer_writer import ThreadTrial, Watch, Writing, WritingConfig, hidden_of, write_answers
from truedraft.training.workspace import TimeBudget

CONFIG = WritingConfig(answer_tokens=12, temperatures=(0.0, 1.0), batch=3, seed=5)
PROMPTS = [[5 + number, 40, 7 * number + 1, 33] for number in range(8)]
FILES = ("train.jsonl", "train.hidden", "train.json")


@pytest.fixture(scope="module")
def model(target_folder):
    return load_model(target_folder)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A folder that was written without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    write_answers(model, PROMPTS, folder, "train", CONFIG)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def copied(whole: Path, folder: Path) -> Path:
    for name in FILES:
        (folder / name).write_bytes((whole / name).read_bytes())
    return folder


def test_answers_are_those_of_the_engine_whatever_the_batch(model, tmp_path):
    text = write_answers(model, PROMPTS, tmp_path, "train", CONFIG)
    for number, record in enumerate(text.records):
        assert record.prompt == PROMPTS[number] and record.temperature == number % 2
        alone = Engine(model).generate(PROMPTS[number], CONFIG.params(number))
        assert record.answer[: len(record.answer) - record.stopped] == alone.token_ids
        assert record.stopped == (alone.finish_reason == "stop")
        if record.stopped:
            assert record.answer[-1] in model.eos_token_ids
    assert len(text.tokens) == text.starts[-1] == len(text.bits)


def test_the_vectors_are_those_that_the_tokens_were_drawn_from(model, whole, tmp_path):
    """Of a long prompt the end is kept; lines are JSON that others can read."""
    text = write_answers(model, PROMPTS, whole, "train", CONFIG)  # finished already: only read
    for record, first, end in zip(text.records, text.starts, text.starts[1:], strict=False):
        vectors = text.hidden(slice(first, end))
        assert torch.equal(vectors, hidden_of(model, record).to(torch.bfloat16))
        if record.temperature == 0.0 and not record.stopped:
            assert model.unembed(vectors.to(model.dtype)).argmax(-1).tolist() == record.answer
    traces = text.traces(1.0)
    assert [trace.tokens.tolist() for trace in traces] == [r.answer for r in text.records if r.temperature == 1.0]
    assert torch.equal(traces[0].hidden, text.hidden(slice(text.starts[1], text.starts[2])))
    line = json.loads((whole / "train.jsonl").read_text().splitlines()[1])
    assert line.keys() == {"prompt", "answer", "temperature", "stopped"} and line["temperature"] == 1.0
    long = list(range(1, 200))
    text = write_answers(model, [long], tmp_path, "train", CONFIG)
    assert text.records[0].prompt == long[-(model.context_length - CONFIG.answer_tokens) :]
    assert torch.equal(text.hidden(slice(0, 12)), hidden_of(model, text.records[0]).to(torch.bfloat16))


@pytest.mark.parametrize("kept", [0, 5])
def test_after_a_kill_the_files_come_out_the_same(model, whole, tmp_path, monkeypatch, kept):
    class KilledError(Exception):
        pass

    append = answer_writer.AnswerFiles.append

    def kill(files, record, hidden):
        if len(files.records) == kept:
            files.append_vectors(hidden)  # the vectors are there, the line is not
            raise KilledError
        append(files, record, hidden)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(answer_writer.AnswerFiles, "append", kill)
        write_answers(model, PROMPTS, tmp_path, "train", CONFIG)
    done = []
    told = Callbacks(on_progress=lambda what, *counts: done.append(counts[:2]))
    write_answers(model, PROMPTS, tmp_path, "train", CONFIG, watch=Watch(callbacks=told))
    assert contents(tmp_path) == contents(whole)
    assert done[0] == (kept, len(PROMPTS)) and done[-1] == (len(PROMPTS), len(PROMPTS))


def test_others_may_write_and_the_files_come_out_the_same(model, whole, tmp_path):
    """Behind what is written already; once the time is up nobody is asked."""
    asked = []

    def elsewhere(wanted):
        asked.append([ids for ids, _ in wanted])
        for ids, params in wanted:
            answer = Engine(model).generate(ids, params)
            yield answer.token_ids, answer.finish_reason == "stop"

    copied(whole, tmp_path)
    lines = (whole / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:2]))
    others = replace(CONFIG, elsewhere=elsewhere)
    write_answers(model, PROMPTS, tmp_path, "train", others)
    assert contents(tmp_path) == contents(whole) and asked == [PROMPTS[2:]]
    (tmp_path / "train.jsonl").write_text("".join(lines[:2]))
    write_answers(model, PROMPTS, tmp_path, "train", others, watch=Watch(begun=True), least=2)
    assert len(asked) == 1


def test_others_ask_and_answer_for_a_target_that_asks_itself(tmp_path):
    save_tiny_llama(tmp_path / "model", seed=1, layers=1, chat=True)
    chatty, calls = load_model(tmp_path / "model"), []
    questions = iter(["How do bees make honey?", "Where does the river end?", "Who wrote these letters?"] * 9)

    def elsewhere(wanted):
        calls.append(len(wanted))
        for ids, _ in wanted:
            yield chatty.tokenizer.backend.encode(next(questions, "")) if len(calls) == 1 else ids[:2], len(calls) == 1

    how = WritingConfig(answer_tokens=4, temperatures=(0.0,), elsewhere=elsewhere)
    records = Writing(8, how, tmp_path / "work", Callbacks(), TimeBudget()).answers(chatty, [], asks=True)
    assert len(calls) == 2 and calls[1] == len(records) == 2
    assert {chatty.tokenizer.decode(each.prompt)[len("<user>") :][:3] for each in records} <= {"How", "Whe", "Who"}


def test_answers_that_run_when_the_time_is_up_are_kept_as_far_as_they_are(model, tmp_path):
    """With vectors, in the order of their prompts; what goes on later begins behind them."""
    long = replace(CONFIG, answer_tokens=60)
    asked = iter(range(10**6))
    budget = TimeBudget(20 / 60, lambda: next(asked))  # a second for each time that it is asked
    text = write_answers(model, PROMPTS, tmp_path, "train", long, watch=Watch(budget=budget))
    assert 2 <= len(text.records) < len(PROMPTS)
    cut = [record for record in text.records if not record.stopped and len(record.answer) < 60]
    assert cut and all(len(record.answer) >= 16 for record in cut)
    for number, (record, first, end) in enumerate(zip(text.records, text.starts, text.starts[1:], strict=False)):
        alone = Engine(model).generate(PROMPTS[number], long.params(number)).token_ids
        assert (record.prompt == PROMPTS[number] and record.answer == alone[: len(record.answer)]) or record.stopped
        assert torch.equal(text.hidden(slice(first, end)), hidden_of(model, record).to(torch.bfloat16))
    whole = write_answers(model, PROMPTS, tmp_path, "train", long)
    assert whole.records[: len(text.records)] == text.records and len(whole.records) == len(PROMPTS)


@pytest.mark.parametrize(("name", "size"), [("train.jsonl", -9), ("train.hidden", 0), ("train.hidden", 100)])
def test_a_torn_last_line_and_lost_vectors_are_made_again(model, whole, tmp_path, name, size):
    file = copied(whole, tmp_path) / name
    file.write_bytes(file.read_bytes()[:size])
    write_answers(model, PROMPTS, tmp_path, "train", CONFIG)
    assert contents(tmp_path) == contents(whole)


def test_other_prompts_or_options_are_refused_and_a_broken_line_is_named(model, whole, tmp_path):
    before = contents(copied(whole, tmp_path))
    with pytest.raises(OptionError, match=r"prompts_sha256 was .* and is now"):
        write_answers(model, PROMPTS[:-1], tmp_path, "train", CONFIG)
    with pytest.raises(OptionError, match="answer_tokens was 12 and is now 13"):
        write_answers(model, PROMPTS, tmp_path, "train", replace(CONFIG, answer_tokens=13))
    write_answers(model, PROMPTS, tmp_path, "train", replace(CONFIG, batch=8))  # decides the speed only
    assert contents(tmp_path) == before, "nothing is lost"
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"prompt": [1]}\n' + lines.read_text())
    with pytest.raises(DataError, match=r"train\.jsonl, line 1: not an answer"):
        write_answers(model, PROMPTS, tmp_path, "train", CONFIG)


@pytest.mark.parametrize("begun", [0, 3])
def test_a_full_disk_is_one_sentence_and_loses_nothing(model, whole, tmp_path, begun):
    """In the fourth answer, which may be the first after going on."""
    if begun:
        lines = copied(whole, tmp_path) / "train.jsonl"
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:begun]))
    with full_disk("train.hidden", 4 - begun), pytest.raises(TrainingError, match="No space left on device; what was"):
        write_answers(model, PROMPTS, tmp_path, "train", CONFIG)
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 3
    write_answers(model, PROMPTS, tmp_path, "train", CONFIG)
    assert contents(tmp_path) == contents(whole)


def test_unusable_options_and_seeds():
    for options, message in (
        ({"answer_tokens": 0}, "answer_tokens must be 1 or more, got 0"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"temperatures": ()}, "at least one"),
        ({"temperatures": (-1.0,)}, "temperature must be a number, 0 or more"),
    ):
        with pytest.raises(OptionError, match=message):
            WritingConfig(**options)
    seeds = {WritingConfig(seed=seed).params(number).seed for seed in range(3) for number in range(50)}
    assert len(seeds) == 150, "they go by number"


@pytest.mark.parametrize(("seconds", "kept"), [({1: 1.0, 2: 2.0}, 1), ({1: 2.0, 2: 1.5}, 2)])
def test_the_faster_is_kept_after_some_turns(seconds, kept):
    now = [0.0]
    torch.set_num_threads(2)
    trial = ThreadTrial(torch.device("cpu"), lambda: now[0])
    used = []

    def step():
        used.append(torch.get_num_threads())
        now[0] += seconds[used[-1]]
        return len(used)

    assert [trial.run(step) for _ in range(200)] == list(range(1, 201))
    assert set(used[:150]) == {1, 2} and set(used[150:]) == {kept}
    trial.stop()
    assert torch.get_num_threads() == 2
    device = ThreadTrial(torch.device("meta"))
    assert {device.run(torch.get_num_threads) for _ in range(200)} == {2}, "a device is left alone"
    torch.set_num_threads(1)
