"""Published prompt sets: HumanEval, GSM8K, MT-bench and Spec-Bench, read from their own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from truedraft.errors import DataError
from truedraft.files import object_in, text_of

_MT_BENCH_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_SUFFIXES = (".jsonl", ".jsonl.gz")

Record = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a published set; `category` is the set's name in sets without categories."""

    name: str
    text: str
    category: str


class _Format(NamedTuple):
    """A file format, recognised by its fields; `read` takes a record and its number."""

    name: str
    fields: set[str]
    read: Callable[[Record, int], Question]


def _first_turn(record: Record, _: int) -> Question:
    """Only the first turn, because later ones refer to the model's own answers."""
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f'question {record["question_id"]!r} needs "turns", a list with at least one text')
    return Question(str(record["question_id"]), str(turns[0]), str(record.get("category", "")))


_FORMATS = (
    _Format("humaneval", {"task_id", "prompt", "entry_point"},
            lambda record, _: Question(str(record["task_id"]), str(record["prompt"]), "humaneval")),
    _Format("mt_bench", {"question_id", "turns"}, _first_turn),
    _Format("gsm8k", {"question", "answer"},
            lambda record, number: Question(str(number), str(record["question"]), "gsm8k")),
)  # fmt: skip


def is_question_file(path: Path) -> bool:
    """Whether a file holds questions of a published set, by the fields of its first record."""
    if not path.name.endswith(_SUFFIXES) or not path.is_file():
        return False
    try:
        first = next(line for line in text_of(path, "question file").split("\n") if line.strip())
        return _format_of(json.loads(first)) is not None
    except (StopIteration, ValueError, RecursionError, DataError):
        return False


def read_questions(path: Path) -> tuple[str, list[Question]]:
    """A set's name and questions, from a file or a folder with one; the test part where there are several parts.

    Raises DataError, with the line, if there is none, several may be meant, or it is broken.
    """
    file = _only_file(path) if path.is_dir() else path
    questions: list[Question] = []
    form: _Format | None = None
    for number, line in enumerate(text_of(file, "question file").split("\n"), start=1):
        if not line.strip():
            continue
        record = object_in(line, f"{file.name}, line {number}", "a question")
        form = form or _format_of(record)
        if form is None or not form.fields <= record.keys():
            raise DataError(f"{file.name}, line {number}: no question of HumanEval, GSM8K, MT-bench or Spec-Bench")
        questions.append(form.read(record, len(questions) + 1))
    if form is None:
        raise DataError(f"the question file {str(file)!r} is empty; fetch it again")
    more = {question.category for question in questions} - _MT_BENCH_CATEGORIES
    return "spec_bench" if form.name == "mt_bench" and more else form.name, questions


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` items, evenly over the whole, in order, because sets are sorted by category; all if there are no more."""
    if count is None or count >= len(items):
        return list(items)
    return [items[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]


def _only_file(folder: Path) -> Path:
    try:
        found = [file for file in sorted(folder.iterdir()) if is_question_file(file)]
    except OSError as error:
        raise DataError(f"cannot read the folder {str(folder)!r}: {error.strerror or error}") from error
    tests = [file for file in found if not file.name.startswith("train")]
    found = tests or found
    if not found:
        raise DataError(
            f"the folder {str(folder)!r} holds no questions of HumanEval, GSM8K, MT-bench or Spec-Bench (.jsonl or "
            ".jsonl.gz in their published form)"
        )
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise DataError(f"the folder {str(folder)!r} holds several question files ({names}); name the file itself")
    return found[0]


def _format_of(record: Any) -> _Format | None:
    if not isinstance(record, dict):
        return None
    return next((form for form in _FORMATS if form.fields <= record.keys()), None)
