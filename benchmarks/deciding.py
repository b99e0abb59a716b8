"""What the default decides and what it brings: `make bench-deciding`, two sittings of 80 minutes on two cores.

    python benchmarks/deciding.py [--minutes 80] [--only "a | 110M"] [--key NAME]
    python benchmarks/deciding.py --report

Every cell of the table is a line of JSON, written as soon as it is done; a rerun goes on behind what is there for the
same version. Systems answer the same requests in turns, so a slow moment of the machine meets all of them. Exit status
0 if nothing failed, 1 if a cell could not be measured.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from deciding_cells import ROWS, Cell, Kept, SkippedError, all_cells, last_key, most_s, parcels
from deciding_report import markdown
from truedraft.bench.turns import Clock
from truedraft.errors import TruedraftError

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).with_name("results") / "deciding.jsonl"


class Running(Protocol):
    """A cell that is being measured.

    Attributes:
        next_s: seconds that its next visit will take.
    """

    @property
    def next_s(self) -> float: ...

    def visit(self, most_s: float, left_s: float) -> Mapping[str, Any] | None:
        """Measure a bit more; what came of it, where that was the end.

        Args:
            most_s: seconds of all visits together.
            left_s: seconds of the sitting.
        """


Begin = Callable[[Cell, Mapping[str, Any] | None], Running]


def version_key(files: Iterable[Path]) -> str:
    """A hash of the sources: cells of other code are other cells."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


class Sitting:
    """Measures cells until they are done or the time is.

    Cells of one parcel are visited in turns. Where a visit would not end in time the sitting is over; what was not
    finished is measured anew in the next one.

    Args:
        kept: where cells are written.
        begin: makes what a cell needs, given the record of the cell that it builds upon.
        seconds: of the sitting.
        clock: seconds.
        say: is told a line for each cell.
    """

    def __init__(self, kept: Kept, begin: Begin, seconds: float, clock: Clock, say: Callable[[str], None]) -> None:
        self._kept, self._begin, self._clock, self._say = kept, begin, clock, say
        self._end = clock() + seconds
        self._took: dict[Cell, float] = defaultdict(float)
        self.skipped = 0

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure cells, in order."""
        for parcel in parcels(cells):
            if self._left() < parcel[0].share_s:
                break
            self._visit({cell: running for cell in parcel if (running := self._begun(cell)) is not None})
        unmeasured = sum(cell.name not in self._kept.cells for cell in cells) - self.skipped
        if unmeasured:
            self._say(f"the time is over; {unmeasured} cells are left for the next sitting")

    def _left(self) -> float:
        return self._end - self._clock()

    def _begun(self, cell: Cell) -> Running | None:
        before = None if cell.needs is None else self._kept.cells.get(cell.needs.name)
        if cell.needs is not None and before is None:
            self._skip(cell, f"for {cell.needs.name} is not there")
            return None
        began = self._clock()
        try:
            return self._begin(cell, before)
        except (SkippedError, TruedraftError) as error:
            self._skip(cell, str(error))
            return None
        finally:
            self._took[cell] += self._clock() - began

    def _skip(self, cell: Cell, why: str) -> None:
        self._say(f"{cell.name}: skipped, {why}")
        self.skipped += 1

    def _visit(self, running: dict[Cell, Running]) -> None:
        """Visit the cells of a parcel in turns until all are done, or the time is."""
        while running:
            for cell, own in list(running.items()):
                if self._left() < own.next_s:
                    return
                began = self._clock()
                try:
                    found = own.visit(most_s(cell, self._kept.cells.values()), self._left())
                except (SkippedError, TruedraftError) as error:
                    self._skip(cell, str(error))
                    del running[cell]
                    continue
                finally:
                    self._took[cell] += self._clock() - began
                if found is not None:
                    del running[cell]
                    self._keep(cell, found)

    def _keep(self, cell: Cell, found: Mapping[str, Any]) -> None:
        place = {"cell": cell.name, "row": cell.row, "size": cell.size, "set": cell.set, "batch": cell.batch}
        took_s, sitting = round(self._took[cell], 2), len(self._kept.sittings)
        times = {"share_s": cell.share_s, "took_s": took_s, "sitting": sitting}
        self._kept.add(place | dict(found) | times)
        self._say(f"{len(self._kept.cells)} done: {cell.name}: {shown(found)}, {took_s:.0f} s")


def shown(found: Mapping[str, Any]) -> str:
    """What came of a cell, in a few words."""
    if "ratio" in found:
        half = "" if found["half_width"] is None else f" +- {found['half_width']:.3f}"
        return f"{found['ratio']:.3f}{half} ({found['status']})"
    if "share" in found:
        return f"{100 * found['share']:.2f} % of the time, {1e6 * found['per_step_s']:.0f} us a step"
    return f"best {found['best']} of {len(found['speedups'])}, {max(found['speedups'].values()):.3f}"


def main() -> int:
    """Sit and measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80.0, help="of this sitting")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cells whose name holds one of these")
    parser.add_argument("--key", help="name of the version, in place of a hash of its sources")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing; print the tables of what is there")
    parser.add_argument("--list", action="store_true", help="print the cells and what they measure")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join([*(f"{row}: {words}" for row, words in ROWS.items()), *(cell.name for cell in all_cells())]))
        return 0
    key = asked.key or (asked.report and last_key(asked.out)) or version_key((ROOT / "src").rglob("*.py"))
    kept = Kept(asked.out, key)
    skipped = 0 if asked.report else _sitting(kept, asked)
    print(markdown(kept))
    return 1 if skipped else 0


def _sitting(kept: Kept, asked: argparse.Namespace) -> int:
    import torch

    from deciding_rows import Lab, begin
    from truedraft.machine import machine_facts

    cells = kept.left(all_cells(), asked.only)
    if not cells:
        print("nothing is left to measure", file=sys.stderr)
        return 0
    torch.set_num_threads(asked.threads)
    kept.add({"what": "sitting", "machine": machine_facts(), "threads": asked.threads, "dtype": "bfloat16"})
    sitting = Sitting(
        kept,
        functools.partial(begin, Lab()),
        asked.minutes * 60.0,
        time.monotonic,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    sitting.measure(cells)
    return sitting.skipped


if __name__ == "__main__":
    sys.exit(main())
