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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, note
from deciding_cells import ROWS, Cell, Kept, all_cells, last_key, parcels
from deciding_report import markdown
from truedraft.errors import TruedraftError
from turns import Clock

OUT = RESULTS / "deciding.jsonl"
Record = Mapping[str, Any]
Begin = Callable[[Cell, Record | None], Iterator[Record | None]]
"""Visits of a cell, of the record of the cell that it needs: what is known of it after each; the first makes ready."""


def version_key(files: Iterable[Path]) -> str:
    """A hash of the sources: cells of other code are other cells."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


class _Open:
    """A cell that is being measured, the seconds that it took, and how it failed."""

    def __init__(self, cell: Cell, visits: Iterator[Record | None], clock: Clock) -> None:
        self.cell, self._visits, self._clock = cell, visits, clock
        self.took_s, self.error = 0.0, ""
        self.found: Record | None = None

    def visit(self) -> bool:
        """Whether it goes on."""
        began = self._clock()
        try:
            self.found = next(self._visits)
        except StopIteration:
            return False
        except TruedraftError as error:
            self.error = str(error)
            return False
        finally:
            self.took_s += self._clock() - began
        return True


def sit(
    kept: Kept, cells: Sequence[Cell], begin: Begin, seconds: float, clock: Clock, say: Callable[[str], None]
) -> int:
    """Measure cells in order until all are done or the time is; those of one parcel take turns.

    Args:
        kept: where cells are written.
        cells: to be measured.
        begin: makes what a cell needs.
        seconds: of the sitting.
        clock: seconds.
        say: is told a line for each cell.

    Returns:
        How many cells could not be measured.
    """
    end, failed = clock() + seconds, 0
    for parcel in parcels(cells):
        share_s = sum(cell.share_s for cell in parcel)
        if end - clock() < share_s:
            break
        running = []
        for cell in parcel:
            before = None if cell.needs is None else kept.cells.get(cell.needs.name)
            running.append(_Open(cell, begin(cell, before), clock))
            if cell.needs is not None and before is None:
                running[-1].error = f"for {cell.needs.name} is not there"
        left = [each for each in running if not each.error and each.visit()]
        over = clock() + share_s
        while left and clock() < over:
            left = [each for each in left if each.visit()]
        for each in running:
            if each.error:
                say(f"{each.cell.name}: skipped, {each.error}")
                failed += 1
            elif each.found is not None:
                _keep(kept, each)
                say(f"{len(kept.cells)} done: {each.cell.name}: {shown(each.found)}, {each.took_s:.0f} s")
    if unmeasured := sum(cell.name not in kept.cells for cell in cells) - failed:
        say(f"the time is over; {unmeasured} cells are left for the next sitting")
    return failed


def _keep(kept: Kept, done: _Open) -> None:
    cell, times = done.cell, {"share_s": done.cell.share_s, "took_s": round(done.took_s, 2)}
    place = {"cell": cell.name, "row": cell.row, "size": cell.size, "set": cell.set, "batch": cell.batch}
    kept.add(place | dict(done.found or {}) | times | {"sitting": len(kept.sittings)})


def shown(found: Record) -> str:
    if "speedups" in found:
        return f"best {found['best']} of {len(found['speedups'])}, {max(found['speedups'].values()):.3f}"
    half = "" if found["half_width"] is None else f" +- {found['half_width']:.3f}"
    return f"{found['ratio']:.3f}{half} ({found['status']})"


def main() -> int:
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
    failed = 0 if asked.report else _measured(kept, asked)
    print(markdown(kept))
    return 1 if failed else 0


def _measured(kept: Kept, asked: argparse.Namespace) -> int:
    import torch

    from deciding_rows import Lab, begin
    from truedraft.machine import machine_facts

    cells = kept.left(all_cells(), asked.only)
    if not cells:
        note("nothing is left to measure")
        return 0
    torch.set_num_threads(asked.threads)
    kept.add({"what": "sitting", "machine": machine_facts(), "threads": asked.threads, "dtype": "bfloat16"})
    return sit(kept, cells, functools.partial(begin, Lab()), asked.minutes * 60.0, time.monotonic, note)


if __name__ == "__main__":
    sys.exit(main())
