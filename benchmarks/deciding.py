"""What the default decides and what it brings: `make bench-deciding`, two sittings of 80 minutes on two cores.

    python benchmarks/deciding.py [--minutes 80] [--only "a | 110M"] [--key NAME]
    python benchmarks/deciding.py --report [--plots FOLDER]

Every cell of the table is a line of JSON, written as soon as it is done; a rerun goes on behind what is there for the
same version. Systems answer the same requests in turns, so a slow moment of the machine meets all of them. Exit status
0 if nothing failed, 1 if a cell could not be measured.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deciding_cells import ROWS, Cell, Kept, all_cells, last_key, most_s
from deciding_turns import Clock

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).with_name("results") / "deciding.jsonl"
Measure = Callable[[Cell, float, Mapping[str, Any] | None], Mapping[str, Any]]


class SkippedError(Exception):
    """A cell cannot be measured with this version; says why."""


def version_key(files: Iterable[Path]) -> str:
    """A hash of the sources: cells of other code are other cells."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


def sit(
    cells: Sequence[Cell], kept: Kept, measure: Measure, seconds: float, clock: Clock, say: Callable[[str], None]
) -> int:
    """Measure cells until they are done or the time is; returns how many could not be measured.

    A cell is begun only if its share of time is left, so a sitting ends between cells and none is cut short.

    Args:
        cells: in order.
        kept: where they are written.
        measure: one of them, in so many seconds at most, given the record of the cell that it needs.
        seconds: of the sitting.
        clock: seconds.
        say: is told a line for each cell.
    """
    end, skipped = clock() + seconds, 0
    for number, cell in enumerate(cells, start=1):
        if end - clock() < cell.share_s:
            say(f"the time is over; {len(cells) - number + 1} cells are left for the next sitting")
            break
        before = None if cell.needs is None else kept.cells.get(cell.needs.name)
        if cell.needs is not None and before is None:
            say(f"{number} of {len(cells)}: {cell.name}: skipped, for {cell.needs.name} was")
            skipped += 1
            continue
        began = clock()
        try:
            found = measure(cell, min(most_s(cell, kept.cells.values()), end - clock()), before)
        except SkippedError as error:
            say(f"{number} of {len(cells)}: {cell.name}: skipped, {error}")
            skipped += 1
            continue
        place = {"cell": cell.name, "row": cell.row, "size": cell.size, "set": cell.set, "batch": cell.batch}
        times = {"share_s": cell.share_s, "took_s": round(clock() - began, 2), "sitting": len(kept.sittings)}
        kept.add(place | {"temperature": cell.temperature} | dict(found) | times)
        say(f"{number} of {len(cells)}: {cell.name}: {shown(found)}, {times['took_s']:.0f} s")
    return skipped


def shown(found: Mapping[str, Any]) -> str:
    """What came of a cell, in a few words."""
    if "ratio" in found:
        half = "" if found["half_width"] is None else f" +- {found['half_width']:.3f}"
        return f"{found['ratio']:.3f}{half} ({found['status']})"
    if "share" in found:
        return f"{100 * found['share']:.2f} % of the time, {1e6 * found['per_step_s']:.0f} us a step"
    if "speedups" in found:
        return f"best {found['best']} of {len(found['speedups'])}, {max(found['speedups'].values()):.3f}"
    return ", ".join(f"{name} {phase['median']:.3f}" for name, phase in found["phases"].items())


def main() -> int:
    """Sit and measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80.0, help="of this sitting")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cells whose name holds one of these")
    parser.add_argument("--key", help="name of the version, in place of a hash of its sources")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing; print the tables of what is there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the heat maps into it")
    parser.add_argument("--list", action="store_true", help="print the cells and what they measure")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join([*(f"{row}: {words}" for row, words in ROWS.items()), *(cell.name for cell in all_cells())]))
        return 0
    key = asked.key or (asked.report and last_key(asked.out)) or version_key((ROOT / "src").rglob("*.py"))
    kept = Kept(asked.out, key)
    skipped = 0 if asked.report else _sitting(kept, asked)
    _report(kept, asked.plots)
    return 1 if skipped else 0


def _sitting(kept: Kept, asked: argparse.Namespace) -> int:
    import torch
    from deciding_rows import MEASURES, Lab, UnavailableError

    from truedraft.errors import TruedraftError
    from truedraft.machine import machine_facts

    cells = kept.left(all_cells(), asked.only)
    if not cells:
        print("nothing is left to measure", file=sys.stderr)
        return 0
    torch.set_num_threads(asked.threads)
    kept.add({"what": "sitting", "machine": machine_facts(), "threads": asked.threads, "dtype": "bfloat16"})
    lab = Lab()

    def measure(cell: Cell, most: float, before: Mapping[str, Any] | None) -> Mapping[str, Any]:
        try:
            lab.target(cell.size)  # before the cell's seconds begin
            return MEASURES[cell.row](lab, cell, most, before)
        except (UnavailableError, TruedraftError) as error:
            raise SkippedError(str(error)) from error

    return sit(
        cells,
        kept,
        measure,
        asked.minutes * 60.0,
        time.monotonic,
        lambda line: print(line, file=sys.stderr, flush=True),
    )


def _report(kept: Kept, plots: Path | None) -> None:
    from deciding_report import draw, markdown

    print(markdown(kept))
    if plots is not None:
        for file in draw(kept, plots):
            print(f"drawn: {file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
