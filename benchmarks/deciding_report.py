"""What `make bench-deciding` found: tables as Markdown, each bar with whether it holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deciding_cells import BATCHES, MIX, ROWS, SETS, SIZES, Cell, Kept, all_cells
from turns import median_interval

Record = Mapping[str, Any]
Records = Sequence[Record]
_LEAST_EVER, _LEAST_SURE, _LEAST_POOLED = 0.97, 0.98, 0.99  # of row a
_LEAST_OF_BEST = 0.95  # of row b
_MIX_GAIN, _HEURISTIC_LOSS = 1.05, 0.98  # of row c


class Bar(NamedTuple):
    """One thing that must hold: None where nothing was measured, or only a part and nothing against it yet."""

    words: str
    holds: bool | None
    found: str


def bars(kept: Kept) -> list[Bar]:
    rows = {row: [record for record in kept.cells.values() if record["row"] == row] for row in ROWS}
    default, heuristic = rows["a"], rows["c"]
    surely = [record for record in default if record["high"] is not None and record["high"] < _LEAST_SURE]
    names = ", ".join(_place(record) for record in surely) or "none"
    on_mix = [record for record in heuristic if record["set"] == MIX]
    best = f"b: at least {_LEAST_OF_BEST} of the best fixed configuration, each set and size"
    return [
        Bar(f"a: no estimate below {_LEAST_EVER}", _none_below("a", default, _LEAST_EVER), _least(default)),
        Bar(
            f"a: none significantly below {_LEAST_SURE}",
            False if surely else _none_below("a", default, 0.0),
            f"significantly below: {names}",
        ),
        _pooled(default, rows["sweep"]),
        Bar(best, _none_below("b", rows["b"], _LEAST_OF_BEST), _least(rows["b"])),
        Bar(
            f"c: at least {_MIX_GAIN} of the heuristic on {MIX}",
            _none_below("c", on_mix, _MIX_GAIN, MIX),
            _least(on_mix),
        ),
        Bar(
            f"c: never below {_HEURISTIC_LOSS} of the heuristic",
            _none_below("c", heuristic, _HEURISTIC_LOSS),
            _least(heuristic),
        ),
        _same_tokens(kept),
    ]


def _none_below(row: str, records: Records, least: float, only: str = "") -> bool | None:
    """False if one ratio is below, True if all cells of the row (of one set only) are measured and none is."""
    if any(record["ratio"] < least for record in records):
        return False
    wanted = sum(cell.row == row and only in ("", cell.set) for cell in all_cells())
    return True if records and len(records) >= wanted else None


def _least(records: Records) -> str:
    if not records:
        return "not measured"
    worst = min(records, key=lambda record: record["ratio"])
    return f"least {worst['ratio']:.3f}{_interval(worst)}, {_place(worst)}; {len(records)} cells"


def _pooled(default: Records, swept: Records) -> Bar:
    words = f"a: pooled median at least {_LEAST_POOLED} where no swept configuration exceeds 1"
    even = cells_without_gain(default, swept)
    ratios = [ratio for record in even for ratio in record["ratios"]]
    if not ratios:
        return Bar(words, None, "no such cell measured")
    median, (low, high) = statistics.median(ratios), median_interval(ratios)
    middle = statistics.median([record["ratio"] for record in even])
    told = f"{median:.3f} ({low:.3f} to {high:.3f}) over {len(ratios)} turns of {len(even)} cells; "
    told += f"the median of the cells' estimates is {middle:.3f}"
    whole = len(default) == len(swept) == len(SIZES) * len(SETS) * len(BATCHES)
    return Bar(words, False if median < _LEAST_POOLED else whole or None, told)


def cells_without_gain(default: Records, swept: Records) -> list[Record]:
    """Cells of row a in whose sweep no configuration exceeded 1."""
    gains = {_place(record): max(record["speedups"].values()) for record in swept}
    return [record for record in default if gains.get(_place(record), 2.0) <= 1.0]


def _same_tokens(kept: Kept) -> Bar:
    compared = sum(record.get("greedy_compared", 0) for record in kept.cells.values())
    different = [record for record in kept.cells.values() if record.get("greedy_different", 0)]
    told = f"{compared} pairs compared, {sum(each['greedy_different'] for each in different)} different"
    told += "".join(f"; {each['cell']}: {each['greedy_different']}" for each in different)
    return Bar("greedy answers are identical", None if not compared else not different, told)


def markdown(kept: Kept) -> str:
    counts = [sum(record["status"] == status for record in kept.cells.values()) for status in ("missed", "far above")]
    said = [f"{each['machine']['cpu']}, {each['threads']} threads, {each['dtype']}" for each in kept.sittings]
    marks = {True: "holds", False: "**fails**", None: "open"}
    parts = [
        f"Version {kept.key}: {len(kept.cells)} of {len(all_cells())} cells measured, {counts[0]} of them missed "
        f"(their half-width is still above 0.02, marked ~), {counts[1]} ended early, far above their bar with a "
        "half-width of 2 % of their ratio (marked ^). Ratios of times per emitted token, prompts included; the first "
        "round of each cell warmed up and is dropped.",
        f"Measured in {len(said)} sittings on: {'; '.join(dict.fromkeys(said))}." if said else "",
        _table(["bar", "", "found"], [[bar.words, marks[bar.holds], bar.found] for bar in bars(kept)]),
    ]
    for row, words in ROWS.items():
        records = {record["cell"]: record for record in kept.cells.values() if record["row"] == row}
        if records:
            parts.append(f"**{row}: {words}**\n\n" + _row_table(row, records))
    return "\n\n".join(part for part in parts if part)


def _row_table(row: str, records: Mapping[str, Record]) -> str:
    if row == "sweep":
        lines = [[_place(each), each["best"], _speedups(each)] for each in records.values()]
        return f"{_table(['cell', 'best', 'speed-ups'], lines)}\n\n{_families(list(records.values()))}"
    whole = _ratio_table(row, records)
    behind = _ratio_table(row, {name: {**record, **record["decoding"]} for name, record in records.items()})
    return f"{whole}\n\nThe same answers behind their prompts, which are read alike by both:\n\n{behind}"


def _ratio_table(row: str, records: Mapping[str, Record]) -> str:
    cells = [cell for cell in all_cells() if cell.row == row]
    places = list(dict.fromkeys((cell.size, cell.batch) for cell in cells))
    lines = [
        [name, *(_ratio_words(records.get(Cell(row, size, name, batch).name)) for size, batch in places)]
        for name in dict.fromkeys(cell.set for cell in cells)
    ]
    return _table(["set", *(f"{size}, batch {batch}" for size, batch in places)], lines)


def _ratio_words(record: Record | None) -> str:
    if record is None:
        return "-"
    mark = {"missed": "~", "far above": "^"}.get(record["status"], "")
    words = f"{record['ratio']:.3f}{mark}{_interval(record)}"
    return words + (f" over {record['over']}" if record["row"] == "b" else "")


def _interval(record: Record) -> str:
    return "" if record["low"] is None else f" ({record['low']:.3f} to {record['high']:.3f})"


def _speedups(record: Record) -> str:
    found = sorted(record["speedups"].items(), key=lambda each: -each[1])
    return ", ".join(f"{words.replace('num_speculative_tokens=', '')} {value:.2f}" for words, value in found)


def _families(records: Records) -> str:
    """Which drafter when: of each kind the best length on each set, from the set that it serves least to the most."""
    kinds = list(dict.fromkeys(words.partition(",")[0] for each in records for words in each["speedups"]))
    lines = []
    for size, batch in dict.fromkeys((each["size"], each["batch"]) for each in records):
        own = [each["speedups"] for each in records if (each["size"], each["batch"]) == (size, batch)]
        lines.append([f"{size}, {batch}", *(_family(kind, own) for kind in kinds)])
    head = [f"{kind}, best length of each set" for kind in kinds]
    return f"By kind, over {len(SETS)} sets:\n\n{_table(['size, requests', *head], lines)}"


def _family(kind: str, sets: Sequence[Mapping[str, float]]) -> str:
    own = [{words: value for words, value in each.items() if words.partition(",")[0] == kind} for each in sets]
    best = [max(each.items(), key=lambda pair: pair[1]) for each in own if each]
    if not best:
        return "-"
    values = [value for _, value in best]
    lengths = sorted({words.rpartition("=")[2] for words, _ in best}, key=lambda each: (len(each), each))
    shown = lengths[0] if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{min(values):.2f} to {max(values):.2f} with {shown}"


def _place(record: Record) -> str:
    return str(record["cell"]).partition(" | ")[2].replace(" | ", ", ")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
