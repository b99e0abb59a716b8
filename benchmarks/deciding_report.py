"""What `make bench-deciding` found: tables as Markdown, each bar with whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from deciding_sets import MIX, SETS

Record = Mapping[str, Any]
SIZES = ("own", "110M", "500M")
BATCHES = (1, 4, 16)
DEFAULT, DRAFTED, HEURISTIC = "default", "default with the draft", "heuristic with the draft"
RATIOS = {
    "default": "the default against plain decoding",
    "best": "the default against the best of the fixed drafts and plain decoding, by the same turns",
    "heuristic": "the default controller against the heuristic, both with the draft, one request at a time",
}


class Bar(NamedTuple):
    """What must hold in some cells: a figure of each, and the least that it may be."""

    words: str
    of: Callable[[Record], float | None]  # None where a cell has none
    least: float
    pooled: bool = False  # the geometric mean of the figures, in place of each


BARS = (
    Bar("default: no estimate below", lambda cell: cell["default"]["ratio"], 0.97),
    Bar("default: none significantly below", lambda cell: cell["default"]["high"], 0.98),
    Bar("default: mean where no fixed draft gains",
        lambda cell: cell["default"]["ratio"] if max(cell["speedups"].values()) <= 1.0 else None, 0.99, pooled=True),
    Bar("best: one request at a time",
        lambda cell: cell["best"]["ratio"] if cell["batch"] == 1 else None, 0.95),
    Bar(f"heuristic: on {MIX}",
        lambda cell: cell["heuristic"]["ratio"] if "heuristic" in cell and cell["set"] == MIX else None, 1.05),
    Bar("heuristic: never below", lambda cell: cell["heuristic"]["ratio"] if "heuristic" in cell else None, 0.98),
    Bar("share of greedy answers that are identical",
        lambda cell: 1.0 - cell["different"] / cell["compared"] if cell["compared"] else None, 1.0),
)  # fmt: skip


def cell_name(size: str, batch: int, name: str) -> str:
    return f"{size} | {name} | batch {batch}"


def markdown(records: Sequence[Record]) -> str:
    cells = {record["cell"]: record for record in records if "cell" in record}
    sittings = [record for record in records if "cell" not in record]
    said = [f"{each['machine']['cpu']}, {each['threads']} threads, {each['dtype']}" for each in sittings]
    whole = len(SIZES) * len(BATCHES) * len(SETS)
    parts = [
        f"{len(cells)} of {whole} cells measured in {len(said)} sittings on: {'; '.join(dict.fromkeys(said))}. Ratios "
        "of tokens per second, prompts included; a first round warmed up and is dropped.",
        _table(["bar", "least", "", "found"], [_judged(bar, list(cells.values()), whole) for bar in BARS]),
    ]
    for ratio, words in RATIOS.items():
        lines = list(_rows(ratio, cells))
        if lines:
            head = [f"{size}, batch {batch}" for size in SIZES for batch in BATCHES]
            parts.append(f"**{ratio}: {words}**\n\n{_table(['set', *head], lines)}")
    return "\n\n".join(parts)


def _judged(bar: Bar, cells: Sequence[Record], whole: int) -> list[str]:
    """Open where nothing was measured, or only a part and nothing against it yet."""
    figures = {cell["cell"]: figure for cell in cells if (figure := bar.of(cell)) is not None}
    if not figures:
        return [bar.words, str(bar.least), "open", "not measured"]
    worst = min(figures, key=figures.__getitem__)
    value, place = (geometric_mean(figures.values()), "mean") if bar.pooled else (figures[worst], worst)
    verdict = "**fails**" if value < bar.least else "holds" if len(cells) == whole else "open"
    return [bar.words, str(bar.least), verdict, f"{value:.3f}, {place.replace(' | ', ', ')}, of {len(figures)} cells"]


def _rows(ratio: str, cells: Mapping[str, Record]) -> Iterator[list[str]]:
    for name in SETS:
        found = [cells.get(cell_name(size, batch, name), {}) for size in SIZES for batch in BATCHES]
        if any(ratio in each for each in found):
            yield [name, *(_words(each[ratio]) if ratio in each else "-" for each in found)]


def _words(found: Record) -> str:
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.3f}"
    return f"{found['ratio']:.3f}{half}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
