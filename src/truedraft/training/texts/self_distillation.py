"""Self-distillation data: a target's answers, with the vector from which each token was drawn.

`NAME.jsonl` holds one JSON object a line: {"prompt": [...], "answer": [...], "temperature": t, "stopped": b};
`NAME.hidden` the vectors that entered the LM head as bfloat16, one for each token, in the order of the lines;
`NAME.json` the target and the configuration.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.errors import DataError
from truedraft.measure import Trace
from truedraft.training.loop import Identity, refuse_another_run
from truedraft.training.workspace import write_whole, writing

_BEGINNING = 48  # tokens
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """One answer of the target, in token ids; with `stopped` the last one is the token that ended it."""

    prompt: list[int]
    answer: list[int]
    temperature: float
    stopped: bool


@dataclass(frozen=True)
class SelfDistillationData:
    """Answers of a target and their vectors.

    `bits`, uint16 `[tokens, width]`, are bfloat16 vectors, mapped from disk; row i gave token i of all answers.
    """

    records: list[WrittenAnswer]
    bits: NDArray[np.uint16]

    @cached_property
    def starts(self) -> list[int]:
        """The row of each answer's first token, then the number of rows."""
        return list(itertools.accumulate((len(record.answer) for record in self.records), initial=0))

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens of all answers, concatenated: `[tokens]`."""
        return np.array([id_ for record in self.records for id_ in record.answer], dtype=np.int64)

    @property
    def width(self) -> int:
        return int(self.bits.shape[1])

    def hidden(self, rows: slice | NDArray[np.int64]) -> Tensor:
        """Some of the vectors: bfloat16 `[rows, width]`, on the CPU."""
        return torch.from_numpy(np.array(self.bits[rows]).view(np.int16)).view(torch.bfloat16)

    def beginnings(self, tokens: int) -> SelfDistillationData:
        """The beginnings of answers, about `tokens` in all, more informative than a few whole ones.

        They are taken in pairs, one for each kind of trees, and each has at least its first `_BEGINNING` tokens.
        """
        if tokens >= len(self.tokens):
            return self
        count = min(len(self.records), max(2, tokens // _BEGINNING // 2 * 2))
        length = max(tokens // max(count, 1), _BEGINNING)
        records = [
            replace(each, answer=each.answer[:length], stopped=each.stopped and len(each.answer) <= length)
            for each in self.records[:count]
        ]
        rows = [np.arange(start, start + len(each.answer)) for start, each in zip(self.starts, records, strict=False)]
        return SelfDistillationData(records, self.bits[np.concatenate([np.zeros(0, np.int64), *rows])])

    def traces(self, temperature: float) -> list[Trace]:
        return [
            Trace(torch.tensor(record.answer), self.hidden(slice(first, end)), record.stopped)
            for record, (first, end) in zip(self.records, itertools.pairwise(self.starts), strict=True)
            if record.temperature == temperature and record.answer
        ]


class AnswerFiles:
    """The files of a `SelfDistillationData` while it is being written; a kill leaves only whole answers.

    `identity` is what decides the answers; `covered` counts those with vectors, not all if `NAME.hidden` was lost.
    Raises OptionError for files of another identity, DataError for an invalid line, TrainingError if writing fails.
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
            self.records = self._whole_lines() if self._lines.is_file() else []
            self.covered = self._whole_vectors()

    def append(self, record: WrittenAnswer, hidden: Tensor) -> None:
        """Add an answer and its vectors `[tokens, width]`; TrainingError if that fails, with earlier ones whole."""
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

    def read(self) -> SelfDistillationData:
        shape = (sum(len(record.answer) for record in self.records), self._width)
        empty = np.zeros(shape, dtype=np.uint16)
        return SelfDistillationData(
            self.records, np.memmap(self._bits, np.uint16, "r", shape=shape) if empty.size else empty
        )

    def _whole_lines(self) -> list[WrittenAnswer]:
        content = self._lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._lines, len(whole))
        found = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                found.append(WrittenAnswer(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{self._lines}, line {number}: not an answer with prompt, answer, temperature and stopped; remove "
                    "the file to let the target write again"
                ) from error
        return found

    def _whole_vectors(self) -> int:
        """The number of answers with all of their vectors; the rest of the file is cut off."""
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


def read_answers(folder: Path, name: str, width: int) -> SelfDistillationData:
    """Read complete files, which are not written any more; arguments as in `AnswerFiles`."""
    return AnswerFiles(folder, name, width, _json_object(folder / f"{name}.json")).read()


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is no JSON; remove it and its neighbours to let the target write again") from error
    return found


@dataclass(frozen=True)
class CollatedBatch:
    """Concatenated windows: all of their positions, and those that heads reach from them."""

    hidden: Tensor  # `[rows, width]`
    tokens: Tensor  # `[rows]`, int64: the token that was drawn from each
    places: Tensor  # `[positions]`, int64, ascending: the rows at which heads guess, each followed by those they reach
    rows: NDArray[np.int64]  # `[rows]`: the rows of the text


@dataclass(frozen=True)
class WindowSampler:
    """Windows of up to `length` positions, in a new random order in each epoch: a pure function of an index.

    Neighbouring positions share the distributions of their targets, so a window costs less than scattered positions.
    `reach` is the number of tokens after the next that are guessed. DataError if no answer is longer.
    """

    text: SelfDistillationData
    reach: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if not len(self.windows):
            longest = max((len(record.answer) for record in self.text.records), default=0)
            raise DataError(
                f"the longest answer of the target has {longest} tokens, and heads that reach {self.reach} tokens "
                f"ahead learn from answers of at least {self.reach + 1}: let it write longer answers, or let them "
                "reach less far"
            )

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """Each window's first row and number of positions: `[windows, 2]`."""
        found = [
            (row, min(self.length, end - self.reach - row))
            for first, end in itertools.pairwise(self.text.starts)
            for row in range(first, end - self.reach, self.length)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @property
    def positions(self) -> int:
        return int(self.windows[:, 1].sum())

    @property
    def sequence_length(self) -> int:
        return round(self.positions / len(self.windows))

    def batch(self, first: int, count: int) -> Tensor:
        """Windows `first` to `first + count - 1` of the run: int64 `[count, 2]`."""
        epochs = sorted({index // len(self.windows) for index in (first, first + count - 1)})
        order = np.concatenate([self._order(epoch) for epoch in range(epochs[0], epochs[-1] + 1)])
        start = first - epochs[0] * len(self.windows)
        return torch.from_numpy(self.windows[order[start : start + count]])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))


def collate(text: SelfDistillationData, windows: Tensor, reach: int) -> CollatedBatch:
    """The rows of some windows `[count, 2]`, on the device of `windows`."""
    rows, places, end = [], [], 0
    for first, count in windows.tolist():
        rows.append(np.arange(first, first + count + reach))
        places.append(np.arange(end, end + count))
        end += count + reach
    chosen = np.concatenate(rows)
    return CollatedBatch(
        text.hidden(chosen).to(windows.device),
        torch.from_numpy(text.tokens[chosen]).to(windows.device),
        torch.from_numpy(np.concatenate(places)).to(windows.device),
        chosen,
    )


def text_tokens(batch: CollatedBatch, reach: int) -> Tensor:
    """The text's tokens that heads read at the places of a batch, `[positions, reach]`: teacher forcing."""
    return batch.tokens[batch.places[:, None] + torch.arange(reach, device=batch.places.device)]
