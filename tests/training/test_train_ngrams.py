"""`train_ngrams` from files, or from what the target writes, to a folder that drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipes.common import train_tokenizer

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import NgramDrafter
from truedraft.drafters.ngram.table import NgramTable
from truedraft.drafters.registry import TrainedDrafter, find_drafters
from truedraft.errors import DataError, OptionError, VocabularyMismatchError
from truedraft.training import Callbacks, NgramConfig, TimeBudget, WritingConfig, count_ngrams, train_ngrams
from truedraft.training import ngrams as module
from truedraft.training.texts.data import save_tokenizer

ANSWERS = NgramConfig(tokens=48, prompt_tokens=8, answers=WritingConfig(answer_tokens=12, batch=3, seed=5))


@pytest.fixture(autouse=True)
def few_prompts(short_answers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TEST_PROMPTS", 2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    texts = (f"def add_{name}(left, right):\n    return left + right\n" for name in ("one", "two", "three", "four"))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    file = tmp_path / "held_out.txt"
    file.write_text("def add_five(left, right):\n    return left + right\n")
    return file


def documents_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]


def same(one: NgramTable, other: NgramTable) -> bool:
    return one.facts == other.facts and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.levels, other.levels, strict=True)
        for name in ("probs", "tokens", "first", "backoff", "best", "best_probs")
    )


def test_a_table_of_texts_is_counted_noted_and_drafts(target_folder, tokenizer, data, held_out, tmp_path):
    out, told = tmp_path / "out", []
    callbacks = Callbacks(on_progress=lambda what, done, total, remark: told.append((what, done, total)))
    result = train_ngrams(target_folder, [data], out, held_out=[held_out], callbacks=callbacks)
    target = load_model(target_folder)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    expected = count_ngrams(
        documents_of(tokenizer, texts), target.vocab_size, 3, min_count=2, tokenizer=target.tokenizer.fingerprint
    )
    written = NgramTable.open(out)
    assert same(written, expected) and same(result.table, expected)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "drafter.json", "table.ngram"]
    kinds = dict.fromkeys(what for what, _, _ in told)
    assert list(kinds) == ["reading text", "counting", "measuring"]
    for what in kinds:
        own = [(done, total) for each, done, total in told if each == what]
        assert own == sorted(own) and own[-1][0] == own[-1][1], "each kind of work is told to its end"

    found = TrainedDrafter.read(out)
    assert found is not None and (found.kind, found.fingerprint) == ("ngram", target.fingerprint)
    assert set(found.tokens_per_call) == {0.0, 1.0}
    assert found.figures["ngrams"] == list(written.ngrams) and found.figures["order"] == 3
    assert [each.folder for each in find_drafters(target, [tmp_path])] == [out]
    drafter = NgramDrafter(NgramTable.open(out))
    drafter.check(target)
    params = SamplingParams(max_tokens=24)
    answer = Engine(target, drafter, controller="fixed").generate("def add_one(", params)
    assert answer.token_ids == Engine(target).generate("def add_one(", params).token_ids
    assert answer.stats.draft_tokens and not answer.warnings


def test_without_held_out_text_the_end_is_kept_back(target_folder, tokenizer, tmp_path):
    lines = [f"x{number} = {number} + left\n" for number in range(100)]
    (tmp_path / "text.txt").write_text("".join(lines))
    result = train_ngrams(target_folder, [tmp_path / "text.txt"], tmp_path / "out")
    counted = documents_of(tokenizer, ["".join(lines[:95])])
    assert result.table.facts.counted_tokens == pytest.approx(len(counted[0]), abs=20)
    assert result.evaluations


def test_no_more_text_is_counted_than_allowed(target_folder, tokenizer, data, held_out, tmp_path):
    notes: list[str] = []
    config = NgramConfig(max_text_tokens=30, min_count=1)
    result = train_ngrams(
        target_folder, [data], tmp_path / "o", config, held_out=[held_out], callbacks=Callbacks(on_note=notes.append)
    )
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    kept, counted = 30, []
    for document in documents_of(tokenizer, texts):
        counted.append([*document[:-1][:kept], document[-1]])
        kept -= len(counted[-1]) - 1
        if not kept:
            break
    assert result.table.facts.counted_tokens == sum(map(len, counted)) == 30 + len(counted)
    assert notes and notes[0].startswith("the first 30 tokens of the text are counted, ")


def test_what_is_cut_from_the_last_piece_of_a_text_is_told(tokenizer, monkeypatch) -> None:
    """Long texts are read in pieces that end with lines; ids that the target lacks are refused."""
    notes: list[str] = []

    def encoded(most: int, vocab_size: int = 1 << 20) -> int:
        texts = ["def f(a):\n    return a\n", "import os\nimport sys\n"]
        found = module._encoded(texts, tokenizer, vocab_size, most, Callbacks(on_note=notes.append))
        return sum(len(document) - 1 for document in found)

    whole = encoded(1 << 20)
    assert encoded(whole) == whole and not notes, "all of it is no cut"
    for short in (1, 5):
        assert encoded(whole - short) == whole - short
        told = notes.pop()
        assert told.startswith(f"the first {whole - short} tokens of the text are counted, ") and "100%" not in told
    with pytest.raises(DataError, match=r"the text has the token id \d+, and the target has 20 ids; leave out what"):
        encoded(100, 20)
    text = "".join(f"line {number}\n" for number in range(40)) + "x" * 100 + "\nend"
    monkeypatch.setattr(module, "_PIECE", 32)
    pieces = list(module._pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= 32
    assert all(piece.endswith("\n") for piece in pieces[:10])


def test_answers_of_the_target_are_counted_and_going_on_gives_the_same_table(
    target_folder, tokenizer, data, held_out, tmp_path, monkeypatch
):
    def train(out: str, config: NgramConfig = ANSWERS) -> NgramTable:
        return train_ngrams(target_folder, [data], tmp_path / out, config, held_out=[held_out]).table

    whole = train("whole")
    lines = (tmp_path / "whole" / "work" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    target = load_model(target_folder)
    expected = count_ngrams(answers, target.vocab_size, 3, min_count=2, tokenizer=target.tokenizer.fingerprint)
    assert len(answers) == 4 and same(whole, expected)
    assert not (tmp_path / "whole" / "work" / "answers.hidden").stat().st_size, "vectors are not kept"

    work = tmp_path / "half" / "work"
    work.mkdir(parents=True)
    (work / "answers.json").write_text((tmp_path / "whole" / "work" / "answers.json").read_text())
    (work / "answers.jsonl").write_text(f"{lines[0]}\n{lines[1][:20]}")
    assert same(train("half"), whole)
    assert (work / "answers.jsonl").read_text().splitlines() == lines
    again = train("half", replace(ANSWERS, order=2))
    assert again.order == 2 and NgramTable.open(tmp_path / "half").order == 2, "the answers are counted otherwise"
    with pytest.raises(OptionError, match="prompt"):
        train("half", replace(ANSWERS, prompt_tokens=7))


def test_prompts_are_answered_and_counted_and_some_are_measured_on(target_folder, tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "def add_{number}(x):"}}\n' for number in range(40)))
    with pytest.raises(DataError, match="holds prompts, which the target answers first: add --answers"):
        train_ngrams(target_folder, [tmp_path / "p.jsonl"], tmp_path / "out")
    config = replace(ANSWERS, tokens=40 * ANSWERS.answers.answer_tokens)
    result = train_ngrams(target_folder, [tmp_path / "p.jsonl"], tmp_path / "out", config)
    assert result.evaluations and result.source == "what the target answers to prompts from p.jsonl"
    assert len((tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()) == 40


def test_minutes_end_the_writing(target_folder, data, held_out, tmp_path):
    notes: list[str] = []
    callbacks, over = Callbacks(on_note=notes.append), TimeBudget(1e-6)
    config = replace(ANSWERS, answers=replace(ANSWERS.answers, batch=1))
    result = train_ngrams(
        target_folder, [data], tmp_path / "out", config, held_out=[held_out], callbacks=callbacks, budget=over
    )
    written = (tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()
    assert len(written) == 2 and result.table.facts.counted_tokens <= 24
    assert any(note.startswith("in the time given the target wrote") for note in notes)


def test_a_table_of_another_tokenizer_is_refused(target_folder, data, held_out, tmp_path):
    train_ngrams(target_folder, [data], tmp_path / "out", held_out=[held_out])
    other = tmp_path / "other"
    save_tokenizer(train_tokenizer(["quite other text, with other merges"] * 9, vocab_size=300, context=128), other)
    for path in Path(target_folder).glob("*"):
        if path.is_file() and not (other / path.name).exists():
            (other / path.name).write_bytes(path.read_bytes())
    target = load_model(other)
    with pytest.raises(VocabularyMismatchError, match="counted with another tokenizer than that of target") as found:
        NgramDrafter(NgramTable.open(tmp_path / "out")).check(target)
    assert str(found.value).count(";") == 1 and "truedraft train ngram" in str(found.value)


@pytest.mark.parametrize(
    ("text", "config", "error", "message"),
    [
        ("  \n", NgramConfig(), DataError, "holds no text"),
        ("x", NgramConfig(order=8), DataError, "the longest text has 2 tokens, its end included, and n-grams of 8"),
        ("x = 1\n" * 9, NgramConfig(max_bytes="1K"), DataError, "bytes, and 1,024 are allowed; allow more"),
    ],
)
def test_unusable_text_and_sizes(target_folder, held_out, tmp_path, text, config, error, message):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(error, match=message):
        train_ngrams(target_folder, [tmp_path / "text.txt"], tmp_path / "out", config, held_out=[held_out])
    assert not (tmp_path / "out").exists()


def test_unusable_options_and_no_text(target_folder, tmp_path) -> None:
    for options in ({"order": 0}, {"min_count": 0}, {"max_text_tokens": 0}, {"max_bytes": "much"}):
        with pytest.raises(OptionError):
            NgramConfig(**options)
    with pytest.raises(OptionError, match="order must be 1 or more and at most 8, got 9"):
        NgramConfig(order=9)
    with pytest.raises(DataError, match="the text has no token"):
        count_ngrams([[], []], 3, 2)
    with pytest.raises(DataError, match=r"there is no text to count for .* with --data FILE"):
        train_ngrams(target_folder, [], tmp_path / "out")


def test_a_table_takes_no_more_bytes_than_allowed() -> None:
    generator = np.random.default_rng(1)
    texts = [generator.zipf(1.3, 400) % 50 for _ in range(20)]
    sizes, counts, told = [], [], list[tuple[int, ...]]()

    def size(table: NgramTable) -> int:
        return sum(getattr(level, name).nbytes for level in table.levels for name in type(level).__slots__)

    for allowed in (300_000, 60_000, 50_000, 45_000):
        table = count_ngrams(texts, 50, 4, max_bytes=allowed, on_progress=lambda *counts: told.append(counts))
        held = size(table)
        sizes.append(held)
        counts.append(table.facts.min_count)
        assert held <= allowed + 8 * table.order, "where children start has one entry more than there are contexts"
        assert same(table, count_ngrams(texts, 50, 4, min_count=table.facts.min_count))
        if table.facts.min_count > 1:
            assert size(count_ngrams(texts, 50, 4, min_count=table.facts.min_count - 1)) > allowed
    assert sizes == sorted(sizes, reverse=True) and counts == sorted(counts) and counts[0] == 1 < counts[-1]
    assert told[:8] == [(number, 8) for number in range(1, 9)], "it tells how far it is"
