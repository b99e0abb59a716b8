"""The folder of a benchmark: rows as they finish, then record, plots and report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from truedraft.bench.drafted_trees import DraftedTree
from truedraft.bench.plots import check_plotting, draw_all
from truedraft.bench.record import Circumstances
from truedraft.bench.report import markdown
from truedraft.bench.rows import Row
from truedraft.bench.summary import Summary
from truedraft.bench.tree_picture import draw_drafted
from truedraft.errors import DataError

ROWS, RECORD, REPORT = "rows.jsonl", "record.json", "report.md"


class OutputFolder:
    """Where a benchmark is written down. An earlier one's rows stay until there is a new one.

    Args:
        folder: made if it does not exist.

    Raises:
        DataError: it cannot be made or written.
        MissingExtraError: plots cannot be drawn here.
    """

    def __init__(self, folder: Path) -> None:
        check_plotting()
        self.folder = folder.expanduser()
        self._made = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        try:
            self._had_rows = (self.folder / ROWS).exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows: IO[str] = (self.folder / ROWS).open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
        self._begun = False

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        if not self._begun and not self._had_rows and not (self.folder / RECORD).exists():
            self._take_back()

    def _take_back(self) -> None:
        """Leave nothing behind where there was nothing to write, as with a drafter that does not exist."""
        with contextlib.suppress(OSError):
            (self.folder / ROWS).unlink()
            for folder in self._made:
                folder.rmdir()

    def keep(self, row: Row, about: Mapping[str, Any] | None = None) -> None:
        """Write a finished row at once, so that nothing that comes later can lose it.

        Args:
            row: to write.
            about: of the run, repeated in each row.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            if not self._begun:
                self._rows.truncate(0)
                self._begun = True
            self._rows.write(json.dumps(row.as_dict() | dict(about or {}), allow_nan=False) + "\n")
            self._rows.flush()
        except OSError as error:
            raise DataError(f"cannot write {str(self.folder / ROWS)!r}: {error.strerror or error}") from error

    def finish(
        self,
        summaries: Sequence[Summary],
        circumstances: Circumstances,
        costs: Sequence[Mapping[str, float]],
        notes: Sequence[str],
        record: Mapping[str, Any],
        trees: Sequence[DraftedTree] = (),
    ) -> Path:
        """Write record, plots and report; returns the report's path.

        Args:
            summaries: of the contestants to show.
            circumstances: of the run.
            costs: points of the target's cost curve: rows, context, seconds.
            notes: remarks, a sentence each.
            record: the JSON object.
            trees: that contestants drafted.

        Raises:
            DataError: a file cannot be written.
        """
        limit_s = None
        if circumstances.bandwidth and circumstances.weight_bytes:
            limit_s = circumstances.weight_bytes / circumstances.bandwidth
        try:
            (self.folder / RECORD).write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
            pictures = draw_all(self.folder, summaries, costs, limit_s, circumstances.line())
            report = self.folder / REPORT
            drawn = [(tree, draw_drafted(self.folder, tree, circumstances.line())) for tree in trees]
            report.write_text(markdown(summaries, circumstances, pictures, notes, drawn), encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write into {str(self.folder)!r}: {error.strerror or error}") from error
        return report
