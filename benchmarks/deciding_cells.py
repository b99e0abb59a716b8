"""The cells of `make bench-deciding`, how long each may take, and the file that keeps what is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common import Lines
from deciding_sets import SETS

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
    return [cell for size in SIZES for cell in _of_size(size)]


def _of_size(size: str) -> list[Cell]:
    cells = [Cell(row, size, name, batch) for batch in BATCHES for row in ("sweep", "a") for name in SETS]
    cells += [Cell(row, size, name, 1) for row in ("b", "c") for name in SETS]
    return cells


def parcels(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Neighbours of one row, size and batch: they are open together and take turns, a round each."""
    return [list(own) for _, own in groupby(cells, key=lambda cell: (cell.row, cell.size, cell.batch))]


class Kept(Lines):
    """The file of results: a line of JSON for each cell, and one for each sitting, which says where it was measured."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path, key=key)
        self.key = key

    @property
    def cells(self) -> dict[str, Mapping[str, Any]]:
        return {record["cell"]: record for record in self.records if "cell" in record}

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
