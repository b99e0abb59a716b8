"""A run that was interrupted goes on from its file, and asks nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from truedraft import SamplingParams
from truedraft.core.params import Structured
from truedraft.errors import ChangedOptionsError, DataError, PeerError
from truedraft.measure.peers import Peer, PeerFacts, Question, Recorded, Reply


class Counting(Peer):
    """Answers with the number of the question, and with an error or an interrupt where it is told to."""

    def __init__(self, version: str = "1", fails: Sequence[int] = (), interrupted_at: int | None = None) -> None:
        self.facts = PeerFacts("counting", version, takes=("max_tokens", "seed"), more={"endpoint": "http://x"})
        self.asked: list[Question] = []
        self._fails = fails
        self._interrupted_at = interrupted_at

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        for number, question in reversed(list(enumerate(questions))):  # answers come in any order
            if len(self.asked) == self._interrupted_at:
                raise KeyboardInterrupt
            self.asked.append(question)
            count = len(self.asked)
            failed = count in self._fails
            yield number, PeerError("no") if failed else Reply((count,), f"é{count}", "stop", (-0.1,), ({5: -0.1},))


def question(token: int, **params: object) -> Question:
    return Question((1, token), SamplingParams(**params))  # type: ignore[arg-type]


QUESTIONS = [question(2), question(3, seed=7), question(2), question(3, temperature=0.1 + 0.2, stop=("é",))]


def test_answers_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(), file) as first:
        found = first.ask(QUESTIONS)
        assert first.facts.name == "counting" and (first.kept, first.asked) == (0, 4)
    assert [reply.token_ids for reply in found if isinstance(reply, Reply)] == [(4,), (3,), (2,), (1,)]
    with Recorded(Counting(), file) as again:
        assert again.ask(QUESTIONS) == found and (again.kept, again.asked) == (4, 0)
        third = again.ask([question(2), question(9)])  # the third of that question, and a new one
        assert [reply.token_ids for reply in third if isinstance(reply, Reply)] == [(2,), (1,)]
    with Recorded(Counting(), file) as last:
        assert last.ask([question(2)] * 3) == [found[0], found[2], third[0]] and last.asked == 0
        assert last.ask([question(2, seed=1)]) != [found[0]] and last.asked == 1


def test_an_interrupted_run_asks_for_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(interrupted_at=2), file) as first, pytest.raises(KeyboardInterrupt):
        first.ask(QUESTIONS)
    peer = Counting()
    with Recorded(peer, file) as again:
        found = again.ask(QUESTIONS)
    assert again.kept == 2 and peer.asked == [QUESTIONS[1], QUESTIONS[0]]
    assert [reply.token_ids for reply in found if isinstance(reply, Reply)] == [(2,), (1,), (2,), (1,)]


def test_errors_are_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(fails=(2,)), file) as first:
        found = first.ask(QUESTIONS)
        assert [isinstance(reply, PeerError) for reply in found] == [False, False, True, False]
    peer = Counting()
    with Recorded(peer, file) as again:
        later = again.ask(QUESTIONS)
    assert [later[place] == found[place] for place in range(4)] == [True, True, False, True]
    assert peer.asked == [QUESTIONS[2]]


@pytest.mark.parametrize("cut", [1, 30, None])
def test_a_line_that_was_cut_is_written_again(tmp_path: Path, cut: int | None) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(), file) as first:
        found = first.ask(QUESTIONS)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = b"".join(lines[:-1]) + (lines[-1][:-1] if cut is None else lines[-1][:cut])
    file.write_bytes(kept)
    with Recorded(Counting(), file) as again:
        asked_again = again.ask(QUESTIONS)
    assert again.kept == 3 and asked_again[1:] == found[1:]
    assert len(file.read_bytes().splitlines()) == 5
    assert all(json.loads(line) for line in file.read_bytes().splitlines())


def test_a_first_line_that_was_cut_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(), file):
        pass
    file.write_bytes(file.read_bytes()[:10])
    with Recorded(Counting(), file) as again:
        assert again.kept == 0
    assert json.loads(file.read_bytes().splitlines()[0])["name"] == "counting"


def test_another_engine_or_other_options_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(), file, {"model": "m", "prompts": (1, 2)}) as first:
        first.ask(QUESTIONS)
    before = file.read_bytes()
    message = r"the transcript '.*' was begun with another configuration \(version was 1 and is now 2\).*a new file"
    with pytest.raises(ChangedOptionsError, match=message):
        Recorded(Counting("2"), file, {"model": "m", "prompts": (1, 2)})
    with pytest.raises(ChangedOptionsError, match="model was m and is now n"):
        Recorded(Counting(), file, {"model": "n", "prompts": (1, 2)})
    with pytest.raises(ChangedOptionsError, match=r"prompts was .* and is now None"):
        Recorded(Counting(), file, {"model": "m"})
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"hello\n", b"{}\n", b"[1]\n", b'{"truedraft_transcript": 2}\n', b"\n", b'{"a": 1}']
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"line 1 of '.*notes.txt' is no part of a transcript"):
        Recorded(Counting(), file)
    assert file.read_bytes() == content


ENDLESS = json.dumps({"prompt": [1], "params": {}, "occurrence": 0, "reply": Reply((float("inf"),)).as_dict()})  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [b'{"prompt": [1]}', ENDLESS.encode(), b"[" * 100_000])
def test_a_broken_line_is_named(tmp_path: Path, broken: bytes) -> None:
    file = tmp_path / "kept.jsonl"
    with Recorded(Counting(), file) as first:
        first.ask(QUESTIONS)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], broken + b"\n", *lines[2:]]))
    with pytest.raises(DataError, match="line 3 of"):
        Recorded(Counting(), file)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be used \(No such file or directory\)"):
        Recorded(Counting(), tmp_path / "nowhere" / "kept.jsonl")


def test_every_kind_of_option_is_part_of_the_question(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    asked = [
        question(2, logit_bias={5: 1.5}), question(2, bad_words=("a", (1, 2))), question(2, stop_token_ids=[3]),
        question(2, structured=Structured("choice", ("a", "b"))), question(2, structured=Structured("regex", "a")),
    ]  # fmt: skip
    with Recorded(Counting(), file) as first:
        found = first.ask(asked)
    with Recorded(Counting(), file) as again:
        assert again.ask(asked) == found and again.asked == 0
