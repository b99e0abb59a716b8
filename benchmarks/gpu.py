"""What truedraft is worth on a GPU, every figure of it in one run of at most four minutes: `make bench-gpu`.

    python benchmarks/gpu.py                                  on a CUDA device
    python benchmarks/gpu.py --tiny --device cpu --out FILE   the same rows with small models, to see that they run

Each row is a line of JSON: its name, value and unit, the bar that it is held to, the conditions, and versions. A row
that fails says why and the others go on. One that is there of the same device, commit and size is not measured again,
so a run that was cut short is gone on with. `gpu_rows.py` has the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines, commit, note
from gpu_rows import FULL, GROUPS, TINY, Group, Row
from truedraft.machine import cpu_name, pick_device, versions


class OutOfTimeError(BaseException):
    """A row took too long. No `Exception`, which an engine would take for a failed step."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="rows whose names have one of these words"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="behind which no further row is begun")
    parser.add_argument("--row-s", type=float, default=60.0, help="seconds that a row may take")
    parser.add_argument("--commit", default=commit(), help="of the sources, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.jsonl")
    options = parser.parse_args(words)
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; on a CPU: --tiny --device cpu --out FILE")
    device, end = pick_device(options.device), time.monotonic() + 60.0 * options.minutes
    name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    lines = Lines(options.out, device=name, commit=options.commit, tiny=options.tiny)
    there = {record["name"] for record in lines.records if "value" in record}
    facts = _versions()
    for kind in GROUPS:
        rows = [row for row in kind.ROWS if row.name not in there and any(word in row.name for word in options.only)]
        group = kind(TINY if options.tiny else FULL, device)
        for row in rows:
            if time.monotonic() > end:
                note(f"time is up; left: {row.name}")
                continue
            record = _measured(group, row, min(options.row_s, max(end - time.monotonic(), 1.0)))
            note(f"{row.name}: {record.get('value', record.get('error'))} {row.unit}")
            lines.add({"name": row.name, "unit": row.unit, "bar": row.bar, **record, "versions": facts})
        group.close()


def _measured(group: Group, row: Row, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    try:
        with _within(seconds):
            value, conditions = row.measure(group)
    except OutOfTimeError:
        return {"error": f"it took more than {seconds:g} s"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    took = round(time.monotonic() - began, 2)
    return {"value": value, "conditions": {**group.about, **conditions}, "took_s": took}


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Break off what takes longer, once Python runs again; a timer that ran before goes on behind it."""

    def ring(*_: object) -> None:
        raise OutOfTimeError

    handler = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, every)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {**versions(), "cuda": torch.version.cuda, "triton": None}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _said(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


if __name__ == "__main__":
    main()
