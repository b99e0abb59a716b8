"""What a target wrote, with the vector from which each token was drawn: kept on disk, appended answer by answer.

`NAME.jsonl` holds one JSON object a line: {"prompt": [...], "answer": [...], "temperature": t, "stopped": b}.
`NAME.hidden` holds the vectors that entered the LM head as bfloat16, one for each token of each answer, in the order of
the lines. `NAME.json` says what it was written by and from.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.errors import DataError
from truedraft.planning import Trace
from truedraft.training.disk import write_whole, writing
from truedraft.training.identity import refuse_another_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from truedraft.training.identity import Identity

_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Written:
    """One answer of the target.

    Attributes:
        prompt: token ids.
        answer: token ids; where the target ended it, the id that did is the last.
        temperature: at which it was drawn; 0 is greedy.
        stopped: whether the last token ended the answer.
    """

    prompt: list[int]
    answer: list[int]
    temperature: float
    stopped: bool


@dataclass(frozen=True)
class SelfText:
    """Answers of a target and their vectors.

    Attributes:
        records: the answers.
        bits: uint16 `[tokens, width]`: the vectors as the bits of bfloat16, mapped from disk; row i is the vector from
            which token i of all answers, one behind another, was drawn.
    """

    records: list[Written]
    bits: NDArray[np.uint16]

    @cached_property
    def starts(self) -> list[int]:
        """For each answer the row of its first token, then the number of rows."""
        return list(itertools.accumulate((len(record.answer) for record in self.records), initial=0))

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens of all answers, one behind another: `[tokens]`."""
        return np.array([id_ for record in self.records for id_ in record.answer], dtype=np.int64)

    @property
    def width(self) -> int:
        """Entries of a vector."""
        return int(self.bits.shape[1])

    def hidden(self, rows: slice | NDArray[np.int64]) -> Tensor:
        """Some of the vectors: bfloat16 `[rows, width]`, on the CPU."""
        return torch.from_numpy(np.array(self.bits[rows]).view(np.int16)).view(torch.bfloat16)

    def first(self, tokens: int) -> SelfText:
        """The first answers, of so many tokens where there are as many; in pairs, one for each kind of trees."""
        count = sum(start < tokens for start in self.starts[:-1])
        count = min(len(self.records), max(2, count + count % 2))
        return SelfText(self.records[:count], self.bits[: self.starts[count]])

    def traces(self, temperature: float) -> list[Trace]:
        """The answers drawn at one temperature, as traces."""
        return [
            Trace(torch.tensor(record.answer), self.hidden(slice(first, end)), record.stopped)
            for record, (first, end) in zip(self.records, itertools.pairwise(self.starts), strict=True)
            if record.temperature == temperature and record.answer
        ]


class SelfTextFiles:
    """The files of a `SelfText` while it is being written.

    A kill leaves whole answers behind: a vector is written before its line, and what has no whole line is cut off when
    the files are opened again.

    Args:
        folder: where they lie.
        name: of the files.
        width: entries of a vector.
        identity: what the answers are decided by: target, prompts, temperatures, seed.

    Attributes:
        records: the answers so far.
        covered: how many of them have their vectors; fewer than there are where `NAME.hidden` was lost.

    Raises:
        OptionError: the files were begun otherwise; says in what.
        DataError: a line is not one of ours.
        TrainingError: they cannot be written.
    """

    def __init__(self, folder: Path, name: str, width: int, identity: Identity) -> None:
        self._lines = folder / f"{name}.jsonl"
        self._bits = folder / f"{name}.hidden"
        self._width = width
        about = folder / f"{name}.json"
        if about.is_file():
            refuse_another_run(_json_object(about), identity, step=0, folder=folder)
        with writing(about):
            folder.mkdir(parents=True, exist_ok=True)
            if not about.is_file():
                write_whole(about, json.dumps(dict(identity), indent=1) + "\n")
            self.records = self._whole_lines()
            self.covered = self._whole_vectors()

    def append(self, record: Written, hidden: Tensor) -> None:
        """Add an answer and its vectors `[tokens, width]`.

        Raises:
            TrainingError: the disk is full, for instance; what was added before stays whole.
        """
        self.append_vectors(hidden)
        with writing(self._lines), self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self.records.append(record)

    def append_vectors(self, hidden: Tensor) -> None:
        """Add the vectors `[tokens, width]` of the first answer that has none."""
        bits = hidden.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy()
        with writing(self._bits), self._bits.open("ab") as file:
            file.write(bits.tobytes())
        self.covered += 1

    def read(self) -> SelfText:
        """All of it."""
        rows = sum(len(record.answer) for record in self.records)
        shape = (rows, self._width)
        empty = np.zeros(shape, dtype=np.uint16)
        return SelfText(self.records, np.memmap(self._bits, np.uint16, "r", shape=shape) if rows else empty)

    def _whole_lines(self) -> list[Written]:
        """The answers in whole lines; a torn last line is cut off."""
        if not self._lines.is_file():
            return []
        content = self._lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._lines, len(whole))
        return list(_parsed(whole, self._lines))

    def _whole_vectors(self) -> int:
        """How many answers have all of their vectors; what lies behind those is cut off."""
        size = self._bits.stat().st_size if self._bits.is_file() else 0
        covered, end = 0, 0
        for record in self.records:
            more = end + len(record.answer) * self._width * _BYTES
            if more > size:
                break
            covered, end = covered + 1, more
        if size > end:
            os.truncate(self._bits, end)
        return covered


def _parsed(content: bytes, path: Path) -> Iterator[Written]:
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            yield Written(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: not an answer with prompt, answer, temperature and stopped; remove the file "
                "to let the target write again"
            ) from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is no JSON; remove it and its neighbours to let the target write again") from error
    return found
