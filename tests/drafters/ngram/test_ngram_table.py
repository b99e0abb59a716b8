"""Tables of n-grams: their distributions by the definition, their files whole, broken and shared."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ngram_tables import probability_by_definition, random_texts
from truedraft.drafters.ngram.table import NgramTable
from truedraft.errors import ModelError
from truedraft.training.ngrams import count_ngrams

VOCAB = 6
TEXTS = random_texts(VOCAB, seed=1)
CONTEXTS = [[], [0], [5], [0, 0], [5, 5], [0, 1, 0], [3, 4, 5], [5, 5, 5, 0, 0], [99, 0], [0, -1]]


@pytest.mark.parametrize(("order", "min_count"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (3, 3)])
def test_backing_off_is_the_definition(order: int, min_count: int) -> None:
    table = count_ngrams(TEXTS, VOCAB, order, min_count=min_count)
    assert table.order == order
    for context in [*CONTEXTS, *(TEXTS[0][:end] for end in range(12))]:
        expected = [probability_by_definition(TEXTS, VOCAB, order, context, token, min_count) for token in range(VOCAB)]
        np.testing.assert_allclose(table.probs(context), expected, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(-1, 6), max_size=5),
)
def test_each_distribution_sums_to_one_and_its_best_is_the_largest(
    texts: list[list[int]], order: int, min_count: int, context: list[int]
) -> None:
    texts = [*texts, [1]]
    table = count_ngrams(texts, 5, order, min_count=min_count)
    probs = table.probs(context)
    assert probs.min() >= 0.0
    assert probs.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-5)
    token, likely = table.best(context)
    assert likely == pytest.approx(float(probs[token]), abs=1e-6)
    assert likely == pytest.approx(float(probs.max()), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(-1, 6), max_size=5),
    st.integers(1, 7),
)
def test_the_likeliest_tokens_are_those_of_the_distribution(
    texts: list[list[int]], order: int, min_count: int, context: list[int], count: int
) -> None:
    table = count_ngrams([*texts, [1]], 5, order, min_count=min_count)
    probs, found = table.probs(context), table.likeliest(context, count)
    assert [likely for _, likely in found] == sorted(probs.tolist(), reverse=True)[:count], "bit for bit"
    assert all(float(probs[token]) == likely for token, likely in found)
    assert len({token for token, _ in found}) == min(count, 5)


def test_no_ngram_reaches_from_one_text_into_the_next() -> None:
    table = count_ngrams([[0, 1], [2, 3]], 4, 2)
    assert table.ngrams == (4, 2)
    assert table.best([1]) == table.best([])
    assert table.best([2])[0] == 3


def test_rare_ngrams_of_three_tokens_are_left_out() -> None:
    texts = [[0, 1, 2, 0, 1, 2, 0, 1, 3]]
    assert count_ngrams(texts, 4, 3).ngrams == (4, 4, 4)
    assert count_ngrams(texts, 4, 3, min_count=2).ngrams == (4, 4, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    count_ngrams(TEXTS, VOCAB, 3, tokenizer="abc").write(tmp_path / "table.ngram")
    return tmp_path / "table.ngram"


def test_a_file_gives_the_table_back(file: Path) -> None:
    written, read = count_ngrams(TEXTS, VOCAB, 3, tokenizer="abc"), NgramTable.open(file)
    assert read.facts == written.facts
    assert read.facts.tokenizer == "abc" and read.facts.counted_tokens == 240
    for context in CONTEXTS:
        assert read.probs(context).tolist() == written.probs(context).tolist()
        assert read.best(context) == written.best(context)
    assert NgramTable.open(file.parent).ngrams == written.ngrams, "the folder of a training will do"
    assert [each.name for each in file.parent.iterdir()] == ["table.ngram"]


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in {*range(60), *range(60, len(whole), 131), len(whole) - 1}:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut off after|is empty") as found:
            NgramTable.open(file)
        assert str(found.value).count(";") == 1 and str(file) in str(found.value)


def test_a_changed_byte_is_noticed_wherever_it_counts(file: Path) -> None:
    whole = file.read_bytes()
    told = set()
    for place in {*range(0, len(whole), 17), *range(24)}:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            NgramTable.open(file)
        except ModelError as error:
            told.add(str(error).split("'")[-1].split(";")[0].split(" of its n-grams")[0])
        else:
            assert whole[place] == 0, f"byte {place} is not looked at"  # between two arrays
    assert " is damaged: the checksum of its header differs" in told
    assert " is damaged: the checksum of probs" in told


def test_other_files_and_versions_are_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    with pytest.raises(ModelError, match="is of version 2, and this truedraft reads version 1; count it again"):
        NgramTable.open(file)
    file.write_text("import this\n")
    with pytest.raises(ModelError, match=r"begins as no n-gram table does; name a file or folder that truedraft"):
        NgramTable.open(file)
    with pytest.raises(ModelError, match=r"cannot read the n-gram table .*No such file"):
        NgramTable.open(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="names the home folder of nobody"):
        NgramTable.open("~nobody-of-this-name/table")


def test_who_maps_a_table_keeps_it_while_another_takes_its_place(file: Path) -> None:
    code = (
        "import json, sys; from truedraft.drafters.ngram.table import NgramTable\n"
        f"table = NgramTable.open({str(file)!r}); print('ready', flush=True); sys.stdin.readline()\n"
        "print(json.dumps([table.probs([0, 1]).tolist(), table.best([0])]))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "ready\n"
        ours = NgramTable.open(file)
        expected = [ours.probs([0, 1]).tolist(), list(ours.best([0]))]
        count_ngrams(random_texts(VOCAB, seed=2), VOCAB, 3).write(file)
        answer, _ = other.communicate("go\n")
    assert json.loads(answer) == expected
    assert [ours.probs([0, 1]).tolist(), list(ours.best([0]))] == expected
    assert NgramTable.open(file).probs([0, 1]).tolist() != expected[0]
