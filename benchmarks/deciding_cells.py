"""The cells of `make bench-deciding`: how long each may take, the file that keeps what is done, the prompt sets.

| set | prompts | drawn |
|---|---|---|
| code | the held-out prompts that ship with the embedded models | greedy |
| repeat | the same texts, each followed by its own first lines, so that an answer can copy | greedy |
| prose | openings of old novels and a speech, far from the source code that the models were trained on | greedy |
| random | random token ids | greedy |
| hot | the held-out prompts again | temperature 1.5, with fresh seeds, as where nobody gives any |
| mix | one request of each of the five in turn, so that the domain changes every 64 tokens | as they are |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common import Lines
from truedraft import SamplingParams

PROSE = Path(__file__).with_name("deciding_prose.txt")
DOMAINS = ("code", "repeat", "prose", "random", "hot")
MIX = "mix"
SETS = (*DOMAINS, MIX)
NEW_TOKENS = 64  # of each answer; what `mix` calls a domain lasts as long
REQUESTS = 32  # of each set
_PROMPT_TOKENS = 64  # of prose and random
_REPEATED_CHARACTERS = 80  # at least, in whole lines
_HOT = 1.5

Encode = Callable[[str], Sequence[int]]
SIZES = ("own", "110M", "500M")
BATCHES = (1, 4, 16)
ROWS = {
    "sweep": "fixed configurations against plain decoding, one pass: what row b and the bars choose from",
    "a": "the default against plain decoding",
    "b": "the default against the best fixed configuration of the sweep, measured again",
    "c": "the default controller against the heuristic that adds 2 and takes 1, both with the draft",
}
"""What each row measures."""

# Seconds of a cell by row, at own size, 110M and 500M; what a cell leaves goes to others of its parcel.
_SHARES: Mapping[str, tuple[float, float, float]] = {
    "sweep": (8.0, 22.0, 65.0),
    "a": (15.0, 40.0, 90.0),
    "b": (15.0, 40.0, 100.0),
    "c": (15.0, 40.0, 90.0),
}


@dataclass(frozen=True, slots=True)
class Cell:
    row: str
    size: str
    set: str
    batch: int

    @property
    def name(self) -> str:
        return " | ".join([self.row, self.size, self.set, f"batch {self.batch}"])

    @property
    def needs(self) -> Cell | None:
        """The cell whose result this one starts from."""
        return Cell("sweep", self.size, self.set, self.batch) if self.row == "b" else None

    @property
    def share_s(self) -> float:
        return _SHARES[self.row][SIZES.index(self.size)]


def all_cells() -> list[Cell]:
    """The whole table, by size, for a model is loaded once; no cell before the one that it needs."""
    rows = [*((row, batch) for batch in BATCHES for row in ("sweep", "a")), ("b", 1), ("c", 1)]
    return [Cell(row, size, name, batch) for size in SIZES for row, batch in rows for name in SETS]


def parcels(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Neighbours of one row, size and batch: they are open together and take turns, a round each."""
    return [list(own) for _, own in groupby(cells, key=lambda cell: (cell.row, cell.size, cell.batch))]


class Kept(Lines):
    """The file of results: a line of JSON for each cell, and one for each sitting, which says where it was measured."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path, key=key)
        self.key = key

    @property
    def sittings(self) -> list[Mapping[str, Any]]:
        return [record for record in self.records if "cell" not in record]

    def left(self, cells: Sequence[Cell], only: Sequence[str] = ()) -> list[Cell]:
        """What is not done, and what that needs, in the order of the table."""
        wanted: list[Cell] = []
        for cell in cells:
            if not only or any(word in cell.name for word in only):
                wanted += [cell] if cell.needs is None else [cell.needs, cell]
        done = self.cells
        return [cell for cell in cells if cell in wanted and cell.name not in done]


def last_key(path: Path) -> str | None:
    return next((str(record["key"]) for record in reversed(Lines(path).records) if "key" in record), None)


@dataclass(frozen=True, slots=True)
class SetRequest:
    domain: str
    prompt: tuple[int, ...]
    params: SamplingParams


def prompt_sets(heldout: Sequence[str], prose: str, encode: Encode, vocab_size: int) -> dict[str, list[SetRequest]]:
    """The six sets by name, of `REQUESTS` requests each; those of `mix` are of the others in turn."""
    texts = [heldout[number % len(heldout)] for number in range(REQUESTS)]
    code = [tuple(encode(text)) for text in texts]
    prompts = {
        "code": code,
        "repeat": [tuple(encode(repeated(text))) for text in texts],
        "prose": _windows(encode(prose)),
        "random": [_random_ids(number, vocab_size) for number in range(REQUESTS)],
        "hot": code,
    }
    sets = {}
    for domain in DOMAINS:
        params = SamplingParams(NEW_TOKENS, temperature=_HOT if domain == "hot" else 0.0, ignore_eos=True)
        sets[domain] = [SetRequest(domain, prompt, params) for prompt in prompts[domain]]
    mixed = [sets[DOMAINS[number % len(DOMAINS)]][number // len(DOMAINS)] for number in range(REQUESTS)]
    return sets | {MIX: mixed}


def repeated(text: str) -> str:
    """A text followed by its own first lines.

    Worked example: "a\\nb\\nc\\n" with lines long enough becomes "a\\nb\\nc\\n" + "\\n" + "a\\n".
    """
    first = ""
    for line in text.splitlines(keepends=True):
        first += line
        if len(first) >= _REPEATED_CHARACTERS:
            break
    return text.rstrip("\n") + "\n\n" + first


def _windows(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Prompts of equal length, evenly over a text; they overlap where it is short."""
    starts = [number * (len(ids) - _PROMPT_TOKENS) // (REQUESTS - 1) for number in range(REQUESTS)]
    return [tuple(ids[start : start + _PROMPT_TOKENS]) for start in starts]


def _random_ids(number: int, vocab_size: int) -> tuple[int, ...]:
    draw = random.Random(f"random prompt {number}")
    return tuple(draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS))


def groups_of(name: str, asked: Sequence[SetRequest], batch: int, *, few: bool = False) -> list[list[SetRequest]]:
    """What is answered together in one round: groups of `batch` requests, in the order of the set.

    At batch 1 eight of them (of `mix` ten, two of each domain), at 4 four (five), at more two.

    Args:
        name: of the set.
        asked: its requests.
        batch: requests of a group.
        few: five, three (five) and one, for models that need seconds for an answer.
    """
    if name == MIX:
        most = {1: 5 if few else 10, 4: 5}
    else:
        most = {1: 5, 4: 3} if few else {1: 8, 4: 4}
    found = [list(asked[first : first + batch]) for first in range(0, len(asked) - batch + 1, batch)]
    return found[: most.get(batch, 1 if few else 2)]
