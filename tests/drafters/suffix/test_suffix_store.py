"""What is kept of requests: apart by namespace, within a bound, and in a file that several processes use."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from truedraft.drafters.suffix import SuffixFile, SuffixStore
from truedraft.errors import OptionError

LONG = list(range(100, 140))


def texts_of(path: Path, most: int = 1 << 12, tokenizer: str = "t") -> list[tuple[object, list[int]]]:
    return [(scope, text.tolist()) for scope, text in SuffixFile(path, tokenizer, most).read()]


def test_namespaces_never_leak() -> None:
    """A planted string is found where it was planted, whatever else is stored, and nowhere else."""
    store, rng = SuffixStore(1 << 16), random.Random(3)
    for number in range(400):
        scope = f"tenant {number % 7}"
        store.add(scope, [1000 + number % 7, *(rng.randrange(50) for _ in range(30)), *LONG, 1000 + number % 7])
    store.settle()
    for tenant in range(7):
        found = store.find(f"tenant {tenant}", LONG, 1)
        assert found.lengths and {row[0] for row in found.following} == {1000 + tenant}
    assert store.find(None, LONG, 1).lengths == [] and store.find("another", LONG, 1).lengths == []


def test_all_namespaces_together_stay_within_the_bound() -> None:
    store, drawn = SuffixStore(1 << 12), np.random.default_rng(0)
    for number in range(300):
        store.take_in(f"tenant {number % 40}", drawn.integers(0, 9999, 200).astype(np.int32))
        assert store.n_bytes <= 32 * (1 << 12)
        assert len(store._known) <= (1 << 12) // 64 + 1
    assert len(store) <= 1 << 12
    assert store.find("tenant 0", LONG, 1).lengths == []


def test_a_text_that_is_there_is_stored_again_only_when_it_is_old() -> None:
    store, text = SuffixStore(1 << 10), np.arange(100, dtype=np.int32)
    for _ in range(5):
        store.take_in(None, text)
    assert len(store) == 101
    for number in range(5):
        store.take_in(None, np.arange(100, dtype=np.int32) + 1000 * (number + 1))
    store.take_in(None, text)
    assert len(store) == 101 * 7
    assert store.find(None, list(range(40)), 1).lengths == [32, 32]


def test_short_texts_say_nothing() -> None:
    store = SuffixStore(1 << 10)
    store.add(None, [1, 2, 3])
    store.settle()
    assert len(store) == 0


def test_a_file_keeps_texts_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "suffix"
    store = SuffixStore(1 << 12, SuffixFile(path, "t", 1 << 12))
    store.add(None, LONG)
    store.add("tenant", [*LONG, 7])
    store.add(("no", "text"), [*LONG, 8])  # a namespace that no file can name
    store.settle()
    again = SuffixStore(1 << 12, SuffixFile(path, "t", 1 << 12))
    assert again.find("tenant", LONG, 1).following == [[7]]
    assert again.find(None, LONG[:20], 1).following == [[120]]
    assert again.find(("no", "text"), LONG, 1).lengths == []
    assert texts_of(path) == [(None, LONG), ("tenant", [*LONG, 7])]


@pytest.mark.parametrize("cut", [1, 5, 12, 30, 200])
def test_a_file_that_was_cut_off_is_read_up_to_there(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "suffix"
    file = SuffixFile(path, "t", 1 << 12)
    file.read()
    for number in range(3):
        file.append(None, np.array([*LONG, number], dtype=np.int32))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    lost = 1 if cut <= 176 else 2
    with caplog.at_level(logging.WARNING):
        found = texts_of(path)
    assert found == [(None, [*LONG, number]) for number in range(3 - lost)]
    assert f"is damaged behind {3 - lost} texts" in caplog.text
    aside = (tmp_path / "suffix.damaged").read_bytes()
    assert path.read_bytes() + aside == whole[:-cut], "nothing is lost"
    other = SuffixFile(path, "t", 1 << 12)
    other.read()
    other.append(None, np.array(LONG, dtype=np.int32))
    assert texts_of(path) == [*found, (None, LONG)]


def test_a_flipped_bit_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "suffix"
    file = SuffixFile(path, "t", 1 << 12)
    file.read()
    for number in range(2):
        file.append(None, np.array([*LONG, number], dtype=np.int32))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    assert texts_of(path) == [(None, [*LONG, 0])]
    assert "is damaged behind 1 texts" in caplog.text


def test_what_is_no_such_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "suffix"
    for content, said in (
        (b"PK\x03\x04 something else", "is no suffix cache of truedraft's"),
        (b"", "is no suffix cache"),
        (b'{"kind": "truedraft suffix cache", "version": 9, "tokenizer": "t"}\n', "is of version 9"),
        (b'{"kind": "truedraft suffix cache", "version": 1, "tokenizer": "u"}\n', "for another tokenizer"),
    ):
        path.write_bytes(content)
        with pytest.raises(OptionError, match=said):
            SuffixFile(path, "t", 100).read()
        assert path.read_bytes() == content
    with pytest.raises(OptionError, match="cannot be read or made"):
        SuffixFile(tmp_path, "t", 100).read()


def test_two_processes_share_one_file(tmp_path: Path) -> None:
    """Both write a hundred texts at once; none is lost, and each learns the other's."""
    path = tmp_path / "suffix"
    code = """
import sys
import numpy as np
from pathlib import Path
from truedraft.drafters.suffix import SuffixFile, SuffixStore
own = int(sys.argv[2])
store = SuffixStore(1 << 16, SuffixFile(Path(sys.argv[1]), "t", 1 << 16))
for number in range(100):
    store.add(None, [own, number, *range(50), own])
"""  # the process waits for what is not taken in yet
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(own)]) for own in (7000, 8000)]
    assert [each.wait(timeout=120) for each in running] == [0, 0]
    texts = [text for _, text in texts_of(path, 1 << 16)]
    assert len(texts) == 200
    assert sorted(texts) == sorted([own, number, *range(50), own] for own in (7000, 8000) for number in range(100))
    third = SuffixStore(1 << 16, SuffixFile(path, "t", 1 << 16))
    fourth = SuffixStore(1 << 16, SuffixFile(path, "t", 1 << 16))
    third.take_in(None, np.array([*LONG, 9], dtype=np.int32))
    fourth.take_in(None, np.array([*LONG, 10], dtype=np.int32))
    assert sorted(row[0] for row in fourth.find(None, LONG, 1).following) == [9, 10]


def test_a_file_is_cut_to_its_latest_texts(tmp_path: Path) -> None:
    path = tmp_path / "suffix"
    file = SuffixFile(path, "t", 500)
    file.read()
    for number in range(100):
        file.append(None, np.array([*LONG, number], dtype=np.int32))
    texts = texts_of(path, 500)
    assert 500 // 41 <= len(texts) <= 1000 // 41 + 1
    assert [text[-1] for _, text in texts] == list(range(100 - len(texts), 100))


def test_a_file_that_cannot_be_written_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "suffix"
    store = SuffixStore(1 << 12, SuffixFile(path, "t", 1 << 12))
    path.unlink()
    path.mkdir()
    for number in range(3):
        store.add(None, [*LONG, number])
    store.settle()
    assert store.find(None, LONG, 1).lengths == [32] * 3
    assert caplog.text.count("is kept in memory alone") == 1
